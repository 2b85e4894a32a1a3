#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "kernels/cuda/persistent_schedule.h"

namespace qwend::cuda {
namespace {

// `n` things over `parts`, as evenly as whole ones go, the larger shares first.
std::vector<int> Even(int n, int parts) {
  std::vector<int> shares(parts, n / parts);
  for (int i = 0; i < n % parts; ++i) ++shares[i];
  return shares;
}

class Scheduler {
 public:
  Scheduler(StepModel model, int clusters, int pass_rows)
      : clusters_(clusters),
        pass_rows_(pass_rows),
        layers_(std::move(model.operators)),
        head_(model.head) {
    s_.arguments = model.arguments;
    s_.arguments.shape.clusters = clusters;
    s_.layers = std::move(model.layers);
    s_.sampler = model.sampler;
  }

  StepSchedule Make() {
    Share();
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (layers_[i].linear == nullptr) continue;
      s_.layers[i].state_map = static_cast<int>(s_.maps.size());
      s_.maps.push_back({layers_[i].linear->rule.state, shape().key_dim, 0});
    }
    for (int block = 0; block < clusters_ * kRanks; ++block) {
      s_.first_command.push_back(static_cast<int>(s_.commands.size()));
      CopiesOf(block / kRanks, block % kRanks, block);
    }
    s_.first_command.push_back(static_cast<int>(s_.commands.size()));
    return std::move(s_);
  }

 private:
  StepShape& shape() { return s_.arguments.shape; }

  int KBlocks() { return shape().hidden / kBoxK; }
  int StreamRows() { return shape().hidden / kRanks; }

  // Heads and the MLP's units as evenly as they go, whoever has more of the ones less of the
  // others; units so many at once that a box has eight rows of each rank. A phase ends with its
  // slowest cluster, so even counts are faster than even bytes.
  void ShareLayer(bool linear) {
    const StepShape& h = shape();
    const int heads = linear ? h.key_heads : h.kv_heads * h.group;
    const int units = static_cast<int>(layers_[0].down->gemv.weight.cols()) / kBoxK;
    const int at_once = units % 2 == 0 ? 2 : 1;
    shape().mlp_box_rows = at_once * kBoxK / kRanks;
    // Query heads of one key-value head that fit in one cluster share its keys and values there.
    const int together = !linear && h.group % kMaxPassHeads == 0 ? kMaxPassHeads : 1;
    std::vector<int> head_shares = Even(heads / together, clusters_);
    for (int& heads_of : head_shares) heads_of *= together;
    std::vector<int> unit_shares = Even(units / at_once, clusters_);
    std::reverse(unit_shares.begin(), unit_shares.end());
    for (int& u : unit_shares) u *= at_once;
    int first_head = 0, first_unit = 0;
    for (int c = 0; c < clusters_; ++c) {
      s_.arguments.shares[linear ? 1 : 0][c] = {first_head, head_shares[c], first_unit,
                                                unit_shares[c]};
      CheckShare(linear, s_.arguments.shares[linear ? 1 : 0][c]);
      first_head += head_shares[c];
      first_unit += unit_shares[c];
    }
  }

  void CheckShare(bool linear, const ClusterShare& c) {
    const StepShape& h = shape();
    const int slice = c.heads * (linear ? h.heads_per_key * h.value_dim : h.head_dim);
    Need(slice <= kMaxSliceK && slice % kBoxK == 0 && c.units * kBoxK <= kMaxSliceK,
         "a cluster's share of ", slice, " or ", c.units * kBoxK, " columns does not fit");
    const int rows = linear ? c.heads * 2 * (h.key_dim + h.heads_per_key * h.value_dim)
                            : (c.heads * (h.gated ? 2 : 1) + 2) * h.head_dim;
    Need(rows <= 128 * kRanks, "a cluster's share of ", rows, " rows of a projection does not fit");
    if (linear) {
      Need(c.heads * h.heads_per_key <= kMaxValueHeads && c.heads * 2 * h.key_dim <= kMixerFloats &&
               slice <= kMaxLinearSliceK,
           "a cluster's share of ", c.heads, " key heads does not fit");
    } else {
      Need(c.heads <= kMaxPassHeads && (c.heads + 2) * h.head_dim <= kMixerFloats,
           "a cluster's share of ", c.heads, " query heads does not fit");
      Need(c.heads == 0 || c.first_head / h.group == (c.first_head + c.heads - 1) / h.group,
           "a cluster's query heads belong to several key-value heads");
    }
  }

  void Share() {
    for (const bool linear : {false, true}) {
      if (std::any_of(layers_.begin(), layers_.end(),
                      [&](const LayerOps& l) { return (l.linear != nullptr) == linear; }))
        ShareLayer(linear);
    }
    const auto& of_linear = s_.arguments.shares[1];
    for (int c = 0; c < clusters_; ++c)
      s_.arguments.in_flight[c] =
          SlotsInFlight(pass_rows_) * (of_linear[c].heads > of_linear[clusters_ - 1].heads ? 2 : 1);
    // All blocks come to the head at the same time.
    const int64_t tiles = CeilDiv(shape().vocab, kTile), blocks = int64_t{clusters_} * kRanks;
    for (int64_t block = 0; block <= blocks; ++block)
      s_.first_head_tile.push_back(static_cast<int>(tiles * block / blocks));
  }

  // A map of a weight, for boxes of `rows` rows and `k_blocks` * 64 columns.
  int MapOf(const TensorView& weight, int rows, int k_blocks) {
    const auto [at, fresh] =
        map_index_.try_emplace({weight.data, rows, k_blocks}, static_cast<int>(s_.maps.size()));
    if (fresh) s_.maps.push_back({weight, rows, k_blocks});
    return at->second;
  }

  void Copy(const TensorView& weight, int row, int k_block, int rows, int k_blocks, int offset) {
    s_.commands.push_back({row, static_cast<int16_t>(k_block),
                           static_cast<int16_t>(MapOf(weight, rows, k_blocks)), offset, 0});
    s_.commands[slot_].bytes += rows * k_blocks * kBoxK * 2;
  }
  void NextSlot() { slot_ = s_.commands.size(); }

  // Boxes of `rows` rows over all of K, 16 rows to a slot, or to two of them.
  void CopyBoxes(const std::vector<WeightRow>& boxes, int rows) {
    const size_t of_slot = kTile / rows;
    for (size_t first = 0; first < boxes.size(); first += of_slot) {
      for (int k = 0; k < KBlocks(); k += SlotColumns(pass_rows_)) {
        const int k_blocks = std::min(KBlocks() - k, SlotColumns(pass_rows_));
        NextSlot();
        for (size_t i = first; i < std::min(first + of_slot, boxes.size()); ++i)
          Copy(*boxes[i].weight, boxes[i].row, k, rows, k_blocks,
               BoxOffset(static_cast<int>(i - first), rows, rows * k_blocks * kBoxK * 2));
      }
    }
  }

  // A rank's rows of an output matrix, columns [first, first + count) * 64.
  void CopySlice(const TensorView& weight, int rank, int first, int count) {
    for (int i = 0; i < count; i += SlotBlocks(pass_rows_)) {
      NextSlot();
      Copy(weight, rank * StreamRows(), first + i, StreamRows(),
           std::min(count - i, SlotBlocks(pass_rows_)), 0);
    }
  }

  // Rows [first, first + count) of a rank's part of a head, in boxes of `rows`.
  void AddRows(std::vector<WeightRow>& boxes, const ops::NormProjections& in,
               const TensorView& view, int head, int first, int count, int rows) {
    for (int i = 0; i < count; i += rows) boxes.push_back(RowOf(in, view, head, first + i));
  }

  void CopyLinear(const LayerOps& ops, int layer, const ClusterShare& share, int rank) {
    if (share.heads == 0) return;
    const StepShape& h = shape();
    const ops::LinearAttention& op = *ops.linear;
    const ops::NormProjections& in = *ops.in;
    const int keys = h.key_dim / kRanks, values = h.value_dim / kRanks;
    const int first_value = share.first_head * h.heads_per_key;
    const int box = BoxRows(h.key_dim);
    std::vector<WeightRow> boxes;
    for (int head = share.first_head; head < share.first_head + share.heads; ++head) {
      const int at = head * h.key_dim + rank * keys;
      AddRows(boxes, in, op.conv.x, 0, at, keys, box);
      AddRows(boxes, in, op.conv.x, 0, h.key_heads * h.key_dim + at, keys, box);
      for (int v = head * h.heads_per_key; v < (head + 1) * h.heads_per_key; ++v)
        AddRows(boxes, in, op.conv.x, 0,
                2 * h.key_heads * h.key_dim + v * h.value_dim + rank * values, values, box);
      for (int v = head * h.heads_per_key; v < (head + 1) * h.heads_per_key; ++v)
        AddRows(boxes, in, op.norm.z, v, rank * values, values, box);
    }
    if (rank < KBlocks()) {
      const WeightRow b = RowOf(in, op.gates.b, 0, first_value);
      const WeightRow a = RowOf(in, op.gates.a, 0, first_value);
      NextSlot();
      Copy(*b.weight, b.row, rank, kMaxValueHeads, 1, kToGates);
      Copy(*a.weight, a.row, rank, kMaxValueHeads, 1, kToGates + kMaxValueHeads * kBoxK * 2);
    }
    CopyBoxes(boxes, box);
    s_.commands.push_back({layer, 0, kCopyState, 0, 0});
    CopySlice(ops.out->gemv.weight, rank, first_value * h.value_dim / kBoxK,
              share.heads * h.heads_per_key * h.value_dim / kBoxK);
  }

  void CopyAttention(const LayerOps& ops, int layer, const ClusterShare& share, int rank) {
    const StepShape& h = shape();
    const ops::DecodeAttention& op = *ops.attention;
    const int rows = h.head_dim / kRanks, kv_head = share.first_head / h.group;
    const int box = BoxRows(h.head_dim);
    std::vector<WeightRow> boxes;
    if (share.heads == 0) return;
    for (int head = share.first_head; head < share.first_head + share.heads; ++head) {
      AddRows(boxes, *ops.in, op.attention.q, head, rank * rows, rows, box);
      if (h.gated) AddRows(boxes, *ops.in, op.gate.gate, head, rank * rows, rows, box);
    }
    AddRows(boxes, *ops.in, op.update.k, kv_head, rank * rows, rows, box);
    AddRows(boxes, *ops.in, op.update.v, kv_head, rank * rows, rows, box);
    CopyBoxes(boxes, box);
    s_.commands.push_back({layer, 0, kCopyCache, 0, 0});
    CopySlice(ops.out->gemv.weight, rank, share.first_head * h.head_dim / kBoxK,
              share.heads * h.head_dim / kBoxK);
  }

  void CopyMlp(const LayerOps& ops, const ClusterShare& share, int rank) {
    const int columns = share.units * kBoxK / kRanks;
    const int first = share.first_unit * kBoxK + rank * columns;
    const int rows = shape().mlp_box_rows;
    std::vector<WeightRow> boxes;
    for (int i = 0; i < columns; i += rows) {
      boxes.push_back({&ops.gate_up->gate.weight, first + i});
      boxes.push_back({&ops.gate_up->up.weight, first + i});
    }
    CopyBoxes(boxes, rows);
    CopySlice(ops.down->gemv.weight, rank, share.first_unit, share.units);
  }

  void CopiesOf(int cluster, int rank, int block) {
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
      const LayerOps& ops = layers_[layer];
      const ClusterShare& share = s_.arguments.shares[ops.linear != nullptr ? 1 : 0][cluster];
      if (ops.linear != nullptr) {
        CopyLinear(ops, static_cast<int>(layer), share, rank);
      } else {
        CopyAttention(ops, static_cast<int>(layer), share, rank);
      }
      CopyMlp(ops, share, rank);
    }
    s_.commands.push_back({0, 0, kCopyHead, 0, 0});
    for (int tile = s_.first_head_tile[block]; tile < s_.first_head_tile[block + 1]; ++tile)
      CopyBoxes({{&head_->head.weight, tile * kTile}}, kTile);
  }

  const int clusters_, pass_rows_;
  const std::vector<LayerOps> layers_;
  const ops::NormHead* const head_;
  std::map<std::tuple<const void*, int, int>, int> map_index_;
  size_t slot_ = 0;  // the command that began the current slot
  StepSchedule s_;
};

}  // namespace

StepSchedule MakeStepSchedule(StepModel model, int clusters, int pass_rows) {
  return Scheduler(std::move(model), clusters, pass_rows).Make();
}

}  // namespace qwend::cuda
