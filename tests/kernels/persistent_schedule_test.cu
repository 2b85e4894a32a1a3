// The persistent plan's schedule, without a device: every element of every weight is copied where
// it is multiplied, slots hold what they announce, and lists that the kernel is not made for are
// refused with a reason.
#include <map>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/persistent_schedule.h"

namespace qwend::cuda {
namespace {

struct Dims {
  int hidden, layers, intermediate, vocab;
  int heads, kv_heads, head_dim, rotary_half;
  bool gated;
  int key_heads, value_heads, linear_dim;  // 0 key heads: attention only, else every second layer
};
constexpr Dims kQwen35{1024, 4, 3584, 24833, 8, 2, 256, 32, true, 16, 16, 128};
constexpr Dims kArticle{896, 2, 4864, 15194, 8, 4, 128, 64, false, 0, 0, 0};
constexpr Dims kDemo{256, 4, 768, 3264, 4, 2, 64, 8, true, 2, 4, 64};
constexpr Dims kSmall{128, 2, 256, 576, 4, 1, 256, 32, true, 2, 2, 128};

// A decode list over addresses that nothing may read.
class FakeModel {
 public:
  explicit FakeModel(const Dims& d) : d_(d), hidden_(Tensor(DType::kF32, {1, d.hidden})) {
    Add(ops::EmbeddingLookup{.out = hidden_,
                             .table = Tensor(DType::kBF16, {d.vocab, d.hidden}),
                             .token_ids = Tensor(DType::kI32, {1})});
    for (int i = 0; i < d.layers; ++i) Layer(d.key_heads > 0 && i % 2 == 0);
    const ops::Gemv head = Project(d.vocab, d.hidden, "head");
    const TensorView rows = Tensor(DType::kU8, {1, int64_t{sizeof(SamplingRow)}});
    const TensorView best = Tensor(DType::kU8, {1, 8});
    Add(ops::NormHead{
        .norm = Norm(), .head = head, .rows = rows, .best = best, .vocab_limit = d.vocab});
    Add(ops::TokenSampler{.tokens = Tensor(DType::kI32, {1}),
                          .logits = head.out,
                          .rows = rows,
                          .vocab_limit = d.vocab,
                          .best = best});
  }

  std::vector<OpCall> calls;
  std::map<const void*, std::pair<TensorView, std::string>> weights;  // that are multiplied

 private:
  TensorView Tensor(DType type, std::initializer_list<int64_t> shape) {
    TensorView v = TensorView::Of(reinterpret_cast<void*>(next_), type, shape);
    next_ += (v.bytes() + 255) / 256 * 256;
    return v;
  }
  template <typename T>
  void Add(const T& op) {
    calls.push_back({op, "op " + std::to_string(calls.size())});
  }
  ops::RmsNorm Norm() { return {.weight = Tensor(DType::kF32, {d_.hidden}), .weight_offset = 1}; }
  ops::Gemv Project(int rows, int cols, const std::string& name) {
    ops::Gemv g{.out = Tensor(DType::kF32, {1, rows}),
                .weight = Tensor(DType::kBF16, {rows, cols})};
    weights[g.weight.data] = {g.weight, name};
    return g;
  }
  StepSequences Sequences() {
    return {.query_start = Tensor(DType::kI32, {2}),
            .row_sequence = Tensor(DType::kI32, {1}),
            .positions = Tensor(DType::kI32, {1}),
            .block_table = Tensor(DType::kI32, {1, 16}),
            .state_slot = Tensor(DType::kI32, {1})};
  }
  void Layer(bool linear) {
    const int inner = linear ? d_.value_heads * d_.linear_dim : d_.heads * d_.head_dim;
    if (linear) {
      Linear();
    } else {
      Attention();
    }
    Add(ops::GemvResidual{.gemv = Project(d_.hidden, inner, "out")});
    Add(ops::NormGateUpSilu{.norm = Norm(),
                            .gate = Project(d_.intermediate, d_.hidden, "gate"),
                            .up = Project(d_.intermediate, d_.hidden, "up")});
    Add(ops::GemvResidual{.gemv = Project(d_.hidden, d_.intermediate, "down")});
  }
  void Linear() {
    const int dim = d_.linear_dim, keys = d_.key_heads * dim, values = d_.value_heads * dim;
    ops::NormProjections in{.norm = Norm(), .count = 3};
    in.projections = {Project(2 * keys + values, d_.hidden, "qkv"), Project(values, d_.hidden, "z"),
                      Project(2 * d_.value_heads, d_.hidden, "gates")};
    Add(in);
    const TensorView qkv = in.projections[0].out, ba = in.projections[2].out;
    ops::LinearAttention op;
    op.conv = {.x = qkv,
               .weight = Tensor(DType::kF32, {qkv.cols(), 4}),
               .state = Tensor(DType::kF32, {2, 3, qkv.cols()}),
               .sequences = Sequences()};
    op.gates = {.a = ba.Slice(1, d_.value_heads, d_.value_heads),
                .b = ba.Slice(1, 0, d_.value_heads),
                .a_log = Tensor(DType::kF32, {d_.value_heads}),
                .dt_bias = Tensor(DType::kF32, {d_.value_heads})};
    op.rule = {.q = qkv.Slice(1, 0, keys).SplitLast(d_.key_heads, dim),
               .k = qkv.Slice(1, keys, keys).SplitLast(d_.key_heads, dim),
               .v = qkv.Slice(1, 2 * keys, values).SplitLast(d_.value_heads, dim),
               .state = Tensor(DType::kF32, {2, d_.value_heads, dim, dim})};
    op.norm = {.z = in.projections[1].out.SplitLast(d_.value_heads, dim),
               .weight = Tensor(DType::kF32, {dim})};
    Add(op);
  }
  void Attention() {
    const int per_head = (d_.gated ? 2 : 1) * d_.head_dim;
    ops::NormProjections in{.norm = Norm(), .count = 3};
    in.projections = {Project(d_.heads * per_head, d_.hidden, "q"),
                      Project(d_.kv_heads * d_.head_dim, d_.hidden, "k"),
                      Project(d_.kv_heads * d_.head_dim, d_.hidden, "v")};
    Add(in);
    const TensorView heads = in.projections[0].out.SplitLast(d_.heads, per_head);
    ops::DecodeAttention op;
    op.attention = {.q = heads.Slice(2, 0, d_.head_dim),
                    .k_pages = Tensor(DType::kBF16, {4, d_.kv_heads, kPageTokens, d_.head_dim}),
                    .sequences = Sequences()};
    op.update = {.k = in.projections[1].out.SplitLast(d_.kv_heads, d_.head_dim),
                 .v = in.projections[2].out.SplitLast(d_.kv_heads, d_.head_dim),
                 .k_pages = op.attention.k_pages,
                 .v_pages = Tensor(DType::kBF16, {4, d_.kv_heads, kPageTokens, d_.head_dim})};
    op.rope = {.cos = Tensor(DType::kF32, {1024, d_.rotary_half}),
               .sin = Tensor(DType::kF32, {1024, d_.rotary_half})};
    if (d_.gated) op.gate = {.x = op.attention.q, .gate = heads.Slice(2, d_.head_dim, d_.head_dim)};
    Add(op);
  }

  const Dims d_;
  uintptr_t next_ = 1 << 20;
  const TensorView hidden_;
};

class Schedule : public testing::TestWithParam<std::tuple<Dims, int, int>> {};

TEST_P(Schedule, CopiesEveryWeightOnceForWhoeverMultipliesIt) {
  const auto& [dims, clusters, pass_rows] = GetParam();
  const FakeModel model(dims);
  const StepSchedule s = MakeStepSchedule(ReadStepModel(model.calls), clusters, pass_rows);
  const int blocks = clusters * kRanks;
  ASSERT_EQ(s.first_command.size(), static_cast<size_t>(blocks + 1));
  ASSERT_EQ(s.first_head_tile.back(), (dims.vocab + 15) / 16);

  std::map<const void*, std::vector<int>> copies;  // of 64 columns of a row
  for (const auto& [data, weight] : model.weights)
    copies[data].resize(weight.first.rows() * weight.first.cols() / kBoxK);
  for (int block = 0; block < blocks; ++block) {
    int announced = 0, copied = 0;
    std::vector<std::pair<int, int>> marked;  // layers, and what is copied there besides weights
    for (int i = s.first_command[block]; i < s.first_command[block + 1]; ++i) {
      const CopyCommand& c = s.commands[i];
      if (c.map < 0) {  // what the block works on besides weights
        marked.push_back({c.row, c.map});
        continue;
      }
      const BoxMap& map = s.maps[c.map];
      const int bytes = map.rows * map.k_blocks * kBoxK * 2;
      if (c.bytes > 0) {
        ASSERT_EQ(copied, announced) << "block " << block << " command " << i;
        announced = c.bytes;
        copied = 0;
      }
      copied += bytes;
      EXPECT_EQ(c.offset % 128, 0);
      if (c.offset >= kToGates) {
        EXPECT_LE(c.offset - kToGates + bytes, 2 * kMaxValueHeads * kBoxK * 2);
      } else {
        EXPECT_LE(c.offset + bytes, SlotStride(pass_rows));
      }
      for (int row = c.row; row < c.row + map.rows && row < map.tensor.rows(); ++row) {
        for (int k = c.k_block; k < c.k_block + map.k_blocks; ++k)
          ++copies[map.tensor.data][row * (map.tensor.cols() / kBoxK) + k];
      }
    }
    ASSERT_EQ(copied, announced) << "block " << block;
    std::vector<std::pair<int, int>> expected;
    for (size_t i = 0; i < s.layers.size(); ++i) {
      const bool linear = s.layers[i].linear;
      if (s.arguments.shares[linear ? 1 : 0][block / kRanks].heads > 0)
        expected.push_back({static_cast<int>(i), linear ? kCopyState : kCopyCache});
    }
    expected.push_back({0, kCopyHead});
    EXPECT_EQ(marked, expected) << "block " << block;
  }
  for (const StepLayer& layer : s.layers) {
    if (layer.linear) EXPECT_EQ(s.maps[layer.state_map].k_blocks, 0);
  }
  for (const auto& [data, weight] : model.weights) {
    // Keys and values are projected by every cluster that attends to them; the gates' boxes of
    // eight rows overlap.
    const std::string& name = weight.second;
    const bool shared = name == "k" || name == "v" || name == "gates";
    const std::vector<int>& count = copies[data];
    for (size_t i = 0; i < count.size(); ++i) {
      if (shared ? count[i] < 1 : count[i] != 1) {
        ADD_FAILURE() << name << ", element " << i << " of " << count.size() << ": copied "
                      << count[i] << " times";
        break;
      }
    }
  }
}

TEST_P(Schedule, SharesOutEveryHeadAndColumn) {
  const auto& [dims, clusters, pass_rows] = GetParam();
  const FakeModel model(dims);
  const StepSchedule s = MakeStepSchedule(ReadStepModel(model.calls), clusters, pass_rows);
  for (const bool linear : {false, true}) {
    if (linear && dims.key_heads == 0) continue;
    int heads = 0, units = 0;
    for (int c = 0; c < clusters; ++c) {
      const ClusterShare& share = s.arguments.shares[linear ? 1 : 0][c];
      EXPECT_EQ(share.first_head, heads);
      EXPECT_EQ(share.first_unit, units);
      heads += share.heads;
      // So that keys and values are read once.
      if (!linear && dims.heads / dims.kv_heads % 2 == 0) EXPECT_EQ(share.heads % 2, 0);
      units += share.units;
    }
    EXPECT_EQ(heads, linear ? dims.key_heads : dims.heads);
    EXPECT_EQ(units * kBoxK, dims.intermediate);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Schedule,
                         testing::Combine(testing::Values(kQwen35, kArticle, kDemo, kSmall),
                                          testing::Values(7, 8), testing::Values(4, 8)));

std::string Refused(const Dims& dims, int clusters = 7, int pass_rows = 4) {
  const FakeModel model(dims);
  try {
    MakeStepSchedule(ReadStepModel(model.calls), clusters, pass_rows);
  } catch (const Refusal& refusal) {
    return refusal.why;
  }
  return "taken";
}

TEST(ScheduleRefusal, NamesWhatDoesNotFit) {
  const auto with = [](Dims dims, auto change) {
    change(dims);
    return Refused(dims);
  };
  EXPECT_EQ(Refused(kQwen35), "taken");
  EXPECT_NE(with(kQwen35, [](Dims& d) { d.hidden = 2048; }).find("hidden_size 2048"),
            std::string::npos);
  EXPECT_NE(with(kQwen35, [](Dims& d) { d.intermediate = 3600; }).find("3600"), std::string::npos);
  EXPECT_NE(with(kQwen35, [](Dims& d) { d.linear_dim = 96; }).find("linear heads of 96"),
            std::string::npos);
  EXPECT_NE(with(kArticle, [](Dims& d) { d.head_dim = 96; }).find("head_dim 96"),
            std::string::npos);
  EXPECT_NE(with(kArticle, [](Dims& d) { d.heads = 16; }).find("query heads"), std::string::npos);
  EXPECT_NE(Refused(kQwen35, 2).find("does not fit"), std::string::npos);
}

TEST(ScheduleRefusal, TakesNoOtherList) {
  FakeModel model(kDemo);
  std::swap(model.calls[1], model.calls[2]);
  EXPECT_THROW(ReadStepModel(model.calls), Refusal);
  model.calls.resize(3);
  EXPECT_THROW(ReadStepModel(model.calls), Refusal);
}

}  // namespace
}  // namespace qwend::cuda
