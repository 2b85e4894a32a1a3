// The key-value cache and attention, in one and in three steps.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/support/cpu.h"
#include "tests/support/reference/reference.h"
#include "tests/support/steps.h"
#include "tests/support/tensors.h"

namespace qwend::test {
namespace {

constexpr int64_t kGap = 5;

struct Heads {
  int64_t heads, kv_heads, dim;
};
constexpr Heads kHeads[] = {{1, 1, 16},  {4, 2, 64},  {7, 1, 64}, {14, 2, 64},
                            {2, 2, 128}, {8, 2, 256}, {6, 2, 40}, {3, 1, 5}};

const std::vector<std::vector<SequenceSpec>> kSteps = {
    {{0, 1}},
    {{62, 1}, {63, 1}, {64, 1}, {0, 1}, {130, 1}},  // decode
    {{40, 30}},                                     // prefill over a page's end
    {{30, 9}, {100, 3}, {0, 65}},                   // chunks of several sequences
};

// A cache that holds random keys and values exactly where the step's rows may look, and NaN
// everywhere else.
struct Cache {
  Cache(Rng& rng, const Step& step, const std::vector<SequenceSpec>& specs, const Heads& h,
        DType type)
      : k(type, {step.num_pages, h.kv_heads, kPageTokens, h.dim}, kGap),
        v(type, {step.num_pages, h.kv_heads, kPageTokens, h.dim}, kGap) {
    for (size_t s = 0; s < specs.size(); ++s) {
      for (int p = 0; p < specs[s].past + specs[s].rows; ++p) {
        const auto page =
            static_cast<int64_t>(At(step.block_table, static_cast<int64_t>(s), p / kPageTokens));
        for (int64_t head = 0; head < h.kv_heads; ++head) {
          for (int64_t d = 0; d < h.dim; ++d) {
            Put(k, rng.Normal(1.0f), page, head, p % kPageTokens, d);
            Put(v, rng.Normal(1.0f), page, head, p % kPageTokens, d);
          }
        }
      }
    }
  }
  TestTensor k, v;
};

class AttentionOps : public ::testing::TestWithParam<DType> {
 protected:
  // fn(heads, step, cache, q) for every combination of shapes.
  template <typename Fn>
  void ForEachCase(const Fn& fn) {
    for (const Heads& h : kHeads) {
      for (const auto& specs : kSteps) {
        SCOPED_TRACE("heads " + std::to_string(h.heads) + "/" + std::to_string(h.kv_heads) +
                     " dim " + std::to_string(h.dim) + " first past " +
                     std::to_string(specs[0].past));
        const Step step(rng_, specs);
        const Cache cache(rng_, step, specs, h, GetParam());
        // Queries lie beside gates in the rows of a joint projection.
        const TestTensor joint =
            TestTensor(GetParam(), {step.rows, h.heads, 2 * h.dim}, kGap).Normal(rng_, 2.0f);
        fn(h, step, cache, joint.view().Slice(2, 0, h.dim));
      }
    }
  }

  double rtol() const { return GetParam() == DType::kF32 ? 1e-5 : 1.0 / 128; }

  Rng rng_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, rng_.Trace()};
};

INSTANTIATE_TEST_SUITE_P(Types, AttentionOps, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(AttentionOps, WholeEqualsStepsAndReference) {
  ForEachCase([&](const Heads& h, const Step& step, const Cache& cache, const TensorView& q) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(h.dim));
    const std::vector<int64_t> score_shape = {step.rows, h.heads, step.max_context};
    const std::vector<int64_t> out_shape = {step.rows, h.heads, h.dim};
    const TestTensor scores(DType::kF32, score_shape, kGap), scores_want = scores.Copy();

    ops::QkDot dot{.scores = scores,
                   .q = q,
                   .k_pages = cache.k,
                   .lengths = step.lengths,
                   .sequences = step.Sequences(),
                   .scale = scale};
    RunCpu(dot, 3);
    dot.scores = scores_want;
    reference::Run(dot);
    const auto expect_scores = [&](double rtol, double atol) {
      EXPECT_TRUE(scores.GuardsIntact());
      for (int64_t t = 0; t < step.rows; ++t) {
        const auto length = static_cast<int64_t>(At(step.lengths, t));
        const auto seen = [&](const TestTensor& s) {
          return s.view().Slice(0, t, 1).Slice(2, 0, length);
        };
        EXPECT_TRUE(Close(seen(scores), seen(scores_want), rtol, atol)) << "row " << t;
        if (length == step.max_context) continue;
        const auto beyond = [&](const TestTensor& s) {
          return s.view().Slice(0, t, 1).Slice(2, length, step.max_context - length);
        };
        EXPECT_TRUE(SameBits(beyond(scores), beyond(scores_want))) << "row " << t;
      }
    };
    expect_scores(2e-6, 4e-6);

    RunCpu(ops::SoftmaxMask{.scores = scores, .lengths = step.lengths}, 3);
    reference::Run(ops::SoftmaxMask{.scores = scores_want, .lengths = step.lengths});
    expect_scores(2e-5, 1e-9);

    const TestTensor in_steps(GetParam(), out_shape, kGap);
    RunCpu(ops::PvDot{.out = in_steps,
                      .probs = scores,
                      .v_pages = cache.v,
                      .lengths = step.lengths,
                      .sequences = step.Sequences()},
           3);

    const TestTensor whole(GetParam(), out_shape, kGap), want(GetParam(), out_shape);
    ops::Attention attention{.out = whole,
                             .q = q,
                             .k_pages = cache.k,
                             .v_pages = cache.v,
                             .lengths = step.lengths,
                             .sequences = step.Sequences(),
                             .scale = scale};
    RunCpu(attention, 3);
    EXPECT_TRUE(whole.GuardsIntact() && in_steps.GuardsIntact());
    EXPECT_TRUE(SameBits(whole, in_steps));
    attention.out = want;
    reference::Run(attention);
    EXPECT_TRUE(Close(whole, want, rtol(), 4e-6));
  });
}

TEST_P(AttentionOps, ARowsBitsDoNotDependOnOtherRows) {
  ForEachCase([&](const Heads& h, const Step& step, const Cache& cache, const TensorView& q) {
    const std::vector<int64_t> out_shape = {step.rows, h.heads, h.dim};
    const TestTensor together(GetParam(), out_shape), alone(GetParam(), out_shape);
    ops::Attention op{.out = together,
                      .q = q,
                      .k_pages = cache.k,
                      .v_pages = cache.v,
                      .lengths = step.lengths,
                      .sequences = step.Sequences(),
                      .scale = 0.25f};
    RunCpu(op, 3);
    for (int64_t t = 0; t < step.rows; ++t) {
      ops::Attention one = op;
      one.out = alone.view().Slice(0, t, 1);
      one.q = q.Slice(0, t, 1);
      one.lengths = step.lengths.view().Slice(0, t, 1);
      one.sequences.row_sequence = step.row_sequence.view().Slice(0, t, 1);
      RunCpu(one);
    }
    EXPECT_TRUE(SameBits(together, alone));
  });
}

TEST_P(AttentionOps, KvCacheUpdateWritesItsSlotsOnly) {
  for (const DType page_type : {DType::kF32, DType::kBF16}) {
    for (const auto& specs : kSteps) {
      const Step step(rng_, specs);
      // Columns of a joint projection.
      const TestTensor joint = TestTensor(GetParam(), {step.rows, 200}, kGap).Normal(rng_);
      const TensorView k = joint.view().Slice(1, 0, 80).SplitLast(2, 40);
      const TensorView v = joint.view().Slice(1, 120, 80).SplitLast(2, 40);
      const std::vector<int64_t> shape = {step.num_pages, 2, kPageTokens, 40};
      const TestTensor k_pages(page_type, shape, kGap), v_pages(page_type, shape, kGap);
      const TestTensor k_want = k_pages.Copy(), v_want = v_pages.Copy();
      ops::KvCacheUpdate op{
          .k = k, .v = v, .k_pages = k_pages, .v_pages = v_pages, .slots = step.slots};
      RunCpu(op, 3);
      op.k_pages = k_want;
      op.v_pages = v_want;
      reference::Run(op);
      EXPECT_TRUE(SameBits(k_pages, k_want));
      EXPECT_TRUE(SameBits(v_pages, v_want));
      EXPECT_TRUE(k_pages.GuardsIntact() && v_pages.GuardsIntact());
    }
  }
}

TEST(CacheMask, FindsSlotsAndLengths) {
  Rng rng;
  SCOPED_TRACE(rng.Trace());
  for (const auto& specs : kSteps) {
    const Step step(rng, specs);
    const TestTensor slots(DType::kI32, {step.rows}), lengths(DType::kI32, {step.rows});
    const TestTensor slots_want(DType::kI32, {step.rows}), lengths_want(DType::kI32, {step.rows});
    RunCpu(ops::CacheMask{.slots = slots, .lengths = lengths, .sequences = step.Sequences()});
    reference::Run(ops::CacheMask{
        .slots = slots_want, .lengths = lengths_want, .sequences = step.Sequences()});
    EXPECT_TRUE(SameBits(slots, slots_want));
    EXPECT_TRUE(SameBits(lengths, lengths_want));
    EXPECT_TRUE(SameBits(slots, step.slots));
    EXPECT_TRUE(slots.GuardsIntact() && lengths.GuardsIntact());
  }
}

TEST(SoftmaxMask, MasksByMinusInfinityInValueAndHandlesExtremes) {
  const TestTensor scores =
      TestTensor(DType::kF32, {1, 1, 20}).Values({-HUGE_VAL, 1000, 1000, -1000, -HUGE_VAL,
                                                  1000,      1000, 900,  NAN,   NAN,
                                                  NAN,       NAN,  NAN,  NAN,   NAN,
                                                  NAN,       NAN,  NAN,  NAN,   NAN});
  const TestTensor lengths = TestTensor(DType::kI32, {1}).Values({8});
  RunCpu(ops::SoftmaxMask{.scores = scores, .lengths = lengths});
  const double want[] = {0, 0.25, 0.25, 0, 0, 0.25, 0.25, std::exp(-100.0) / 4};
  for (int i = 0; i < 8; ++i)
    EXPECT_NEAR(At(scores, 0, 0, i), want[i], 1e-6 * want[i] + 1e-44) << i;
  for (int i = 8; i < 20; ++i) EXPECT_TRUE(std::isnan(At(scores, 0, 0, i))) << i;
}

}  // namespace
}  // namespace qwend::test
