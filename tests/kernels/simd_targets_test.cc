// The operators under every instruction set that they are compiled for: AVX2 and AVX-512 give the
// same bits, and plain C++ the same numbers.
#include "kernels/cpu/simd_targets.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "hwy/highway.h"
#include "tests/support/cpu.h"
#include "tests/support/steps.h"
#include "tests/support/tensors.h"

namespace qwend::test {
namespace {

// The operator's output under one instruction set.
TestTensor Under(int64_t target, const TestTensor& blank,
                 const std::function<void(const TestTensor& out)>& run) {
  TestTensor out = blank.Copy();
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  run(out);
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return out;
}

void ExpectSameUnderAll(const TestTensor& blank,
                        const std::function<void(const TestTensor& out)>& run) {
  const int64_t supported = hwy::SupportedTargets();
  const TestTensor plain = Under(HWY_SCALAR, blank, run);
  TestTensor wide;
  for (const int64_t target : {HWY_AVX2, HWY_AVX3}) {
    if ((supported & target) == 0) continue;
    TestTensor out = Under(target, blank, run);
    EXPECT_TRUE(Close(out, plain, 2e-5, 2e-6)) << hwy::TargetName(target);
    if (wide.view()) {
      EXPECT_TRUE(SameBits(out, wide)) << hwy::TargetName(target);
    }
    wide = std::move(out);
  }
}

TEST(SimdTargets, GiveTheSameResults) {
  Rng rng;
  SCOPED_TRACE(rng.Trace());
  const int64_t n = 1003;
  const TestTensor a = TestTensor(DType::kF32, {2, n}).Normal(rng, 3.0f);
  const TestTensor b = TestTensor(DType::kF32, {2, n}).Normal(rng, 3.0f);
  const TestTensor w = TestTensor(DType::kF32, {n}).Normal(rng);
  const TestTensor row(DType::kF32, {2, n}, 3);
  ExpectSameUnderAll(
      row, [&](const TestTensor& out) { RunCpu(ops::RmsNorm{.out = out, .x = a, .weight = w}); });
  ExpectSameUnderAll(
      row, [&](const TestTensor& out) { RunCpu(ops::SiluMul{.out = out, .gate = a, .up = b}); });

  const std::vector<SequenceSpec> specs = {{0, 37}, {80, 1}};
  const Step step(rng, specs);
  const TestTensor q = TestTensor(DType::kF32, {step.rows, 6, 72}).Normal(rng);
  const TestTensor k = TestTensor(DType::kF32, {step.num_pages, 2, kPageTokens, 72}).Normal(rng);
  const TestTensor v = TestTensor(DType::kF32, {step.num_pages, 2, kPageTokens, 72}).Normal(rng);
  ExpectSameUnderAll(TestTensor(DType::kF32, {step.rows, 6, 72}), [&](const TestTensor& out) {
    RunCpu(ops::Attention{.out = out,
                          .q = q,
                          .k_pages = k,
                          .v_pages = v,
                          .lengths = step.lengths,
                          .sequences = step.Sequences(),
                          .scale = 0.1f});
  });

  const TestTensor taps = TestTensor(DType::kBF16, {300, 4}).Normal(rng);
  const TestTensor x = TestTensor(DType::kF32, {step.rows, 300}).Normal(rng);
  const TestTensor past = TestTensor(DType::kF32, {step.num_slots, 3, 300}).Normal(rng);
  ExpectSameUnderAll(TestTensor(DType::kF32, {step.rows, 300}), [&](const TestTensor& out) {
    const TestTensor state = past.Copy();
    RunCpu(ops::CausalConv1d{
        .out = out, .x = x, .weight = taps, .state = state, .sequences = step.Sequences()});
  });

  const TestTensor dq = TestTensor(DType::kF32, {step.rows, 2, 40}).Normal(rng);
  const TestTensor dk = TestTensor(DType::kF32, {step.rows, 2, 40}).Normal(rng);
  const TestTensor dv = TestTensor(DType::kF32, {step.rows, 2, 90}).Normal(rng);
  const TestTensor beta = TestTensor(DType::kF32, {step.rows, 2}).Uniform(rng, 0, 1);
  const TestTensor decay = TestTensor(DType::kF32, {step.rows, 2}).Uniform(rng, -1, 0);
  const TestTensor start = TestTensor(DType::kF32, {step.num_slots, 2, 40, 90}).Normal(rng, 0.3f);
  ExpectSameUnderAll(TestTensor(DType::kF32, {step.rows, 2, 90}), [&](const TestTensor& out) {
    const TestTensor state = start.Copy();
    RunCpu(ops::GatedDeltaRule{.out = out,
                               .q = dq,
                               .k = dk,
                               .v = dv,
                               .beta = beta,
                               .log_decay = decay,
                               .state = state,
                               .sequences = step.Sequences(),
                               .scale = 0.15f});
  });
}

}  // namespace
}  // namespace qwend::test
