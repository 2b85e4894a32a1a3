// Operators that work row by row, against the reference: embedding, rotary, norms, activations,
// gates.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/support/cpu.h"
#include "tests/support/reference/reference.h"
#include "tests/support/tensors.h"

namespace qwend::test {
namespace {

constexpr int64_t kGap = 5;

struct Tolerance {
  double rtol, atol;
};
Tolerance For(DType t) {
  return t == DType::kF32 ? Tolerance{2e-6, 1e-6} : Tolerance{1.0 / 128, 1e-6};
}

// Every test below runs for both activation types, with weights of each type in turn.
class RowOps : public ::testing::TestWithParam<DType> {
 protected:
  TestTensor Random(std::vector<int64_t> shape, float scale = 1.0f) {
    return TestTensor(GetParam(), std::move(shape), kGap).Normal(rng_, scale);
  }
  TestTensor Output(std::vector<int64_t> shape) {
    return TestTensor(GetParam(), std::move(shape), kGap);
  }
  TestTensor Weight(std::vector<int64_t> shape) {
    constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
    return TestTensor(kTypes[weight_++ % 3], std::move(shape)).Normal(rng_, 0.5f);
  }
  void ExpectMatch(const TestTensor& actual, const TestTensor& expected) {
    const Tolerance t = For(actual.view().dtype);
    EXPECT_TRUE(Close(actual, expected, t.rtol, t.atol));
    EXPECT_TRUE(actual.GuardsIntact());
  }

  Rng rng_;
  int weight_ = 0;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, rng_.Trace()};
};

INSTANTIATE_TEST_SUITE_P(Types, RowOps, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(Name(info.param)); });

constexpr int64_t kWidths[] = {1, 15, 16, 17, 64, 100, 1024};
constexpr int64_t kRowCounts[] = {1, 3, 40};

TEST_P(RowOps, EmbeddingLookupTakesRowsOfTheTable) {
  for (const DType table_type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const TestTensor table = TestTensor(table_type, {9, 33}, kGap).Normal(rng_);
    const TestTensor ids = TestTensor(DType::kI32, {4}).Values({8, 0, 3, 8});
    const TestTensor out = Output({4, 33}), want = Output({4, 33});
    RunCpu(ops::EmbeddingLookup{.out = out, .table = table, .token_ids = ids}, 3);
    reference::Run(ops::EmbeddingLookup{.out = want, .table = table, .token_ids = ids});
    EXPECT_TRUE(SameBits(out, want));
    EXPECT_TRUE(out.GuardsIntact());
  }
}

TEST_P(RowOps, RmsNorm) {
  for (const int64_t hidden : kWidths) {
    for (const int64_t rows : kRowCounts) {
      SCOPED_TRACE("hidden " + std::to_string(hidden) + " rows " + std::to_string(rows));
      const TestTensor x = Random({rows, hidden}, 3.0f), w = Weight({hidden});
      const TestTensor out = Output({rows, hidden}), want = Output({rows, hidden});
      ops::RmsNorm op{.out = out, .x = x, .weight = w, .eps = 1e-5f, .weight_offset = 1.0f};
      RunCpu(op, 3);
      const TestTensor alone = Output({1, hidden});
      RunCpu(ops::RmsNorm{.out = alone,
                          .x = x.view().Slice(0, rows - 1, 1),
                          .weight = w,
                          .eps = 1e-5f,
                          .weight_offset = 1.0f});
      EXPECT_TRUE(SameBits(alone, out.view().Slice(0, rows - 1, 1)));
      op.out = want;
      reference::Run(op);
      ExpectMatch(out, want);
    }
  }
}

TEST_P(RowOps, RmsNormInParts) {
  for (const int splits : {2, 3, 8}) {
    for (const int64_t hidden : {7, 100, 1024}) {
      const TestTensor x = Random({3, hidden}), w = Weight({hidden});
      const TestTensor out = Output({3, hidden}), want = Output({3, hidden});
      const TestTensor sums(DType::kF32, {3, splits}, kGap);
      ops::RmsNorm op{
          .out = out, .x = x, .weight = w, .partial_sums = sums, .eps = 1e-6f, .splits = splits};
      RunCpu(op);
      op.out = want;
      reference::Run(op);
      ExpectMatch(out, want);
      EXPECT_TRUE(sums.GuardsIntact());
      for (int64_t t = 0; t < 3; ++t) {
        double whole = 0, parts = 0;
        for (int64_t i = 0; i < hidden; ++i) whole += At(x, t, i) * At(x, t, i);
        for (int64_t p = 0; p < splits; ++p) parts += At(sums, t, p);
        EXPECT_NEAR(parts, whole, 1e-5 * whole);
      }
    }
  }
}

TEST_P(RowOps, TinyAndZeroRowsStayFinite) {
  const TestTensor w = Weight({64});
  const TestTensor x = Random({2, 64}, 1e-18f);
  for (int64_t i = 0; i < 64; ++i) Put(x, 0.0, 1, i);
  const TestTensor out = Output({2, 64}), want = Output({2, 64});
  ops::RmsNorm op{.out = out, .x = x, .weight = w};
  RunCpu(op);
  op.out = want;
  reference::Run(op);
  ExpectMatch(out, want);
}

TEST_P(RowOps, RmsNormResidualFusedEqualsAddThenNorm) {
  for (const int64_t hidden : kWidths) {
    const TestTensor b = Random({5, hidden}), w = Weight({hidden});
    TestTensor a = Random({5, hidden});
    const TestTensor sum = Output({5, hidden}), out = Output({5, hidden});
    const TestTensor sum_apart = Output({5, hidden}), out_apart = Output({5, hidden});
    RunCpu(ops::ResidualAdd{.out = sum_apart, .a = a, .b = b});
    RunCpu(ops::RmsNorm{.out = out_apart, .x = sum_apart, .weight = w});
    RunCpu(ops::RmsNormResidualFused{.out = out, .sum = sum, .a = a, .b = b, .weight = w}, 3);
    EXPECT_TRUE(SameBits(sum, sum_apart));
    EXPECT_TRUE(SameBits(out, out_apart));
    EXPECT_TRUE(sum.GuardsIntact() && out.GuardsIntact());

    const TestTensor sum_want = Output({5, hidden}), out_want = Output({5, hidden});
    reference::Run(
        ops::RmsNormResidualFused{.out = out_want, .sum = sum_want, .a = a, .b = b, .weight = w});
    ExpectMatch(sum, sum_want);
    ExpectMatch(out, out_want);

    // The sum may take the place of `a`.
    RunCpu(ops::RmsNormResidualFused{.out = out, .sum = a, .a = a, .b = b, .weight = w});
    EXPECT_TRUE(SameBits(a, sum_apart));
    EXPECT_TRUE(SameBits(out, out_apart));
  }
}

TEST_P(RowOps, QkNorm) {
  for (const int64_t dim : {16, 40, 128, 256}) {
    const TestTensor q_weight = Weight({dim}), k_weight = Weight({dim});
    const TestTensor q = Random({7, 6, dim}), k = Random({7, 2, dim});
    const TestTensor q_want = q.Copy(), k_want = k.Copy();
    ops::QkNorm op{.q = q, .k = k, .q_weight = q_weight, .k_weight = k_weight};
    op.weight_offset = 1.0f;
    RunCpu(op, 3);
    op.q = q_want;
    op.k = k_want;
    reference::Run(op);
    ExpectMatch(q, q_want);
    ExpectMatch(k, k_want);
  }
}

TEST_P(RowOps, RopeEmbedRotatesTheFirstPartOfEachHead) {
  for (const int64_t dim : {16, 64, 128, 256}) {
    for (const int64_t half : {dim / 2, dim / 8, int64_t{3}}) {
      const TestTensor cos = TestTensor(DType::kF32, {50, half}, kGap).Uniform(rng_, -1, 1);
      const TestTensor sin = TestTensor(DType::kF32, {50, half}, kGap).Uniform(rng_, -1, 1);
      const TestTensor positions = TestTensor(DType::kI32, {4}).Values({0, 49, 7, 7});
      const TestTensor q = Random({4, 6, dim}), k = Random({4, 2, dim});
      const TestTensor q_want = q.Copy(), k_want = k.Copy();
      ops::RopeEmbed op{.q = q, .k = k, .cos = cos, .sin = sin, .positions = positions};
      RunCpu(op, 3);
      op.q = q_want;
      op.k = k_want;
      reference::Run(op);
      ExpectMatch(q, q_want);
      ExpectMatch(k, k_want);
    }
  }
}

TEST_P(RowOps, ResidualAddMayWriteOverItsInput) {
  for (const int64_t hidden : kWidths) {
    const TestTensor a = Random({40, hidden}), b = Random({40, hidden});
    const TestTensor want = Output({40, hidden});
    reference::Run(ops::ResidualAdd{.out = want, .a = a, .b = b});
    RunCpu(ops::ResidualAdd{.out = a, .a = a, .b = b}, 3);
    EXPECT_TRUE(SameBits(a, want));
    EXPECT_TRUE(a.GuardsIntact());
  }
}

TEST_P(RowOps, SiluMulOverTheWholeRange) {
  for (const int64_t width : kWidths) {
    for (const float scale : {1.0f, 60.0f}) {
      const TestTensor gate = Random({9, width}, scale), up = Random({9, width});
      const TestTensor out = Output({9, width}), want = Output({9, width});
      RunCpu(ops::SiluMul{.out = out, .gate = gate, .up = up}, 3);
      reference::Run(ops::SiluMul{.out = want, .gate = gate, .up = up});
      ExpectMatch(out, want);
    }
  }
  // Where e^x overflows or vanishes.
  const TestTensor gate = TestTensor(GetParam(), {1, 6}).Values({-1e4, -100, -88, 0, 89, 1e4});
  const TestTensor up = TestTensor(GetParam(), {1, 6}).Values({1, 1, 1, 1, 1, 1});
  const TestTensor out = Output({1, 6});
  RunCpu(ops::SiluMul{.out = out, .gate = gate, .up = up});
  for (const int i : {0, 1, 2, 3}) EXPECT_NEAR(At(out, 0, i), 0.0, 1e-35) << i;
  EXPECT_EQ(At(out, 0, 4), At(gate, 0, 4));
  EXPECT_EQ(At(out, 0, 5), At(gate, 0, 5));
}

TEST_P(RowOps, NanIsNotHidden) {
  const TestTensor gate = TestTensor(GetParam(), {1, 3}).Values({1, NAN, 1});
  const TestTensor up = TestTensor(GetParam(), {1, 3}).Values({1, 1, NAN});
  const TestTensor out = Output({1, 3});
  RunCpu(ops::SiluMul{.out = out, .gate = gate, .up = up});
  EXPECT_FALSE(std::isnan(At(out, 0, 0)));
  EXPECT_TRUE(std::isnan(At(out, 0, 1)));
  EXPECT_TRUE(std::isnan(At(out, 0, 2)));
}

TEST_P(RowOps, OutputGateReadsGatesBesideTheQueries) {
  for (const int64_t dim : {16, 40, 256}) {
    // Rows of a joint projection: each head's query, then its gate.
    const TestTensor joint = Random({5, 4, 2 * dim}, 2.0f);
    const TensorView gate = joint.view().Slice(2, dim, dim);
    const TestTensor x = Random({5, 4, dim}), want = x.Copy();
    RunCpu(ops::OutputGate{.x = x, .gate = gate}, 3);
    reference::Run(ops::OutputGate{.x = want, .gate = gate});
    ExpectMatch(x, want);
  }
}

TEST_P(RowOps, GatedRmsNorm) {
  for (const int64_t dim : {5, 16, 40, 128}) {
    const TestTensor x = Random({7, 3, dim}), z = Random({7, 3, dim}, 4.0f), w = Weight({dim});
    const TestTensor out = Output({7, 3, dim}), want = Output({7, 3, dim});
    ops::GatedRmsNorm op{.out = out, .x = x, .z = z, .weight = w};
    RunCpu(op, 3);
    op.out = want;
    reference::Run(op);
    ExpectMatch(out, want);
  }
}

TEST_P(RowOps, DeltaGates) {
  const TestTensor a = Random({9, 16}, 12.0f), b = Random({9, 16}, 5.0f);
  const TestTensor a_log = TestTensor(DType::kF32, {16}).Normal(rng_), dt_bias = Weight({16});
  const TestTensor beta(DType::kF32, {9, 16}, kGap), decay(DType::kF32, {9, 16}, kGap);
  const TestTensor beta_want(DType::kF32, {9, 16}), decay_want(DType::kF32, {9, 16});
  ops::DeltaGates op{
      .beta = beta, .log_decay = decay, .a = a, .b = b, .a_log = a_log, .dt_bias = dt_bias};
  RunCpu(op, 3);
  op.beta = beta_want;
  op.log_decay = decay_want;
  reference::Run(op);
  ExpectMatch(beta, beta_want);
  ExpectMatch(decay, decay_want);
}

}  // namespace
}  // namespace qwend::test
