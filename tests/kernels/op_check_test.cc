// A valid example of every operator passes; each way to break it is refused with a message that
// names the operator, its tag and layer, the field and its shape.
#include "kernels/op_check.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <type_traits>

namespace qwend {
namespace {

using ::testing::HasSubstr;

alignas(8) char memory[8];  // checks never look at elements

TensorView F32(std::initializer_list<int64_t> shape) {
  return TensorView::Of(memory, DType::kF32, shape);
}
TensorView BF16(std::initializer_list<int64_t> shape) {
  return TensorView::Of(memory, DType::kBF16, shape);
}
TensorView F16(std::initializer_list<int64_t> shape) {
  return TensorView::Of(memory, DType::kF16, shape);
}
TensorView I32(std::initializer_list<int64_t> shape) {
  return TensorView::Of(memory, DType::kI32, shape);
}

// T = 6 rows of S = 2 sequences.
StepSequences Sequences() {
  return {.query_start = I32({3}),
          .row_sequence = I32({6}),
          .positions = I32({6}),
          .block_table = I32({2, 5}),
          .state_slot = I32({2})};
}

template <typename T>
T Valid();
template <>
ops::EmbeddingLookup Valid() {
  return {.out = F32({6, 32}), .table = BF16({100, 32}), .token_ids = I32({6})};
}
template <>
ops::RopeEmbed Valid() {
  return {.q = F32({6, 4, 16}),
          .k = F32({6, 2, 16}),
          .cos = F32({320, 4}),
          .sin = F32({320, 4}),
          .positions = I32({6})};
}
template <>
ops::Gemv Valid() {
  return {.out = F32({6, 48}),
          .x = F32({6, 32}),
          .weight = BF16({48, 32}),
          .bias = F16({48}),
          .partials = F32({3, 6, 48}),
          .splits = 3};
}
template <>
ops::SplitKReduce Valid() {
  return {.out = F32({6, 48}), .partials = F32({3, 6, 48}), .bias = BF16({48})};
}
template <>
ops::RmsNorm Valid() {
  return {.out = F32({6, 32}),
          .x = F32({6, 32}),
          .weight = BF16({32}),
          .partial_sums = F32({6, 4}),
          .splits = 4};
}
template <>
ops::RmsNormResidualFused Valid() {
  return {.out = BF16({6, 32}),
          .sum = F32({6, 32}),
          .a = F32({6, 32}),
          .b = F32({6, 32}),
          .weight = F32({32})};
}
template <>
ops::QkNorm Valid() {
  return {.q = F32({6, 4, 16}), .k = F32({6, 2, 16}), .q_weight = F32({16}), .k_weight = F32({16})};
}
template <>
ops::CacheMask Valid() {
  return {.slots = I32({6}), .lengths = I32({6}), .sequences = Sequences()};
}
template <>
ops::KvCacheUpdate Valid() {
  return {.k = F32({6, 2, 16}),
          .v = F32({6, 2, 16}),
          .k_pages = BF16({9, 2, 64, 16}),
          .v_pages = BF16({9, 2, 64, 16}),
          .slots = I32({6})};
}
template <>
ops::QkDot Valid() {
  return {.scores = F32({6, 4, 320}),
          .q = F32({6, 4, 16}),
          .k_pages = F32({9, 2, 64, 16}),
          .lengths = I32({6}),
          .sequences = Sequences()};
}
template <>
ops::SoftmaxMask Valid() {
  return {.scores = F32({6, 4, 320}), .lengths = I32({6})};
}
template <>
ops::PvDot Valid() {
  return {.out = F32({6, 4, 16}),
          .probs = F32({6, 4, 320}),
          .v_pages = F32({9, 2, 64, 16}),
          .lengths = I32({6}),
          .sequences = Sequences()};
}
template <>
ops::Attention Valid() {
  return {.out = F32({6, 4, 16}),
          .q = F32({6, 4, 16}),
          .k_pages = F32({9, 2, 64, 16}),
          .v_pages = F32({9, 2, 64, 16}),
          .lengths = I32({6}),
          .sequences = Sequences()};
}
template <>
ops::OutputGate Valid() {
  return {.x = F32({6, 4, 16}), .gate = F32({6, 4, 16})};
}
template <>
ops::ResidualAdd Valid() {
  return {.out = F32({6, 32}), .a = F32({6, 32}), .b = F32({6, 32})};
}
template <>
ops::SiluMul Valid() {
  return {.out = F32({6, 32}), .gate = F32({6, 32}), .up = F32({6, 32})};
}
template <>
ops::CausalConv1d Valid() {
  return {.out = F32({6, 40}),
          .x = F32({6, 40}),
          .weight = BF16({40, 4}),
          .state = F32({7, 3, 40}),
          .sequences = Sequences()};
}
template <>
ops::DeltaGates Valid() {
  return {.beta = F32({6, 4}),
          .log_decay = F32({6, 4}),
          .a = F32({6, 4}),
          .b = F32({6, 4}),
          .a_log = F32({4}),
          .dt_bias = BF16({4})};
}
template <>
ops::GatedDeltaRule Valid() {
  return {.out = F32({6, 4, 24}),
          .q = F32({6, 2, 16}),
          .k = F32({6, 2, 16}),
          .v = F32({6, 4, 24}),
          .beta = F32({6, 4}),
          .log_decay = F32({6, 4}),
          .state = F32({7, 4, 16, 24}),
          .sequences = Sequences()};
}
template <>
ops::GatedRmsNorm Valid() {
  return {.out = F32({6, 4, 24}), .x = F32({6, 4, 24}), .z = F32({6, 4, 24}), .weight = F32({24})};
}
template <>
ops::TokenSampler Valid() {
  return {
      .tokens = I32({6}),
      .logits = F32({6, 100}),
      .rows = TensorView::Of(memory, DType::kU8, {6, static_cast<int64_t>(sizeof(SamplingRow))}),
      .vocab_limit = 100};
}

// The same shape with the strides of a contiguous tensor.
TensorView Repacked(TensorView v) {
  int64_t stride = 1;
  for (int d = v.rank - 1; d >= 0; --d) {
    v.strides[d] = stride;
    stride *= v.shape[d];
  }
  return v;
}

// The message with which the operator is refused, empty when it is accepted.
template <typename T>
std::string Refusal(const T& op) {
  try {
    CheckOp({.op = op, .tag = "some_tag", .layer = 7});
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

// One dimension of one field wrong, for every field and dimension; then the type, the memory, and
// the innermost stride.
template <typename T, typename View>
void BreakField(const char* name, View view, bool optional = false) {
  const T valid = Valid<T>();
  const auto expect_refusal = [&](const T& op, const std::string& what) {
    const std::string message = Refusal(op);
    EXPECT_THAT(message, HasSubstr("some_tag")) << name << ": " << what << " was accepted";
    EXPECT_THAT(message, HasSubstr("of layer 7"));
    EXPECT_THAT(message, HasSubstr(name)) << what;
  };
  T op = valid;
  const TensorView good = view(op);
  if (!optional) {
    view(op) = TensorView();
    expect_refusal(op, "absence");
  }
  op = valid;
  view(op).dtype = good.dtype == DType::kU8 ? DType::kF32 : DType::kU8;
  expect_refusal(op, "a wrong type");
  op = valid;
  view(op).data = nullptr;
  expect_refusal(op, "no memory");
  op = valid;
  view(op).rank = good.rank - 1;
  expect_refusal(op, "a lower rank");
  op = valid;
  view(op).shape[0] = 0;
  expect_refusal(op, "an empty tensor");
  op = valid;
  view(op).strides[good.rank - 1] = 2;
  expect_refusal(op, "an inner stride of 2");
}

// A dimension that others must agree with: the message names this operator and some field.
template <typename T, typename View>
void BreakShape(View view, int dimension) {
  T op = Valid<T>();
  view(op).shape[dimension] += 1;
  view(op) = Repacked(view(op));
  const std::string message = Refusal(op);
  EXPECT_THAT(message, HasSubstr("some_tag")) << "dimension " << dimension << " was accepted";
  EXPECT_THAT(message, HasSubstr("must be"));
}

#define FIELD(T, field) #field, [](T & op) -> TensorView& { return op.field; }
#define VIEW(T, field) [](T& op) -> TensorView& { return op.field; }

TEST(OpCheck, AcceptsEveryValidOperator) {
  EXPECT_EQ(Refusal(Valid<ops::EmbeddingLookup>()), "");
  EXPECT_EQ(Refusal(Valid<ops::RopeEmbed>()), "");
  EXPECT_EQ(Refusal(Valid<ops::Gemv>()), "");
  EXPECT_EQ(Refusal(Valid<ops::SplitKReduce>()), "");
  EXPECT_EQ(Refusal(Valid<ops::RmsNorm>()), "");
  EXPECT_EQ(Refusal(Valid<ops::RmsNormResidualFused>()), "");
  EXPECT_EQ(Refusal(Valid<ops::QkNorm>()), "");
  EXPECT_EQ(Refusal(Valid<ops::CacheMask>()), "");
  EXPECT_EQ(Refusal(Valid<ops::KvCacheUpdate>()), "");
  EXPECT_EQ(Refusal(Valid<ops::QkDot>()), "");
  EXPECT_EQ(Refusal(Valid<ops::SoftmaxMask>()), "");
  EXPECT_EQ(Refusal(Valid<ops::PvDot>()), "");
  EXPECT_EQ(Refusal(Valid<ops::Attention>()), "");
  EXPECT_EQ(Refusal(Valid<ops::OutputGate>()), "");
  EXPECT_EQ(Refusal(Valid<ops::ResidualAdd>()), "");
  EXPECT_EQ(Refusal(Valid<ops::SiluMul>()), "");
  EXPECT_EQ(Refusal(Valid<ops::CausalConv1d>()), "");
  EXPECT_EQ(Refusal(Valid<ops::DeltaGates>()), "");
  EXPECT_EQ(Refusal(Valid<ops::GatedDeltaRule>()), "");
  EXPECT_EQ(Refusal(Valid<ops::GatedRmsNorm>()), "");
  EXPECT_EQ(Refusal(Valid<ops::TokenSampler>()), "");
}

TEST(OpCheck, NamesOperatorTagLayerFieldAndShapes) {
  ops::Gemv op = Valid<ops::Gemv>();
  op.weight = BF16({48, 31});
  EXPECT_EQ(Refusal(op),
            "some_tag (Gemv) of layer 7: weight is bf16[48, 31], must be [N K] with K = 32; "
            "x is f32[6, 32]");
}

TEST(OpCheck, RowOperators) {
  using ops::EmbeddingLookup, ops::Gemv, ops::SplitKReduce, ops::RmsNorm;
  BreakField<EmbeddingLookup>(FIELD(EmbeddingLookup, out));
  BreakField<EmbeddingLookup>(FIELD(EmbeddingLookup, table));
  BreakField<EmbeddingLookup>(FIELD(EmbeddingLookup, token_ids));
  BreakShape<EmbeddingLookup>(VIEW(EmbeddingLookup, out), 0);
  BreakShape<EmbeddingLookup>(VIEW(EmbeddingLookup, out), 1);
  BreakField<Gemv>(FIELD(Gemv, out));
  BreakField<Gemv>(FIELD(Gemv, x));
  BreakField<Gemv>(FIELD(Gemv, weight));
  BreakField<Gemv>(FIELD(Gemv, bias), true);
  BreakField<Gemv>(FIELD(Gemv, partials));
  for (const int d : {0, 1}) BreakShape<Gemv>(VIEW(Gemv, out), d);
  for (const int d : {0, 1}) BreakShape<Gemv>(VIEW(Gemv, x), d);
  for (const int d : {0, 1}) BreakShape<Gemv>(VIEW(Gemv, weight), d);
  BreakShape<Gemv>(VIEW(Gemv, bias), 0);
  for (const int d : {0, 1, 2}) BreakShape<Gemv>(VIEW(Gemv, partials), d);
  BreakField<SplitKReduce>(FIELD(SplitKReduce, out));
  BreakField<SplitKReduce>(FIELD(SplitKReduce, partials));
  BreakField<SplitKReduce>(FIELD(SplitKReduce, bias), true);
  for (const int d : {1, 2}) BreakShape<SplitKReduce>(VIEW(SplitKReduce, partials), d);
  BreakField<RmsNorm>(FIELD(RmsNorm, out));
  BreakField<RmsNorm>(FIELD(RmsNorm, x));
  BreakField<RmsNorm>(FIELD(RmsNorm, weight));
  BreakField<RmsNorm>(FIELD(RmsNorm, partial_sums));
  for (const int d : {0, 1}) BreakShape<RmsNorm>(VIEW(RmsNorm, out), d);
  for (const int d : {0, 1}) BreakShape<RmsNorm>(VIEW(RmsNorm, partial_sums), d);
  BreakShape<RmsNorm>(VIEW(RmsNorm, weight), 0);

  using ops::RmsNormResidualFused, ops::ResidualAdd, ops::SiluMul;
  BreakField<RmsNormResidualFused>(FIELD(RmsNormResidualFused, out));
  BreakField<RmsNormResidualFused>(FIELD(RmsNormResidualFused, sum));
  BreakField<RmsNormResidualFused>(FIELD(RmsNormResidualFused, a));
  BreakField<RmsNormResidualFused>(FIELD(RmsNormResidualFused, b));
  BreakField<RmsNormResidualFused>(FIELD(RmsNormResidualFused, weight));
  for (const int d : {0, 1}) {
    BreakShape<RmsNormResidualFused>(VIEW(RmsNormResidualFused, out), d);
    BreakShape<RmsNormResidualFused>(VIEW(RmsNormResidualFused, sum), d);
    BreakShape<RmsNormResidualFused>(VIEW(RmsNormResidualFused, b), d);
    BreakShape<ResidualAdd>(VIEW(ResidualAdd, out), d);
    BreakShape<ResidualAdd>(VIEW(ResidualAdd, b), d);
    BreakShape<SiluMul>(VIEW(SiluMul, out), d);
    BreakShape<SiluMul>(VIEW(SiluMul, up), d);
  }
  BreakField<ResidualAdd>(FIELD(ResidualAdd, out));
  BreakField<ResidualAdd>(FIELD(ResidualAdd, a));
  BreakField<SiluMul>(FIELD(SiluMul, out));
  BreakField<SiluMul>(FIELD(SiluMul, up));
}

TEST(OpCheck, HeadOperators) {
  using ops::RopeEmbed, ops::QkNorm, ops::OutputGate, ops::GatedRmsNorm;
  BreakField<RopeEmbed>(FIELD(RopeEmbed, q));
  BreakField<RopeEmbed>(FIELD(RopeEmbed, k));
  BreakField<RopeEmbed>(FIELD(RopeEmbed, cos));
  BreakField<RopeEmbed>(FIELD(RopeEmbed, sin));
  BreakField<RopeEmbed>(FIELD(RopeEmbed, positions));
  for (const int d : {0, 2}) BreakShape<RopeEmbed>(VIEW(RopeEmbed, k), d);
  for (const int d : {0, 1}) BreakShape<RopeEmbed>(VIEW(RopeEmbed, sin), d);
  BreakShape<RopeEmbed>(VIEW(RopeEmbed, positions), 0);
  ops::RopeEmbed rope = Valid<RopeEmbed>();
  rope.cos = rope.sin = F32({320, 9});
  EXPECT_THAT(Refusal(rope), HasSubstr("rotary_dim = 2 * R = 18 is above D = 16"));

  BreakField<QkNorm>(FIELD(QkNorm, q));
  BreakField<QkNorm>(FIELD(QkNorm, k));
  BreakField<QkNorm>(FIELD(QkNorm, q_weight));
  BreakField<QkNorm>(FIELD(QkNorm, k_weight));
  for (const int d : {0, 2}) BreakShape<QkNorm>(VIEW(QkNorm, k), d);
  BreakShape<QkNorm>(VIEW(QkNorm, q_weight), 0);
  BreakShape<QkNorm>(VIEW(QkNorm, k_weight), 0);
  BreakField<OutputGate>(FIELD(OutputGate, x));
  BreakField<OutputGate>(FIELD(OutputGate, gate));
  for (const int d : {0, 1, 2}) BreakShape<OutputGate>(VIEW(OutputGate, gate), d);
  BreakField<GatedRmsNorm>(FIELD(GatedRmsNorm, out));
  BreakField<GatedRmsNorm>(FIELD(GatedRmsNorm, z));
  BreakField<GatedRmsNorm>(FIELD(GatedRmsNorm, weight));
  for (const int d : {0, 1, 2}) BreakShape<GatedRmsNorm>(VIEW(GatedRmsNorm, z), d);
  for (const int d : {0, 1, 2}) BreakShape<GatedRmsNorm>(VIEW(GatedRmsNorm, out), d);
  BreakShape<GatedRmsNorm>(VIEW(GatedRmsNorm, weight), 0);
}

TEST(OpCheck, CacheAndAttention) {
  using ops::CacheMask, ops::KvCacheUpdate, ops::QkDot, ops::SoftmaxMask, ops::PvDot,
      ops::Attention;
  BreakField<CacheMask>(FIELD(CacheMask, slots));
  BreakField<CacheMask>(FIELD(CacheMask, lengths));
  BreakField<CacheMask>("positions", VIEW(CacheMask, sequences.positions));
  BreakField<CacheMask>("row_sequence", VIEW(CacheMask, sequences.row_sequence));
  BreakField<CacheMask>("block_table", VIEW(CacheMask, sequences.block_table));
  BreakShape<CacheMask>(VIEW(CacheMask, lengths), 0);
  BreakShape<CacheMask>(VIEW(CacheMask, sequences.positions), 0);
  BreakField<KvCacheUpdate>(FIELD(KvCacheUpdate, k));
  BreakField<KvCacheUpdate>(FIELD(KvCacheUpdate, v));
  BreakField<KvCacheUpdate>(FIELD(KvCacheUpdate, k_pages));
  BreakField<KvCacheUpdate>(FIELD(KvCacheUpdate, v_pages));
  BreakField<KvCacheUpdate>(FIELD(KvCacheUpdate, slots));
  for (const int d : {0, 1, 2}) BreakShape<KvCacheUpdate>(VIEW(KvCacheUpdate, v), d);
  for (const int d : {1, 2, 3}) BreakShape<KvCacheUpdate>(VIEW(KvCacheUpdate, k_pages), d);
  for (const int d : {0, 1, 2, 3}) BreakShape<KvCacheUpdate>(VIEW(KvCacheUpdate, v_pages), d);
  BreakField<QkDot>(FIELD(QkDot, scores));
  BreakField<QkDot>(FIELD(QkDot, q));
  BreakField<QkDot>(FIELD(QkDot, k_pages));
  BreakField<QkDot>(FIELD(QkDot, lengths));
  for (const int d : {0, 1}) BreakShape<QkDot>(VIEW(QkDot, scores), d);
  for (const int d : {2, 3}) BreakShape<QkDot>(VIEW(QkDot, k_pages), d);
  BreakField<SoftmaxMask>(FIELD(SoftmaxMask, scores));
  BreakField<SoftmaxMask>(FIELD(SoftmaxMask, lengths));
  BreakShape<SoftmaxMask>(VIEW(SoftmaxMask, lengths), 0);
  BreakField<PvDot>(FIELD(PvDot, out));
  BreakField<PvDot>(FIELD(PvDot, probs));
  BreakField<PvDot>(FIELD(PvDot, v_pages));
  for (const int d : {0, 1}) BreakShape<PvDot>(VIEW(PvDot, probs), d);
  BreakField<Attention>(FIELD(Attention, out));
  BreakField<Attention>(FIELD(Attention, q));
  BreakField<Attention>(FIELD(Attention, k_pages));
  BreakField<Attention>(FIELD(Attention, v_pages));
  BreakField<Attention>("row_sequence", VIEW(Attention, sequences.row_sequence));
  for (const int d : {0, 1, 2}) BreakShape<Attention>(VIEW(Attention, out), d);
  for (const int d : {0, 1, 2, 3}) BreakShape<Attention>(VIEW(Attention, v_pages), d);
  ops::Attention odd = Valid<Attention>();
  odd.k_pages = odd.v_pages = F32({9, 3, 64, 16});
  EXPECT_THAT(Refusal(odd), HasSubstr("H = 4 is not a multiple of KH = 3"));
}

TEST(OpCheck, RecurrentOperators) {
  using ops::CausalConv1d, ops::DeltaGates, ops::GatedDeltaRule;
  BreakField<CausalConv1d>(FIELD(CausalConv1d, out));
  BreakField<CausalConv1d>(FIELD(CausalConv1d, x));
  BreakField<CausalConv1d>(FIELD(CausalConv1d, weight));
  BreakField<CausalConv1d>(FIELD(CausalConv1d, state));
  BreakField<CausalConv1d>("query_start", VIEW(CausalConv1d, sequences.query_start));
  BreakField<CausalConv1d>("state_slot", VIEW(CausalConv1d, sequences.state_slot));
  for (const int d : {0, 1}) BreakShape<CausalConv1d>(VIEW(CausalConv1d, out), d);
  for (const int d : {0, 1}) BreakShape<CausalConv1d>(VIEW(CausalConv1d, weight), d);
  for (const int d : {1, 2}) BreakShape<CausalConv1d>(VIEW(CausalConv1d, state), d);
  BreakShape<CausalConv1d>(VIEW(CausalConv1d, sequences.query_start), 0);
  ops::CausalConv1d conv = Valid<CausalConv1d>();
  conv.weight.strides[0] = 5;
  EXPECT_THAT(Refusal(conv), HasSubstr("gaps"));
  conv = Valid<CausalConv1d>();
  conv.weight = F32({40, 1});
  EXPECT_THAT(Refusal(conv), HasSubstr("at least 2"));
  BreakField<DeltaGates>(FIELD(DeltaGates, beta));
  BreakField<DeltaGates>(FIELD(DeltaGates, log_decay));
  BreakField<DeltaGates>(FIELD(DeltaGates, a_log));
  BreakField<DeltaGates>(FIELD(DeltaGates, dt_bias));
  for (const int d : {0, 1}) BreakShape<DeltaGates>(VIEW(DeltaGates, b), d);
  for (const int d : {0, 1}) BreakShape<DeltaGates>(VIEW(DeltaGates, beta), d);
  BreakShape<DeltaGates>(VIEW(DeltaGates, a_log), 0);
  BreakField<GatedDeltaRule>(FIELD(GatedDeltaRule, out));
  BreakField<GatedDeltaRule>(FIELD(GatedDeltaRule, q));
  BreakField<GatedDeltaRule>(FIELD(GatedDeltaRule, k));
  BreakField<GatedDeltaRule>(FIELD(GatedDeltaRule, v));
  BreakField<GatedDeltaRule>(FIELD(GatedDeltaRule, state));
  for (const int d : {0, 1, 2}) BreakShape<GatedDeltaRule>(VIEW(GatedDeltaRule, k), d);
  for (const int d : {0, 1, 2}) BreakShape<GatedDeltaRule>(VIEW(GatedDeltaRule, out), d);
  for (const int d : {1, 2, 3}) BreakShape<GatedDeltaRule>(VIEW(GatedDeltaRule, state), d);
  for (const int d : {0, 1}) BreakShape<GatedDeltaRule>(VIEW(GatedDeltaRule, log_decay), d);
  ops::GatedDeltaRule delta = Valid<GatedDeltaRule>();
  delta.q = delta.k = F32({6, 3, 16});
  EXPECT_THAT(Refusal(delta), HasSubstr("NV = 4 is not a multiple of NK = 3"));
}

TEST(OpCheck, TokenSampler) {
  using ops::TokenSampler;
  BreakField<TokenSampler>(FIELD(TokenSampler, tokens));
  BreakField<TokenSampler>(FIELD(TokenSampler, logits));
  BreakField<TokenSampler>(FIELD(TokenSampler, rows));
  BreakShape<TokenSampler>(VIEW(TokenSampler, logits), 0);
  for (const int d : {0, 1}) BreakShape<TokenSampler>(VIEW(TokenSampler, rows), d);
  for (const int limit : {0, -1, 101}) {
    TokenSampler op = Valid<TokenSampler>();
    op.vocab_limit = limit;
    EXPECT_THAT(Refusal(op), HasSubstr("vocab_limit is " + std::to_string(limit)));
  }
  TokenSampler op = Valid<TokenSampler>();
  op.rows.data = memory + 4;
  EXPECT_THAT(Refusal(op), HasSubstr("aligned"));
}

TEST(OpCheck, PackedTensorsOnlyWhereABackendReadsThem) {
  ops::Gemv gemv = Valid<ops::Gemv>();
  gemv.weight.layout = Layout::kCpuPanels;
  EXPECT_EQ(Refusal(gemv), "");
  gemv = Valid<ops::Gemv>();
  gemv.x.layout = Layout::kCpuPanels;
  EXPECT_THAT(Refusal(gemv), HasSubstr("x is packed"));
}

TEST(OpCheck, OutputsMustNotOverlapThemselves) {
  ops::ResidualAdd op = Valid<ops::ResidualAdd>();
  op.out.strides[0] = 31;
  EXPECT_THAT(Refusal(op), HasSubstr("overlap"));
  op.out.strides[0] = 64;  // rows with gaps are fine
  EXPECT_EQ(Refusal(op), "");
  op.a.strides[0] = 0;  // and so is one input row for all
  EXPECT_EQ(Refusal(op), "");
}

TEST(OpCheck, SplitsNeedTheirMemoryOnlyWhenSplit) {
  ops::Gemv gemv = Valid<ops::Gemv>();
  gemv.splits = 1;
  gemv.partials = TensorView();
  EXPECT_EQ(Refusal(gemv), "");
  gemv.splits = 0;
  EXPECT_THAT(Refusal(gemv), HasSubstr("splits is 0"));
  ops::RmsNorm norm = Valid<ops::RmsNorm>();
  norm.splits = 0;
  EXPECT_THAT(Refusal(norm), HasSubstr("splits is 0"));
}

}  // namespace
}  // namespace qwend
