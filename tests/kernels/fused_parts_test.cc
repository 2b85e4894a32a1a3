// On the CPU a fused operator gives the bits of its parts, run one by one in their order.
#include <gtest/gtest.h>

#include "tests/support/cpu.h"
#include "tests/support/tensors.h"

namespace qwend::test {
namespace {

constexpr int kRows = 3, kHidden = 40, kInner = 24;

class FusedParts : public ::testing::Test {
 protected:
  TestTensor Random(std::initializer_list<int64_t> shape) {
    return TestTensor(DType::kF32, shape, 5).Normal(rng_);
  }
  TestTensor Weight(int64_t n, int64_t k) {
    return TestTensor(DType::kBF16, {n, k}).Normal(rng_, 0.2f);
  }
  template <typename Fused>
  static void RunParts(const Fused& op) {
    ForEachPart(op, [](const auto& part) { RunCpu(part); });
  }
  static TestTensor Output(int64_t cols) { return TestTensor(DType::kF32, {kRows, cols}, 5); }

  Rng rng_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, rng_.Trace()};
  const TestTensor x_ = Random({kRows, kHidden}), norm_weight_ = Random({kHidden}),
                   first_ = Weight(kInner, kHidden), second_ = Weight(kInner, kHidden);
};

TEST_F(FusedParts, NormProjections) {
  const TestTensor normed[] = {Output(kHidden), Output(kHidden)},
                   a[] = {Output(kInner), Output(kInner)}, b[] = {Output(kInner), Output(kInner)};
  const auto make = [&](int i) {
    ops::NormProjections op{.norm = {.out = normed[i], .x = x_, .weight = norm_weight_},
                            .count = 2};
    op.projections[0] = {.out = a[i], .x = normed[i], .weight = first_};
    op.projections[1] = {.out = b[i], .x = normed[i], .weight = second_};
    return op;
  };
  RunCpu(make(0));
  RunParts(make(1));
  EXPECT_TRUE(SameBits(a[0], a[1]));
  EXPECT_TRUE(SameBits(b[0], b[1]));
}

TEST_F(FusedParts, NormGateUpSilu) {
  const TestTensor normed[] = {Output(kHidden), Output(kHidden)},
                   gate[] = {Output(kInner), Output(kInner)},
                   up[] = {Output(kInner), Output(kInner)},
                   out[] = {Output(kInner), Output(kInner)};
  const auto make = [&](int i) {
    return ops::NormGateUpSilu{.norm = {.out = normed[i], .x = x_, .weight = norm_weight_},
                               .gate = {.out = gate[i], .x = normed[i], .weight = first_},
                               .up = {.out = up[i], .x = normed[i], .weight = second_},
                               .act = {.out = out[i], .gate = gate[i], .up = up[i]}};
  };
  RunCpu(make(0));
  RunParts(make(1));
  EXPECT_TRUE(SameBits(out[0], out[1]));
}

TEST_F(FusedParts, GemvResidualInPlace) {
  const TestTensor b[] = {Output(kInner), Output(kInner)}, start = Random({kRows, kInner}),
                   hidden[] = {start.Copy(), start.Copy()};
  const auto make = [&](int i) {
    return ops::GemvResidual{.gemv = {.out = b[i], .x = x_, .weight = first_},
                             .add = {.out = hidden[i], .a = hidden[i], .b = b[i]}};
  };
  RunCpu(make(0));
  RunParts(make(1));
  EXPECT_TRUE(SameBits(hidden[0], hidden[1]));
  EXPECT_FALSE(SameBits(hidden[0], start));
}

}  // namespace
}  // namespace qwend::test
