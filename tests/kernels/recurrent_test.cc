// CausalConv1d and GatedDeltaRule: against the reference, and whole against in chunks.
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

const std::vector<std::vector<SequenceSpec>> kSteps = {
    {{0, 1}},
    {{5, 1}, {0, 1}, {9, 1}},    // decode
    {{0, 2}, {0, 70}, {64, 5}},  // chunks, one shorter than the convolution
};

class Recurrent : public ::testing::TestWithParam<DType> {
 protected:
  TestTensor Random(std::vector<int64_t> shape, float scale = 1.0f) {
    return TestTensor(GetParam(), std::move(shape), kGap).Normal(rng_, scale);
  }
  double rtol() const { return GetParam() == DType::kF32 ? 1e-5 : 1.0 / 128; }

  Rng rng_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, rng_.Trace()};
};

INSTANTIATE_TEST_SUITE_P(Types, Recurrent, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(Recurrent, CausalConv1dMatchesReference) {
  constexpr DType kWeightTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  int variant = 0;
  for (const int64_t channels : {1, 17, 256, 300, 1000}) {
    for (const int64_t width : {2, 4, 7}) {
      for (const auto& specs : kSteps) {
        SCOPED_TRACE("channels " + std::to_string(channels) + " width " + std::to_string(width));
        const Step step(rng_, specs);
        const TestTensor x = Random({step.rows, channels});
        const TestTensor weight =
            TestTensor(kWeightTypes[variant++ % 3], {channels, width}).Normal(rng_);
        const TestTensor state = Random({step.num_slots, width - 1, channels});
        const TestTensor state_want = state.Copy();
        const TestTensor out(GetParam(), {step.rows, channels}, kGap), want = out.Copy();
        ops::CausalConv1d op{
            .out = out, .x = x, .weight = weight, .state = state, .sequences = step.Sequences()};
        RunCpu(op, 3);
        op.out = want;
        op.state = state_want;
        reference::Run(op);
        EXPECT_TRUE(Close(out, want, rtol(), 1e-6));
        EXPECT_TRUE(SameBits(state, state_want));  // the other slots included
        EXPECT_TRUE(out.GuardsIntact() && state.GuardsIntact());
      }
    }
  }
}

TEST_P(Recurrent, CausalConv1dInChunksEqualsWhole) {
  constexpr int kTokens = 150;
  const TestTensor x = Random({kTokens, 300});
  const TestTensor weight = TestTensor(DType::kBF16, {300, 4}).Normal(rng_);
  const TestTensor start = Random({3, 3, 300});
  const auto run = [&](int chunk, int threads, TestTensor& out, TestTensor& state) {
    for (int t = 0; t < kTokens; t += chunk) {
      const int n = std::min(chunk, kTokens - t);
      const Step step(rng_, {{t, n}});
      const TestTensor slot = TestTensor(DType::kI32, {1}).Values({1});
      StepSequences sequences = step.Sequences();
      sequences.state_slot = slot;
      RunCpu(ops::CausalConv1d{.out = out.view().Slice(0, t, n),
                               .x = x.view().Slice(0, t, n),
                               .weight = weight,
                               .state = state,
                               .sequences = sequences},
             threads);
    }
  };
  TestTensor whole(GetParam(), {kTokens, 300}), whole_state = start.Copy();
  run(kTokens, 3, whole, whole_state);
  for (const int chunk : {1, 2, 7, 64}) {
    TestTensor out(GetParam(), {kTokens, 300}), state = start.Copy();
    run(chunk, chunk == 7 ? 3 : 1, out, state);
    EXPECT_TRUE(SameBits(out, whole)) << "chunk " << chunk;
    EXPECT_TRUE(SameBits(state, whole_state)) << "chunk " << chunk;
  }
}

struct DeltaShape {
  int64_t nk, nv, dk, dv;
};
constexpr DeltaShape kShapes[] = {{1, 1, 16, 16},  {2, 4, 128, 128},  {2, 2, 24, 40},
                                  {1, 3, 7, 5},    {2, 2, 64, 32},    {1, 2, 128, 256},
                                  {2, 6, 32, 100}, {16, 16, 128, 128}};

// The inputs of one GatedDeltaRule; q, k and v are columns of one row, as a convolution leaves
// them.
struct DeltaInputs {
  DeltaInputs(Rng& rng, DType type, const DeltaShape& s, int64_t rows, int64_t slots)
      : mixed(TestTensor(type, {rows, 2 * s.nk * s.dk + s.nv * s.dv}, kGap).Normal(rng)),
        beta(TestTensor(DType::kF32, {rows, s.nv}, kGap).Uniform(rng, 0, 1)),
        log_decay(TestTensor(DType::kF32, {rows, s.nv}, kGap).Uniform(rng, -1.5f, 0)),
        state(TestTensor(DType::kF32, {slots, s.nv, s.dk, s.dv}, kGap).Normal(rng, 0.3f)),
        shape(s) {}

  ops::GatedDeltaRule Op(const TensorView& out, const TensorView& state_view,
                         const StepSequences& sequences, int64_t begin, int64_t count) const {
    const int64_t keys = shape.nk * shape.dk;
    const TensorView rows = mixed.view().Slice(0, begin, count);
    return {.out = out.Slice(0, begin, count),
            .q = rows.Slice(1, 0, keys).SplitLast(shape.nk, shape.dk),
            .k = rows.Slice(1, keys, keys).SplitLast(shape.nk, shape.dk),
            .v = rows.Slice(1, 2 * keys, shape.nv * shape.dv).SplitLast(shape.nv, shape.dv),
            .beta = beta.view().Slice(0, begin, count),
            .log_decay = log_decay.view().Slice(0, begin, count),
            .state = state_view,
            .sequences = sequences,
            .scale = 1.0f / std::sqrt(static_cast<float>(shape.dk))};
  }

  TestTensor mixed, beta, log_decay, state;
  DeltaShape shape;
};

TEST_P(Recurrent, GatedDeltaRuleMatchesReference) {
  for (const DeltaShape& s : kShapes) {
    for (const auto& specs : kSteps) {
      SCOPED_TRACE("heads " + std::to_string(s.nk) + "/" + std::to_string(s.nv) + " dims " +
                   std::to_string(s.dk) + "/" + std::to_string(s.dv));
      const Step step(rng_, specs);
      const DeltaInputs in(rng_, GetParam(), s, step.rows, step.num_slots);
      const TestTensor out(GetParam(), {step.rows, s.nv, s.dv}, kGap), want = out.Copy();
      const TestTensor state = in.state.Copy(), state_want = in.state.Copy();
      RunCpu(in.Op(out, state, step.Sequences(), 0, step.rows), 3);
      reference::Run(in.Op(want, state_want, step.Sequences(), 0, step.rows));
      EXPECT_TRUE(Close(out, want, rtol(), 3e-6));
      EXPECT_TRUE(Close(state, state_want, 1e-5, 3e-6));
      EXPECT_TRUE(out.GuardsIntact() && state.GuardsIntact());
    }
  }
}

TEST_P(Recurrent, GatedDeltaRuleInChunksEqualsWhole) {
  constexpr int kTokens = 150;
  for (const DeltaShape& s : {DeltaShape{2, 4, 128, 128}, DeltaShape{1, 3, 7, 21}}) {
    const DeltaInputs in(rng_, GetParam(), s, kTokens, 3);
    const auto run = [&](int chunk, int threads, TestTensor& out, TestTensor& state) {
      for (int t = 0; t < kTokens; t += chunk) {
        const int n = std::min(chunk, kTokens - t);
        const Step step(rng_, {{t, n}});
        const TestTensor slot = TestTensor(DType::kI32, {1}).Values({1});
        StepSequences sequences = step.Sequences();
        sequences.state_slot = slot;
        RunCpu(in.Op(out, state, sequences, t, n), threads);
      }
    };
    TestTensor whole(GetParam(), {kTokens, s.nv, s.dv}), whole_state = in.state.Copy();
    run(kTokens, 3, whole, whole_state);
    for (const int chunk : {1, 7, 64}) {
      TestTensor out(GetParam(), {kTokens, s.nv, s.dv}), state = in.state.Copy();
      run(chunk, chunk == 7 ? 3 : 1, out, state);
      EXPECT_TRUE(SameBits(out, whole)) << "chunk " << chunk;
      EXPECT_TRUE(SameBits(state, whole_state)) << "chunk " << chunk;
    }
  }
}

TEST_P(Recurrent, SequencesTogetherEqualEachAlone) {
  const DeltaShape s{2, 4, 128, 128};
  const std::vector<SequenceSpec> specs = {{0, 3}, {0, 1}, {0, 66}, {0, 1}};
  const Step step(rng_, specs);
  const DeltaInputs in(rng_, GetParam(), s, step.rows, step.num_slots);
  TestTensor together(GetParam(), {step.rows, s.nv, s.dv}), together_state = in.state.Copy();
  RunCpu(in.Op(together, together_state, step.Sequences(), 0, step.rows), 3);
  TestTensor alone(GetParam(), {step.rows, s.nv, s.dv}), alone_state = in.state.Copy();
  int64_t row = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    const Step one(rng_, {specs[i]});
    StepSequences sequences = one.Sequences();
    sequences.state_slot = step.state_slot.view().Slice(0, static_cast<int64_t>(i), 1);
    RunCpu(in.Op(alone, alone_state, sequences, row, specs[i].rows));
    row += specs[i].rows;
  }
  EXPECT_TRUE(SameBits(together, alone));
  EXPECT_TRUE(SameBits(together_state, alone_state));
}

}  // namespace
}  // namespace qwend::test
