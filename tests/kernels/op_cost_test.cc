// Bytes and operations of each kind of operator, counted by hand for shapes of Qwen3.5-0.8B.
#include "kernels/op_cost.h"

#include <gtest/gtest.h>

namespace qwend {
namespace {

char memory[1];

TensorView F32(std::initializer_list<int64_t> shape) {
  return TensorView::Of(memory, DType::kF32, shape);
}
TensorView BF16(std::initializer_list<int64_t> shape) {
  return TensorView::Of(memory, DType::kBF16, shape);
}
TensorView I32(std::initializer_list<int64_t> shape) {
  return TensorView::Of(memory, DType::kI32, shape);
}
StepSequences Sequences(int64_t rows, int64_t sequences) {
  return {.query_start = I32({sequences + 1}),
          .row_sequence = I32({rows}),
          .positions = I32({rows}),
          .block_table = I32({sequences, 100}),
          .state_slot = I32({sequences})};
}

TEST(OpCost, ProjectionReadsItsWeightOnce) {
  ops::Gemv gemv{.out = F32({1, 3584}), .x = F32({1, 1024}), .weight = BF16({3584, 1024})};
  EXPECT_EQ(CostOf(gemv, 0).bytes, 3584 * 1024 * 2 + 1024 * 4 + 3584 * 4);
  EXPECT_EQ(CostOf(gemv, 0).flops, 2.0 * 3584 * 1024);
  gemv.out = F32({64, 3584});
  gemv.x = F32({64, 1024});
  EXPECT_EQ(CostOf(gemv, 0).bytes, 3584 * 1024 * 2 + 64 * (1024 * 4 + 3584 * 4));
  EXPECT_EQ(CostOf(gemv, 0).flops, 64 * 2.0 * 3584 * 1024);
  // Built for 64 rows, 10 of them real.
  EXPECT_EQ(CostOf(gemv, 0, 10).bytes, 3584 * 1024 * 2 + 10 * (1024 * 4 + 3584 * 4));
  gemv.bias = BF16({3584});
  EXPECT_EQ(CostOf(gemv, 0, 10).bytes, 3584 * 1024 * 2 + 3584 * 2 + 10 * (1024 * 4 + 3584 * 4));
  gemv.splits = 4;  // writes four partial sums, and leaves out and bias to the reduction
  gemv.partials = F32({4, 64, 3584});
  EXPECT_EQ(CostOf(gemv, 0, 10).bytes, 3584 * 1024 * 2 + 10 * (1024 * 4 + 4 * 3584 * 4));
  const ops::SplitKReduce reduce{.out = gemv.out, .partials = gemv.partials, .bias = gemv.bias};
  EXPECT_EQ(CostOf(reduce, 0, 10).bytes, 10 * (4 * 3584 * 4 + 3584 * 4) + 3584 * 2);
}

TEST(OpCost, EmbeddingReadsItsRowsOnly) {
  const ops::EmbeddingLookup op{
      .out = F32({3, 1024}), .table = BF16({248320, 1024}), .token_ids = I32({3})};
  EXPECT_EQ(CostOf(op, 0).bytes, 3 * (1024 * 2 + 1024 * 4 + 4));
  EXPECT_EQ(CostOf(op, 0).flops, 0);
}

TEST(OpCost, AttentionReadsWhatIsVisible) {
  ops::Attention op{.out = F32({4, 8, 256}),
                    .q = F32({4, 8, 256}),
                    .k_pages = F32({100, 2, 64, 256}),
                    .v_pages = F32({100, 2, 64, 256}),
                    .lengths = I32({4}),
                    .sequences = Sequences(4, 4)};
  // Decode: four sequences of 1000 positions on average.
  EXPECT_EQ(CostOf(op, 1000).bytes, 2.0 * 4 * 1000 * 2 * 256 * 4 + 4 * (2 * 8 * 256 * 4 + 4));
  EXPECT_EQ(CostOf(op, 1000).flops, 4.0 * (4 * 8 * 256 + 5 * 8) * 1000);
  // Three of them real.
  EXPECT_EQ(CostOf(op, 1000, 3).bytes, 2.0 * 3 * 1000 * 2 * 256 * 4 + 3 * (2 * 8 * 256 * 4 + 4));
  // Prefill of one sequence from the start: rows see 1, 2, 3 and 4 positions, read once.
  op.sequences = Sequences(4, 1);
  EXPECT_EQ(CostOf(op, 2.5).bytes, 2.0 * 4 * 2 * 256 * 4 + 4 * (2 * 8 * 256 * 4 + 4));

  const ops::QkDot dot{.scores = F32({4, 8, 6400}),
                       .q = op.q,
                       .k_pages = op.k_pages,
                       .lengths = op.lengths,
                       .sequences = Sequences(4, 4)};
  EXPECT_EQ(CostOf(dot, 1000).bytes,
            4 * 1000 * 2 * 256 * 4.0 + 4 * (8 * 256 * 4 + 4) + 4 * 8 * 1000 * 4.0);
  const ops::SoftmaxMask softmax{.scores = dot.scores, .lengths = op.lengths};
  EXPECT_EQ(CostOf(softmax, 1000).bytes, 2 * 4 * 8 * 1000 * 4.0 + 4 * 4);
  const ops::PvDot mix{.out = op.out,
                       .probs = dot.scores,
                       .v_pages = op.v_pages,
                       .lengths = op.lengths,
                       .sequences = Sequences(4, 4)};
  EXPECT_EQ(CostOf(mix, 1000).bytes, CostOf(dot, 1000).bytes);
}

TEST(OpCost, CacheUpdateWritesNewPositionsOnly) {
  const ops::KvCacheUpdate op{.k = F32({3, 2, 256}),
                              .v = F32({3, 2, 256}),
                              .k_pages = BF16({100, 2, 64, 256}),
                              .v_pages = BF16({100, 2, 64, 256}),
                              .slots = I32({3})};
  EXPECT_EQ(CostOf(op, 1000).bytes, 3 * (2 * 2 * 256 * (4 + 2) + 4));
}

TEST(OpCost, RecurrentStatesAreReadAndWritten) {
  ops::GatedDeltaRule delta{.out = F32({2, 16, 128}),
                            .q = F32({2, 16, 128}),
                            .k = F32({2, 16, 128}),
                            .v = F32({2, 16, 128}),
                            .beta = F32({2, 16}),
                            .log_decay = F32({2, 16}),
                            .state = F32({9, 16, 128, 128}),
                            .sequences = Sequences(2, 2)};
  const double row = 4 * 16 * 128 * 4 + 2 * 16 * 4;
  EXPECT_EQ(CostOf(delta, 0).bytes, 2 * row + 2 * 2 * 16 * 128 * 128 * 4);
  EXPECT_EQ(CostOf(delta, 0, 1).bytes, row + 2 * 16 * 128 * 128 * 4);
  EXPECT_EQ(CostOf(delta, 0).flops, 2 * 7.0 * 16 * 128 * 128);
  delta.sequences = Sequences(2, 1);  // two tokens of one sequence: one state
  EXPECT_EQ(CostOf(delta, 0).bytes, 2 * row + 2 * 16 * 128 * 128 * 4);

  const ops::CausalConv1d conv{.out = F32({2, 6144}),
                               .x = F32({2, 6144}),
                               .weight = BF16({6144, 4}),
                               .state = F32({9, 3, 6144}),
                               .sequences = Sequences(2, 2)};
  EXPECT_EQ(CostOf(conv, 0).bytes, 2 * 2 * 6144 * 4 + 6144 * 4 * 2 + 2 * 2 * 3 * 6144 * 4);
}

TEST(OpCost, RowOperators) {
  const TensorView x = F32({3, 1024});
  const TensorView w = BF16({1024});
  EXPECT_EQ(CostOf(ops::RmsNorm{.out = x, .x = x, .weight = w}, 0).bytes, 3 * 2 * 4096 + 2048);
  EXPECT_EQ(
      CostOf(ops::RmsNormResidualFused{.out = x, .sum = x, .a = x, .b = x, .weight = w}, 0).bytes,
      3 * 4 * 4096 + 2048);
  EXPECT_EQ(CostOf(ops::ResidualAdd{.out = x, .a = x, .b = x}, 0).bytes, 3 * 3 * 4096);
  EXPECT_EQ(CostOf(ops::SiluMul{.out = x, .gate = x, .up = x}, 0, 2).bytes, 2 * 3 * 4096);
  const TensorView heads = F32({3, 4, 256});
  EXPECT_EQ(CostOf(ops::OutputGate{.x = heads, .gate = heads}, 0).bytes, 3 * 3 * 4096);
  EXPECT_EQ(CostOf(ops::GatedRmsNorm{.out = heads, .x = heads, .z = heads, .weight = w}, 0).bytes,
            3 * 3 * 4096 + 2048);
  EXPECT_EQ(CostOf(ops::QkNorm{.q = heads, .k = heads, .q_weight = w, .k_weight = w}, 0).bytes,
            3 * 4 * 4096 + 2 * 2048);
  // Rotary: 64 of 256 elements of each of the 8 heads, both ways, and a row of each table.
  const TensorView table = F32({100, 32});
  EXPECT_EQ(
      CostOf(
          ops::RopeEmbed{.q = heads, .k = heads, .cos = table, .sin = table, .positions = I32({3})},
          0)
          .bytes,
      3 * (2 * 8 * 64 * 4 + 2 * 32 * 4 + 4));
  EXPECT_EQ(CostOf(ops::DeltaGates{.beta = F32({3, 16}),
                                   .log_decay = F32({3, 16}),
                                   .a = F32({3, 16}),
                                   .b = F32({3, 16}),
                                   .a_log = F32({16}),
                                   .dt_bias = BF16({16})},
                   0)
                .bytes,
            3 * 4 * 16 * 4 + 16 * 4 + 16 * 2);
  EXPECT_EQ(
      CostOf(ops::CacheMask{.slots = I32({3}), .lengths = I32({3}), .sequences = Sequences(3, 3)},
             0)
          .bytes,
      3 * 5 * 4);
  const auto sampling_bytes = static_cast<int64_t>(sizeof(SamplingRow));
  EXPECT_EQ(
      CostOf(ops::TokenSampler{.tokens = I32({3}),
                               .logits = F32({3, 248320}),
                               .rows = TensorView::Of(memory, DType::kU8, {3, sampling_bytes}),
                               .vocab_limit = 248077},
             0, 1)
          .bytes,
      248320 * 4 + sampling_bytes + 4);
}

}  // namespace
}  // namespace qwend
