#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "kernels/cuda/persistent_schedule.h"

namespace qwend::cuda {
namespace {

constexpr int kQuad = 4;  // rows in the smallest box
constexpr int kOpsPerLayer = 5;
constexpr int kMaxRowsOfTile = 16;

// What the list cannot be for; caught where the schedule is asked for.
struct Refusal {
  std::string why;
};
template <typename... Parts>
void Need(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream why;
  (why << ... << parts);
  throw Refusal{why.str()};
}

template <typename T>
const T& As(const OpCall& call) {
  const T* op = std::get_if<T>(&call.op);
  Need(op != nullptr, "operator ", call.tag, " is not where the fused plan has it");
  return *op;
}

// A layer's five operators.
struct LayerOps {
  const ops::NormProjections* in = nullptr;
  const ops::DecodeAttention* attention = nullptr;
  const ops::LinearAttention* linear = nullptr;
  const ops::GemvResidual* out = nullptr;
  const ops::NormGateUpSilu* gate_up = nullptr;
  const ops::GemvResidual* down = nullptr;
};

// A row of a weight.
struct WeightRow {
  const TensorView* weight;
  int row;
};

const float* FloatVector(const TensorView& v, const char* what) {
  Need(v.dtype == DType::kF32, what, " is ", Name(v.dtype), ", the persistent kernel reads f32");
  return v.As<const float>();
}

const float* Bias(const ops::Gemv& g) { return g.bias ? FloatVector(g.bias, "a bias") : nullptr; }

void NeedWeight(const ops::Gemv& g, const char* what) {
  Need(g.weight.dtype == DType::kBF16 && g.weight.layout == Layout::kRowMajor &&
           g.weight.contiguous() && reinterpret_cast<uintptr_t>(g.weight.data) % 16 == 0,
       what, " must be bf16");
  Need(g.weight.cols() % kBoxK == 0, what, " has ", g.weight.cols(), " columns, no multiple of ",
       kBoxK);
}

// Which weight row makes element (head, element) of `view`, [T, heads, dim], cut out of the output
// of one of the projections.
WeightRow RowOf(const ops::NormProjections& in, const TensorView& view, int head, int element) {
  for (int i = 0; i < in.count; ++i) {
    const ops::Gemv& g = in.projections[i];
    const int64_t offset = view.As<const float>() - g.out.As<const float>();
    if (offset < 0 || offset >= g.out.cols()) continue;
    const int64_t stride = view.rank > 2 ? view.strides[1] : 0;
    return {&g.weight, static_cast<int>(offset + head * stride + element)};
  }
  throw Refusal{"a mixer reads what no projection of its layer makes"};
}

// `n` things over `parts`, as evenly as whole ones go, the larger shares first.
std::vector<int> Even(int n, int parts) {
  std::vector<int> shares(parts, n / parts);
  for (int i = 0; i < n % parts; ++i) ++shares[i];
  return shares;
}

class Scheduler {
 public:
  Scheduler(std::span<const OpCall> calls, int clusters) : calls_(calls), clusters_(clusters) {}

  StepSchedule Make() {
    Read();
    for (const LayerOps& layer : layers_) TakeLayer(layer);
    const StepShape& h = shape();
    Need(h.head_dim != 0, "no layer has attention");
    Need(h.key_dim == 0 || (h.head_dim == 256 && h.key_dim == 128) ||
             (h.head_dim == 64 && h.key_dim == 64),
         "attention heads of ", h.head_dim, " beside linear heads of ", h.key_dim);
    if (clusters_ == 0) return std::move(s_);
    Share();
    for (int block = 0; block < clusters_ * kRanks; ++block) {
      s_.first_command.push_back(static_cast<int>(s_.commands.size()));
      CopiesOf(block / kRanks, block % kRanks, block);
    }
    s_.first_command.push_back(static_cast<int>(s_.commands.size()));
    return std::move(s_);
  }

 private:
  StepShape& shape() { return s_.arguments.shape; }

  void Read() {
    const int count = static_cast<int>(calls_.size());
    Need(count >= 3 + kOpsPerLayer && (count - 3) % kOpsPerLayer == 0, "the list has ", count,
         " operators");
    const auto& embedding = As<ops::EmbeddingLookup>(calls_[0]);
    head_ = &As<ops::NormHead>(calls_[count - 2]);
    s_.sampler = As<ops::TokenSampler>(calls_[count - 1]);
    for (int i = 1; i + 2 < count; i += kOpsPerLayer) {
      LayerOps layer{.in = &As<ops::NormProjections>(calls_[i]),
                     .out = &As<ops::GemvResidual>(calls_[i + 2]),
                     .gate_up = &As<ops::NormGateUpSilu>(calls_[i + 3]),
                     .down = &As<ops::GemvResidual>(calls_[i + 4])};
      layer.linear = std::get_if<ops::LinearAttention>(&calls_[i + 1].op);
      if (layer.linear == nullptr) layer.attention = &As<ops::DecodeAttention>(calls_[i + 1]);
      layers_.push_back(layer);
    }
    StepShape& h = shape();
    h.rows = static_cast<int>(embedding.out.rows());
    h.hidden = static_cast<int>(embedding.out.cols());
    h.layers = static_cast<int>(layers_.size());
    h.clusters = clusters_;
    h.vocab = static_cast<int>(head_->head.weight.rows());
    h.vocab_limit = head_->vocab_limit;
    h.norm_offset = head_->norm.weight_offset;
    h.norm_eps = head_->norm.eps;
    Need(h.hidden <= kMaxStepHidden && h.hidden % (2 * kBoxK) == 0, "hidden_size ", h.hidden,
         " is not a multiple of ", 2 * kBoxK, " up to ", kMaxStepHidden);
    Need(h.layers <= kMaxStepLayers, h.layers, " layers, at most ", kMaxStepLayers);
    Need(embedding.table.dtype == DType::kBF16 && embedding.table.layout == Layout::kRowMajor,
         "the embedding must be bf16");
    NeedWeight(head_->head, "lm_head");
    Need(!head_->head.bias && head_->head.out.dtype == DType::kF32, "the head has a bias");
    StepArguments& a = s_.arguments;
    a.token_ids = embedding.token_ids.As<const int>();
    a.embedding = MakeView<const bf16>(embedding.table);
    a.final_norm = FloatVector(head_->norm.weight, "the final norm");
    a.logits = MakeView<float>(head_->head.out);
    a.sampling = head_->rows.As<const SamplingRow>();
    a.best = head_->best.As<unsigned long long>();
  }

  void TakeLayer(const LayerOps& ops) {
    StepLayer layer;
    layer.linear = ops.linear != nullptr;
    layer.mixer_norm = FloatVector(ops.in->norm.weight, "a norm");
    layer.mlp_norm = FloatVector(ops.gate_up->norm.weight, "a norm");
    for (int i = 0; i < ops.in->count; ++i) NeedWeight(ops.in->projections[i], "a projection");
    for (const ops::Gemv* g :
         {&ops.out->gemv, &ops.down->gemv, &ops.gate_up->gate, &ops.gate_up->up}) {
      NeedWeight(*g, "a projection");
      Need(!g->bias, "output and MLP biases have no place in the persistent kernel");
    }
    Need(ops.in->projections[0].out.dtype == DType::kF32, "activations must be f32");
    for (const ops::RmsNorm* n : {&ops.in->norm, &ops.gate_up->norm}) {
      Need(n->weight_offset == shape().norm_offset && n->eps == shape().norm_eps,
           "the norms of a layer and of the head differ");
    }
    Need(ops.down->gemv.weight.cols() == layers_[0].down->gemv.weight.cols() &&
             ops.gate_up->gate.weight.rows() == ops.down->gemv.weight.cols() &&
             ops.gate_up->up.weight.rows() == ops.down->gemv.weight.cols(),
         "the layers' MLPs differ in size");
    if (layer.linear) {
      TakeLinear(ops, layer);
    } else {
      TakeAttention(ops, layer);
    }
    s_.layers.push_back(layer);
  }

  void TakeSequences(const StepSequences& q) {
    StepArguments& a = s_.arguments;
    a.positions = q.positions.As<const int>();
    a.state_slot = q.state_slot.As<const int>();
    a.block_table = q.block_table.As<const int>();
    a.block_table_stride = q.block_table.strides[0];
    Need(q.state_slot.rows() == shape().rows, "the persistent kernel has one row a sequence");
  }

  void TakeLinear(const LayerOps& ops, StepLayer& layer) {
    const ops::LinearAttention& op = *ops.linear;
    StepShape& h = shape();
    h.key_dim = static_cast<int>(op.rule.k.dim(2));
    h.value_dim = static_cast<int>(op.rule.v.dim(2));
    h.key_heads = static_cast<int>(op.rule.k.dim(1));
    h.heads_per_key = static_cast<int>(op.rule.v.dim(1)) / h.key_heads;
    h.delta_scale = op.rule.scale;
    h.l2_eps = op.rule.l2_eps;
    h.gated_eps = op.norm.eps;
    Need(h.key_dim == h.value_dim && (h.key_dim == 64 || h.key_dim == 128), "linear heads of ",
         h.key_dim, " and ", h.value_dim, "; 64 and 128 are built");
    Need(op.conv.weight.cols() == 4, "a convolution over ", op.conv.weight.cols(),
         " samples; 4 are built");
    for (int i = 0; i < ops.in->count; ++i)
      Need(!ops.in->projections[i].bias, "a linear layer's projection has a bias");
    Need(op.conv.state.dtype == DType::kF32 && op.conv.state.contiguous() &&
             op.rule.state.dtype == DType::kF32 && op.rule.state.contiguous(),
         "convolution and recurrent state must be f32 and contiguous");
    TakeSequences(op.conv.sequences);
    layer.conv_weight = FloatVector(op.conv.weight, "a layer's vector");
    layer.dt_bias = FloatVector(op.gates.dt_bias, "a layer's vector");
    layer.gated_norm = FloatVector(op.norm.weight, "a layer's vector");
    layer.a_log = FloatVector(op.gates.a_log, "A_log");
    layer.conv_state = op.conv.state.As<float>();
    layer.state = op.rule.state.As<float>();
  }

  void TakeAttention(const LayerOps& ops, StepLayer& layer) {
    const ops::DecodeAttention& op = *ops.attention;
    StepShape& h = shape();
    h.head_dim = static_cast<int>(op.attention.q.dim(2));
    h.kv_heads = static_cast<int>(op.attention.k_pages.dim(1));
    h.group = static_cast<int>(op.attention.q.dim(1)) / h.kv_heads;
    h.rotary_half = static_cast<int>(op.rope.cos.cols());
    h.gated = static_cast<bool>(op.gate.x);
    h.head_norms = static_cast<bool>(op.norm.q);
    h.attention_scale = op.attention.scale;
    Need(h.head_dim == 64 || h.head_dim == 128 || h.head_dim == 256, "head_dim ", h.head_dim,
         "; 64, 128 and 256 are built");
    const int lanes = h.rotary_half * kWarp / h.head_dim;
    Need(h.rotary_half <= 64 && h.rotary_half * kWarp % h.head_dim == 0 && lanes > 0 &&
             (lanes & (lanes - 1)) == 0,
         "rotary_dim ", 2 * h.rotary_half, " of ", h.head_dim);
    Need(op.update.k_pages.dtype == DType::kBF16 && op.update.v_pages.dtype == DType::kBF16 &&
             op.update.k_pages.contiguous() && op.update.v_pages.contiguous(),
         "the cache must be bf16 and contiguous");
    Need(op.attention.q.dim(1) % h.kv_heads == 0 && 2 * h.rotary_half <= h.head_dim,
         op.attention.q.dim(1), " query heads for ", h.kv_heads, ", rotary_dim ",
         2 * h.rotary_half);
    TakeSequences(op.attention.sequences);
    if (h.head_norms) {
      h.head_norm_offset = op.norm.weight_offset;
      h.head_norm_eps = op.norm.eps;
      layer.q_norm = FloatVector(op.norm.q_weight, "a layer's vector");
      layer.k_norm = FloatVector(op.norm.k_weight, "a layer's vector");
    }
    Need(!h.gated || !ops.in->projections[0].bias, "gated queries with a bias");
    layer.q_bias = Bias(ops.in->projections[0]);
    layer.k_bias = Bias(ops.in->projections[1]);
    layer.v_bias = Bias(ops.in->projections[2]);
    layer.k_pages = op.update.k_pages.As<bf16>();
    layer.v_pages = op.update.v_pages.As<bf16>();
    s_.arguments.rope_cos = op.rope.cos.As<const float>();
    s_.arguments.rope_sin = op.rope.sin.As<const float>();
  }

  int KBlocks() { return shape().hidden / kBoxK; }
  int StreamRows() { return shape().hidden / kRanks; }

  // Bytes of weights of a cluster's heads in one layer of a kind.
  int64_t MixerBytes(bool linear, int heads) {
    const StepShape& h = shape();
    if (heads == 0) return 0;
    const int64_t in_rows = linear
                                ? int64_t{heads} * 2 * (h.key_dim + h.heads_per_key * h.value_dim)
                                : int64_t{heads} * h.head_dim * (h.gated ? 2 : 1) + 2 * h.head_dim;
    const int64_t out_columns =
        int64_t{heads} * (linear ? h.heads_per_key * h.value_dim : h.head_dim);
    return 2 * h.hidden * (in_rows + out_columns);
  }

  // Heads as evenly as they go; the MLP's units to whoever has least to read.
  void ShareLayer(bool linear) {
    const StepShape& h = shape();
    const int heads = linear ? h.key_heads : h.kv_heads * h.group;
    const int units = static_cast<int>(layers_[0].down->gemv.weight.cols()) / kBoxK;
    const std::vector<int> head_shares = Even(heads, clusters_);
    std::vector<int> unit_shares(clusters_, 0);
    std::vector<int64_t> bytes(clusters_);
    for (int c = 0; c < clusters_; ++c) bytes[c] = MixerBytes(linear, head_shares[c]);
    for (int i = 0; i < units; ++i) {
      const auto least = std::min_element(bytes.begin(), bytes.end());
      *least += int64_t{6} * kBoxK * h.hidden;
      ++unit_shares[least - bytes.begin()];
    }
    int first_head = 0, first_unit = 0;
    for (int c = 0; c < clusters_; ++c) {
      s_.arguments.shares[linear ? 1 : 0][c] = {first_head, head_shares[c], first_unit,
                                                unit_shares[c]};
      CheckShare(linear, s_.arguments.shares[linear ? 1 : 0][c]);
      first_head += head_shares[c];
      first_unit += unit_shares[c];
      bytes_[c] += bytes[c] * std::count_if(layers_.begin(), layers_.end(), [&](const LayerOps& l) {
                     return (l.linear != nullptr) == linear;
                   });
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
      Need(c.heads * h.heads_per_key <= kMaxValueHeads && c.heads * 2 * h.key_dim <= 1024 &&
               2 * c.heads * h.heads_per_key * h.value_dim / kRanks <= 64,
           "a cluster's share of ", c.heads, " key heads does not fit");
    } else {
      Need(c.heads <= kMaxPassHeads && (c.heads + 2) * h.head_dim <= 1024, "a cluster's share of ",
           c.heads, " query heads does not fit");
      Need(c.heads == 0 || c.first_head / h.group == (c.first_head + c.heads - 1) / h.group,
           "a cluster's query heads belong to several key-value heads");
    }
  }

  void Share() {
    bytes_.assign(clusters_, 0);
    for (const bool linear : {false, true}) {
      if (std::any_of(layers_.begin(), layers_.end(),
                      [&](const LayerOps& l) { return (l.linear != nullptr) == linear; }))
        ShareLayer(linear);
    }
    // The head's tiles even out what the layers could not.
    const int tiles = CeilDiv(shape().vocab, kMaxRowsOfTile);
    const int64_t tile_bytes = int64_t{2} * kMaxRowsOfTile * shape().hidden;
    int64_t total = tiles * tile_bytes;
    for (int64_t b : bytes_) total += b;
    std::vector<double> shares(clusters_);
    double sum = 0;
    for (int c = 0; c < clusters_; ++c) {
      shares[c] = std::max<double>(total / clusters_ - bytes_[c], 0);
      sum += shares[c];
    }
    double before = 0;
    for (int c = 0; c < clusters_; ++c) {
      for (int rank = 0; rank < kRanks; ++rank)
        s_.first_head_tile.push_back(
            static_cast<int>(tiles * (before + shares[c] * rank / kRanks) / sum));
      before += shares[c];
    }
    s_.first_head_tile.push_back(tiles);
  }

  // A map of a weight, for boxes of `rows` rows and `k_blocks` * 64 columns.
  int MapOf(const TensorView& weight, int rows, int k_blocks);

  void Copy(const TensorView& weight, int row, int k_block, int rows, int k_blocks, int offset) {
    s_.commands.push_back({row, static_cast<int16_t>(k_block),
                           static_cast<int16_t>(MapOf(weight, rows, k_blocks)), offset, 0});
    s_.commands[slot_].bytes += rows * k_blocks * kBoxK * 2;
  }
  void NextSlot() { slot_ = s_.commands.size(); }

  // Quads of rows, four to a slot, over all of K. `first_slot` adds to the first one.
  template <typename FirstSlot>
  void CopyQuads(const std::vector<WeightRow>& quads, FirstSlot first_slot) {
    const int quad_bytes = kQuad * shape().hidden * 2;
    for (size_t i = 0; i < quads.size(); ++i) {
      if (i % 4 == 0) NextSlot();
      Copy(*quads[i].weight, quads[i].row, 0, kQuad, KBlocks(),
           static_cast<int>(i % 4) * (quad_bytes + kBoxGap));
      if (i == 0) first_slot();
    }
  }

  // A rank's rows of an output matrix, columns [first, first + count) * 64, four blocks to a slot.
  void CopySlice(const TensorView& weight, int rank, int first, int count) {
    const int rows = StreamRows();
    for (int i = 0; i < count; ++i) {
      if (i % 4 == 0) NextSlot();
      Copy(weight, rank * rows, first + i, rows, 1, i % 4 * rows * kBoxK * 2);
    }
  }

  void AddRows(std::vector<WeightRow>& quads, const ops::NormProjections& in,
               const TensorView& view, int head, int first, int count) {
    for (int i = 0; i < count; i += kQuad) quads.push_back(RowOf(in, view, head, first + i));
  }

  void CopyLinear(const LayerOps& ops, const ClusterShare& share, int rank) {
    const StepShape& h = shape();
    const ops::LinearAttention& op = *ops.linear;
    const ops::NormProjections& in = *ops.in;
    const int keys = h.key_dim / kRanks, values = h.value_dim / kRanks;
    const int first_value = share.first_head * h.heads_per_key;
    std::vector<WeightRow> quads;
    for (int head = share.first_head; head < share.first_head + share.heads; ++head) {
      const int at = head * h.key_dim + rank * keys;
      AddRows(quads, in, op.conv.x, 0, at, keys);
      AddRows(quads, in, op.conv.x, 0, h.key_heads * h.key_dim + at, keys);
      for (int v = head * h.heads_per_key; v < (head + 1) * h.heads_per_key; ++v)
        AddRows(quads, in, op.conv.x, 0,
                2 * h.key_heads * h.key_dim + v * h.value_dim + rank * values, values);
      for (int v = head * h.heads_per_key; v < (head + 1) * h.heads_per_key; ++v)
        AddRows(quads, in, op.norm.z, v, rank * values, values);
    }
    CopyQuads(quads, [&] {
      if (rank >= KBlocks()) return;
      const WeightRow b = RowOf(in, op.gates.b, 0, first_value);
      const WeightRow a = RowOf(in, op.gates.a, 0, first_value);
      Copy(*b.weight, b.row, rank, kMaxValueHeads, 1, kGatesAt);
      Copy(*a.weight, a.row, rank, kMaxValueHeads, 1, kGatesAt + kMaxValueHeads * kBoxK * 2);
    });
    CopySlice(ops.out->gemv.weight, rank, first_value * h.value_dim / kBoxK,
              share.heads * h.heads_per_key * h.value_dim / kBoxK);
  }

  void CopyAttention(const LayerOps& ops, const ClusterShare& share, int rank) {
    const StepShape& h = shape();
    const ops::DecodeAttention& op = *ops.attention;
    const int rows = h.head_dim / kRanks, kv_head = share.first_head / h.group;
    std::vector<WeightRow> quads;
    if (share.heads == 0) return;
    for (int head = share.first_head; head < share.first_head + share.heads; ++head) {
      AddRows(quads, *ops.in, op.attention.q, head, rank * rows, rows);
      if (h.gated) AddRows(quads, *ops.in, op.gate.gate, head, rank * rows, rows);
    }
    AddRows(quads, *ops.in, op.update.k, kv_head, rank * rows, rows);
    AddRows(quads, *ops.in, op.update.v, kv_head, rank * rows, rows);
    CopyQuads(quads, [] {});
    CopySlice(ops.out->gemv.weight, rank, share.first_head * h.head_dim / kBoxK,
              share.heads * h.head_dim / kBoxK);
  }

  void CopyMlp(const LayerOps& ops, const ClusterShare& share, int rank) {
    const int columns = share.units * kBoxK / kRanks;
    const int first = share.first_unit * kBoxK + rank * columns;
    std::vector<WeightRow> quads;
    for (int i = 0; i < columns; i += kQuad) {
      quads.push_back({&ops.gate_up->gate.weight, first + i});
      quads.push_back({&ops.gate_up->up.weight, first + i});
    }
    CopyQuads(quads, [] {});
    CopySlice(ops.down->gemv.weight, rank, share.first_unit, share.units);
  }

  void CopiesOf(int cluster, int rank, int block) {
    for (const LayerOps& ops : layers_) {
      const ClusterShare& share = s_.arguments.shares[ops.linear != nullptr ? 1 : 0][cluster];
      if (ops.linear != nullptr) {
        CopyLinear(ops, share, rank);
      } else {
        CopyAttention(ops, share, rank);
      }
      CopyMlp(ops, share, rank);
    }
    for (int tile = s_.first_head_tile[block]; tile < s_.first_head_tile[block + 1]; ++tile) {
      NextSlot();
      Copy(head_->head.weight, tile * kMaxRowsOfTile, 0, kMaxRowsOfTile, KBlocks(), 0);
    }
  }

  std::span<const OpCall> calls_;
  const int clusters_;
  const ops::NormHead* head_ = nullptr;
  std::vector<LayerOps> layers_;
  std::vector<int64_t> bytes_;  // each cluster's, of all layers
  std::map<std::tuple<const void*, int, int>, int> map_index_;
  size_t slot_ = 0;  // the command that began the current slot
  StepSchedule s_;
};

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// From the driver at run time, so that nothing links against it.
EncodeTiled Encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  Check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &result),
        "finding cuTensorMapEncodeTiled");
  Need(function != nullptr, "the driver does not know tensor maps");
  return reinterpret_cast<EncodeTiled>(function);
}

int Scheduler::MapOf(const TensorView& weight, int rows, int k_blocks) {
  const auto [at, fresh] =
      map_index_.try_emplace({weight.data, rows, k_blocks}, static_cast<int>(s_.maps.size()));
  if (!fresh) return at->second;
  static const EncodeTiled encode = Encoder();
  const cuuint64_t sizes[3] = {kBoxK, static_cast<cuuint64_t>(weight.rows()),
                               static_cast<cuuint64_t>(weight.cols() / kBoxK)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(weight.cols() * 2), kBoxK * 2};
  const cuuint32_t box[3] = {kBoxK, static_cast<cuuint32_t>(rows),
                             static_cast<cuuint32_t>(k_blocks)};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, weight.data, sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  Need(status == CUDA_SUCCESS, "the driver refused a tensor map, error ", static_cast<int>(status));
  s_.maps.push_back(map);
  return at->second;
}

}  // namespace

std::optional<StepSchedule> MakeStepSchedule(std::span<const OpCall> calls, int clusters,
                                             std::string& why_not) {
  try {
    return Scheduler(calls, clusters).Make();
  } catch (const Refusal& refusal) {
    why_not = refusal.why;
    return std::nullopt;
  }
}

}  // namespace qwend::cuda
