// Fused operators: a valid one passes; a part that is wrong by itself, a part that does not take
// what the one before gives, and what decode forbids are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <iterator>
#include <string>

#include "kernels/op_check.h"

namespace qwend {
namespace {

using ::testing::HasSubstr;

// A place of its own for each tensor; checks never look at elements.
class FusedOpsCheck : public ::testing::Test {
 protected:
  TensorView New(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView v = TensorView::Of(memory_.data() + used_, dtype, shape);
    used_ += v.bytes() + 63;
    used_ -= used_ % 64;
    Require(used_ <= std::ssize(memory_), "the test's memory is too small");
    return v;
  }
  TensorView F32(std::initializer_list<int64_t> shape) { return New(DType::kF32, shape); }
  TensorView BF16(std::initializer_list<int64_t> shape) { return New(DType::kBF16, shape); }
  TensorView I32(std::initializer_list<int64_t> shape) { return New(DType::kI32, shape); }
  TensorView U8(std::initializer_list<int64_t> shape) { return New(DType::kU8, shape); }

  // T = S = 3 rows.
  StepSequences Sequences() {
    return {.query_start = I32({4}),
            .row_sequence = I32({3}),
            .positions = I32({3}),
            .block_table = I32({3, 5}),
            .state_slot = I32({3})};
  }
  ops::RmsNorm Norm() { return {.out = F32({3, 32}), .x = F32({3, 32}), .weight = F32({32})}; }
  ops::Gemv Product(const TensorView& x, int64_t n) {
    return {.out = F32({3, n}), .x = x, .weight = BF16({n, x.cols()})};
  }
  ops::NormProjections Projections() {
    ops::NormProjections op{.norm = Norm(), .count = 2};
    op.projections[0] = Product(op.norm.out, 48);
    op.projections[1] = Product(op.norm.out, 7);
    return op;
  }
  ops::NormGateUpSilu GateUp() {
    ops::NormGateUpSilu op{.norm = Norm(), .gate = {}, .up = {}, .act = {}};
    op.gate = Product(op.norm.out, 48);
    op.up = Product(op.norm.out, 48);
    op.act = {.out = F32({3, 48}), .gate = op.gate.out, .up = op.up.out};
    return op;
  }
  ops::GemvResidual Residual() {
    ops::GemvResidual op{.gemv = Product(F32({3, 48}), 32), .add = {}};
    const TensorView hidden = F32({3, 32});
    op.add = {.out = hidden, .a = hidden, .b = op.gemv.out};
    return op;
  }
  ops::DecodeAttention Attention() {
    const StepSequences s = Sequences();
    const TensorView q = F32({3, 4, 16}), k = F32({3, 2, 16}), v = F32({3, 2, 16});
    const TensorView k_pages = BF16({2, 2, 64, 16}), v_pages = BF16({2, 2, 64, 16});
    ops::DecodeAttention op{.mask = {.slots = I32({3}), .lengths = I32({3}), .sequences = s},
                            .norm = {.q = q, .k = k, .q_weight = F32({16}), .k_weight = F32({16})},
                            .rope = {.q = q,
                                     .k = k,
                                     .cos = F32({320, 4}),
                                     .sin = F32({320, 4}),
                                     .positions = s.positions},
                            .update = {},
                            .attention = {.out = F32({3, 4, 16}),
                                          .q = q,
                                          .k_pages = k_pages,
                                          .v_pages = v_pages,
                                          .lengths = {},
                                          .sequences = s},
                            .gate = {}};
    op.update = {.k = k, .v = v, .k_pages = k_pages, .v_pages = v_pages, .slots = op.mask.slots};
    op.attention.lengths = op.mask.lengths;
    op.gate = {.x = op.attention.out, .gate = F32({3, 4, 16})};
    return op;
  }
  ops::LinearAttention Mixer() {
    const StepSequences s = Sequences();
    const TensorView mixed = F32({3, 2 * 2 * 16 + 4 * 8}), delta = F32({3, 4, 8});
    ops::LinearAttention op{
        .conv = {.out = mixed,
                 .x = F32({3, 96}),
                 .weight = BF16({96, 4}),
                 .state = F32({5, 3, 96}),
                 .sequences = s},
        .gates = {.beta = F32({3, 4}),
                  .log_decay = F32({3, 4}),
                  .a = F32({3, 4}),
                  .b = F32({3, 4}),
                  .a_log = F32({4}),
                  .dt_bias = F32({4})},
        .rule = {.out = delta,
                 .q = mixed.Slice(1, 0, 32).SplitLast(2, 16),
                 .k = mixed.Slice(1, 32, 32).SplitLast(2, 16),
                 .v = mixed.Slice(1, 64, 32).SplitLast(4, 8),
                 .beta = {},
                 .log_decay = {},
                 .state = F32({5, 4, 16, 8}),
                 .sequences = s},
        .norm = {.out = F32({3, 4, 8}), .x = delta, .z = F32({3, 4, 8}), .weight = F32({8})}};
    op.rule.beta = op.gates.beta;
    op.rule.log_decay = op.gates.log_decay;
    return op;
  }
  ops::NormHead Head() {
    ops::NormHead op{.norm = Norm(),
                     .head = {},
                     .rows = U8({3, static_cast<int64_t>(sizeof(SamplingRow))}),
                     .best = U8({3, 8}),
                     .vocab_limit = 90};
    op.head = Product(op.norm.out, 100);
    return op;
  }

  // The message, or "" for an operator that passes.
  static std::string Refusal(const Op& op) {
    try {
      CheckOp({.op = op, .tag = "fused", .layer = 2});
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  }
  // Whether the operator passes, and is refused with `message` once `view` lies elsewhere.
  template <typename T, typename View>
  void BreakLink(T op, View view, const char* message) {
    ASSERT_EQ(Refusal(op), "");
    view(op).data = memory_.data() + used_ + 64;
    EXPECT_THAT(Refusal(op), HasSubstr(message));
    EXPECT_THAT(Refusal(op), HasSubstr("fused"));
  }

  alignas(64) std::array<char, 1 << 20> memory_;
  int64_t used_ = 0;
};

#define LINK(Type, member) [](ops::Type& op) -> TensorView& { return op.member; }

TEST_F(FusedOpsCheck, ProjectionsTakeTheNorm) {
  BreakLink(Projections(), LINK(NormProjections, projections[1].x), "is not the norm's out");
  BreakLink(GateUp(), LINK(NormGateUpSilu, gate.x), "gate.x is not the norm's out");
  BreakLink(GateUp(), LINK(NormGateUpSilu, up.x), "up.x is not the norm's out");
  BreakLink(GateUp(), LINK(NormGateUpSilu, act.gate), "act.gate is not gate.out");
  BreakLink(GateUp(), LINK(NormGateUpSilu, act.up), "act.up is not up.out");
  BreakLink(Residual(), LINK(GemvResidual, add.b), "add.b is not gemv.out");
  BreakLink(Head(), LINK(NormHead, head.x), "head.x is not the norm's out");
}

TEST_F(FusedOpsCheck, MixersTakeTheirParts) {
  BreakLink(Attention(), LINK(DecodeAttention, rope.q), "rope.q is not attention.q");
  BreakLink(Attention(), LINK(DecodeAttention, update.k), "rope.k is not update.k");
  BreakLink(Attention(), LINK(DecodeAttention, update.slots), "update.slots is not mask.slots");
  BreakLink(Attention(), LINK(DecodeAttention, update.k_pages), "update.k_pages is not");
  BreakLink(Attention(), LINK(DecodeAttention, attention.v_pages), "update.v_pages is not");
  BreakLink(Attention(), LINK(DecodeAttention, attention.lengths), "is not mask.lengths");
  BreakLink(Attention(), LINK(DecodeAttention, norm.q), "norm.q is not rope.q");
  BreakLink(Attention(), LINK(DecodeAttention, norm.k), "norm.k is not rope.k");
  BreakLink(Attention(), LINK(DecodeAttention, gate.x), "gate.x is not attention.out");
  BreakLink(Mixer(), LINK(LinearAttention, rule.q), "rule.q is not conv.out");
  BreakLink(Mixer(), LINK(LinearAttention, rule.k), "rule.k is not conv.out behind q");
  BreakLink(Mixer(), LINK(LinearAttention, rule.v), "rule.v is not conv.out behind k");
  BreakLink(Mixer(), LINK(LinearAttention, rule.beta), "rule.beta is not gates.beta");
  BreakLink(Mixer(), LINK(LinearAttention, rule.log_decay), "is not gates.log_decay");
  BreakLink(Mixer(), LINK(LinearAttention, norm.x), "norm.x is not rule.out");
}

TEST_F(FusedOpsCheck, HeadNormsAndGateAreOptional) {
  ops::DecodeAttention op = Attention();
  op.norm = {};
  op.gate = {};
  EXPECT_EQ(Refusal(op), "");
}

// Three rows, but two sequences.
TEST_F(FusedOpsCheck, DecodeHasOneRowASequence) {
  ops::DecodeAttention attention = Attention();
  const TensorView table = I32({2, 5});
  attention.mask.sequences.block_table = attention.attention.sequences.block_table = table;
  EXPECT_THAT(Refusal(attention), HasSubstr("3 rows for 2"));
  ops::LinearAttention mixer = Mixer();
  for (StepSequences* s : {&mixer.conv.sequences, &mixer.rule.sequences}) {
    s->query_start = I32({3});
    s->state_slot = I32({2});
  }
  EXPECT_THAT(Refusal(mixer), HasSubstr("3 rows for 2"));
}

TEST_F(FusedOpsCheck, PartsAreCheckedByThemselves) {
  ops::NormProjections projections = Projections();
  projections.projections[1].weight.shape[1] = 31;
  EXPECT_THAT(Refusal(projections), HasSubstr("weight is bf16[7, 31]"));
  ops::DecodeAttention attention = Attention();
  attention.update.v.shape[2] = 8;
  EXPECT_THAT(Refusal(attention), HasSubstr("fused (KvCacheUpdate) of layer 2"));
  ops::NormHead head = Head();
  head.norm.weight.shape[0] = 31;
  EXPECT_THAT(Refusal(head), HasSubstr("fused (RmsNorm) of layer 2"));
}

TEST_F(FusedOpsCheck, ProjectionsAreWholeAndFew) {
  for (const int count : {0, -1, ops::NormProjections::kMax + 1}) {
    ops::NormProjections op = Projections();
    op.count = count;
    EXPECT_THAT(Refusal(op), HasSubstr("count is " + std::to_string(count)));
  }
  ops::GemvResidual op = Residual();
  op.gemv.splits = 2;
  op.gemv.partials = F32({2, 3, 32});
  EXPECT_THAT(Refusal(op), HasSubstr("the projection is split"));
}

TEST_F(FusedOpsCheck, HeadKnowsItsRows) {
  ops::NormHead op = Head();
  EXPECT_EQ(Refusal(op), "");
  op.best = U8({3, 4});
  EXPECT_THAT(Refusal(op), HasSubstr("best is u8[3, 4]"));
  op = Head();
  op.rows = U8({3, 16});
  EXPECT_THAT(Refusal(op), HasSubstr("rows is u8[3, 16]"));
  for (const int limit : {0, 101}) {
    op = Head();
    op.vocab_limit = limit;
    EXPECT_THAT(Refusal(op), HasSubstr("vocab_limit is " + std::to_string(limit)));
  }
}

}  // namespace
}  // namespace qwend
