// The tools that say which operator is wrong are themselves tried on wrong operators: a broken
// weight is found at the operator that reads it, a wrong page at the operator that reads or writes
// it.
#include "engine/diff_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "engine/op_outputs.h"
#include "tests/engine/test_model.h"

namespace qwend {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr const char* kHybrid = "tiny-qwen35";  // layers 0 to 2 linear, 3 full attention

// A checkpoint's weights with one tensor changed: every sign turned round, or one element NaN.
class BrokenWeights : public WeightSource {
 public:
  BrokenWeights(WeightSource& whole, std::string broken, bool with_nan = false)
      : whole_(whole), broken_(std::move(broken)), with_nan_(with_nan) {}
  DType weight_type() const override { return whole_.weight_type(); }
  bool found() const { return found_; }

  absl::StatusOr<TensorView> Get(std::string_view name) override {
    absl::StatusOr<TensorView> view = whole_.Get(name);
    if (!view.ok() || name != broken_) return view;
    found_ = true;
    const char* from = view->As<char>();
    memory_.assign(from, from + view->bytes());
    const int size = SizeOf(view->dtype);
    if (with_nan_) {
      std::memset(memory_.data(), 0xff, size);
    } else {
      for (size_t i = size - 1; i < memory_.size(); i += size) memory_[i] ^= '\x80';
    }
    TensorView broken = *view;
    broken.data = memory_.data();
    return broken;
  }

 private:
  WeightSource& whole_;
  const std::string broken_;
  const bool with_nan_;
  bool found_ = false;
  std::vector<char> memory_;
};

DiffRun::Side SideOf(TestModel& model) { return {model.runner(), model.backend()}; }

std::vector<int32_t> Ids(const char* model, const char* prompt) {
  return GoldenFile(GoldenDir(model) / "golden.safetensors").Get(std::string("ids.") + prompt).ids;
}

// A prompt for sequence 1, then `steps` tokens that follow it.
void RunSteps(DiffRun& run, const TestSequence& sequence, const std::vector<int32_t>& ids,
              int steps) {
  const int prompt = static_cast<int>(ids.size()) - steps;
  run.Prefill({.sequence = sequence.view(),
               .tokens = std::span(ids).first(prompt),
               .start_position = 0,
               .sampling = {}});
  for (int i = 0; i < steps; ++i) {
    const DecodeRow row{.sequence = sequence.view(),
                        .token = ids[prompt + i],
                        .position = prompt + i,
                        .sampling = {}};
    run.Decode({&row, 1});
  }
}

class PlanTest : public testing::TestWithParam<DecodePlan> {};
INSTANTIATE_TEST_SUITE_P(Plans, PlanTest,
                         testing::Values(DecodePlan::kExplicit, DecodePlan::kFused),
                         [](const auto& info) {
                           return info.param == DecodePlan::kExplicit ? "explicit_plan" : "fused";
                         });

TEST_P(PlanTest, EagerDecodeGivesTheBitsOfTheCompiledProgram) {
  const std::vector<int32_t> ids = Ids(kHybrid, "mid");
  TestModel model(GoldenDir(kHybrid), {.plan = GetParam()});
  const TestSequence a = model.Sequence(0);
  const TestSequence b = model.Sequence(1);
  int32_t token = model.Prefill(a, ids);
  EXPECT_EQ(model.Prefill(b, ids), token);
  for (int step = 0; step < 5; ++step) {
    const int position = static_cast<int>(ids.size()) + step;
    const int32_t want = model.DecodeOne(a, token, position);
    const std::vector<float> logits = model.runner().LastDecodeLogits(1);
    const DecodeRow row{.sequence = b.view(), .token = token, .position = position, .sampling = {}};
    std::vector<std::string> tags;
    const std::span<const int32_t> got = model.runner().DecodeEagerly(
        {&row, 1}, [&](const OpCall& call) { tags.push_back(call.tag); });
    ASSERT_EQ(std::vector(got.begin(), got.end()), std::vector{want});
    ASSERT_EQ(model.runner().LastDecodeLogits(1), logits);
    ASSERT_GE(tags.size(), 20u);
    EXPECT_EQ(tags.front(),
              GetParam() == DecodePlan::kExplicit ? "cache_mask" : "embedding_lookup");
    EXPECT_EQ(tags.back(), "token_sampler");
    token = want;
  }
}

TEST_P(PlanTest, EqualRunnersDoNotDiffer) {
  TestModel a(GoldenDir(kHybrid), {.plan = GetParam()});
  TestModel b(GoldenDir(kHybrid), {.plan = GetParam()});
  // What lies in the candidate's buffers from before, score columns above all, must not count.
  b.Greedy(b.Sequence(2), Ids(kHybrid, "long"), 3);
  DiffRun run(SideOf(a), SideOf(b), 0);
  RunSteps(run, a.Sequence(1), Ids(kHybrid, "mid"), 3);
  EXPECT_EQ(run.report().First(), nullptr) << run.report().Summary();
  EXPECT_THAT(run.report().unmatched, IsEmpty());
  EXPECT_GT(run.report().operators.size(), 4 * 4 * 10u);
  EXPECT_THAT(run.report().Summary(), HasSubstr("no operator differs by more than 0\n"));
  EXPECT_THAT(run.kv_log().violations(), IsEmpty());
}

struct Broken {
  const char* model;
  const char* tensor;
  DecodePlan plan;
  int layer;
  const char* tag;
  const char* output;
};

class BrokenWeightTest : public testing::TestWithParam<Broken> {};

TEST_P(BrokenWeightTest, TheOperatorThatReadsItIsFirst) {
  const Broken& p = GetParam();
  absl::StatusOr<OpenedModel> opened = OpenModel(GoldenDir(p.model));
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (const bool with_nan : {false, true}) {
    TestModel whole(GoldenDir(p.model), {.plan = p.plan});
    BrokenWeights weights(*opened->weights, p.tensor, with_nan);
    TestModel broken(opened->config.spec, weights, {.plan = p.plan});
    ASSERT_TRUE(weights.found());
    DiffRun run(SideOf(whole), SideOf(broken), 1e-3);
    RunSteps(run, whole.Sequence(1), Ids(p.model, "mid"), 1);
    const OpDifference* first = run.report().First();
    ASSERT_NE(first, nullptr) << p.tensor;
    EXPECT_EQ(first->step, "prefill 0");
    EXPECT_EQ(first->layer, p.layer);
    EXPECT_EQ(first->tag, p.tag);
    EXPECT_EQ(first->output, p.output);
    EXPECT_EQ(std::isinf(first->relative_error), with_nan);
    EXPECT_THAT(run.report().Summary(), HasSubstr(std::string("first difference: prefill 0")));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Tensors, BrokenWeightTest,
    testing::Values(Broken{kHybrid, "layers.0.linear_attn.in_proj_z.weight", DecodePlan::kFused, 0,
                           "prefill_in_proj_z", "out"},
                    Broken{kHybrid, "layers.1.linear_attn.conv1d.weight", DecodePlan::kFused, 1,
                           "prefill_causal_conv1d", "out"},
                    Broken{kHybrid, "layers.2.linear_attn.dt_bias", DecodePlan::kFused, 2,
                           "prefill_delta_gates", "log_decay"},
                    Broken{kHybrid, "layers.1.linear_attn.norm.weight", DecodePlan::kFused, 1,
                           "prefill_gated_rms_norm", "out"},
                    Broken{kHybrid, "layers.1.input_layernorm.weight", DecodePlan::kFused, 0,
                           "prefill_rms_norm_residual_fused", "out"},
                    Broken{kHybrid, "layers.1.input_layernorm.weight", DecodePlan::kExplicit, 1,
                           "prefill_rms_norm", "out"},
                    Broken{kHybrid, "layers.3.self_attn.k_norm.weight", DecodePlan::kFused, 3,
                           "prefill_qk_norm", "k"},
                    Broken{kHybrid, "layers.3.self_attn.o_proj.weight", DecodePlan::kFused, 3,
                           "prefill_attn_out_proj", "out"},
                    Broken{"tiny-llama", "layers.1.mlp.down_proj.weight", DecodePlan::kExplicit, 1,
                           "prefill_down_proj", "out"},
                    Broken{"tiny-qwen2", "layers.0.self_attn.v_proj.bias", DecodePlan::kFused, 0,
                           "prefill_v_proj_gemv", "out"},
                    Broken{kHybrid, "norm.weight", DecodePlan::kFused, -1, "prefill_final_rms_norm",
                           "out"}));

TEST(DiffRun, PlansAreComparedWhereTheyHaveTheSameOutputs) {
  TestModel a(GoldenDir(kHybrid), {.plan = DecodePlan::kExplicit});
  TestModel b(GoldenDir(kHybrid), {.plan = DecodePlan::kFused});
  DiffRun run(SideOf(a), SideOf(b), 1e-5);
  RunSteps(run, a.Sequence(1), Ids(kHybrid, "mid"), 1);
  EXPECT_EQ(run.report().First(), nullptr) << run.report().Summary();
  EXPECT_THAT(
      run.report().unmatched,
      testing::Contains("decode 0, layer 3, qk_dot scores: the reference has more of them"));
  EXPECT_THAT(
      run.report().unmatched,
      testing::Contains("decode 0, layer 3, attention out: the candidate has more of them"));
}

// Two tokens with the same row of the head, and then one bit of the winner's row turned: the choice
// turns round, but the logits hardly move. That is no operator's fault.
class TwinTokens : public WeightSource {
 public:
  TwinTokens(WeightSource& whole, int64_t from, int64_t to, int nudge)
      : whole_(whole), from_(from), to_(to), nudge_(nudge) {}
  DType weight_type() const override { return whole_.weight_type(); }
  absl::StatusOr<TensorView> Get(std::string_view name) override {
    absl::StatusOr<TensorView> view = whole_.Get(name);
    if (!view.ok() || name != "lm_head.weight") return view;
    EXPECT_EQ(view->dtype, DType::kBF16);
    const uint16_t* data = view->As<uint16_t>();
    memory_.assign(data, data + view->elements());
    const int64_t width = view->cols();
    std::copy_n(data + from_ * width, width, memory_.begin() + to_ * width);
    memory_[std::min(from_, to_) * width] += static_cast<uint16_t>(nudge_);
    TensorView twins = *view;
    twins.data = memory_.data();
    return twins;
  }

 private:
  WeightSource& whole_;
  const int64_t from_, to_;
  const int nudge_;
  std::vector<uint16_t> memory_;
};

TEST(DiffRun, ATokenOnTheEdgeIsATie) {
  absl::StatusOr<OpenedModel> opened = OpenModel(GoldenDir("tiny-qwen2"));
  ASSERT_TRUE(opened.ok()) << opened.status();
  ASSERT_FALSE(opened->config.spec.tied_embeddings);
  const std::vector<int32_t> ids = Ids("tiny-qwen2", "mid");
  TestModel plain(GoldenDir("tiny-qwen2"));
  plain.Prefill(plain.Sequence(1), {ids.begin(), ids.end() - 1});
  const int32_t best =
      plain.DecodeOne(plain.Sequence(1), ids.back(), static_cast<int>(ids.size()) - 1);
  const int32_t other = best == 7 ? 8 : 7;
  int turned = 0;
  for (const int nudge : {-1, 1}) {
    TwinTokens equal(*opened->weights, best, other, 0);
    TestModel a(opened->config.spec, equal);
    TwinTokens nudged(*opened->weights, best, other, nudge);
    TestModel b(opened->config.spec, nudged);
    DiffRun run(SideOf(a), SideOf(b), 1e-2);
    RunSteps(run, a.Sequence(1), ids, 1);
    EXPECT_EQ(run.report().First(), nullptr) << run.report().Summary();
    turned += run.report().num_ties;
    // Nearer than the numbers are it is a difference.
    DiffRun strict(SideOf(a), SideOf(b), 0);
    RunSteps(strict, a.Sequence(1), ids, 1);
    ASSERT_NE(strict.report().First(), nullptr);
    EXPECT_EQ(strict.report().First()->tag, "prefill_lm_head_gemv");
    EXPECT_EQ(strict.report().num_ties, 0);
  }
  EXPECT_EQ(turned, 1);
}

TEST(OpOutputs, StridedViewsOfEveryTypeAreRead) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend(1);
  std::vector<uint16_t> halves(2 * 3 * 4);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(0x3f80 + i);
  const TensorView all = TensorView::Of(halves.data(), DType::kBF16, {2, 3, 4});
  EXPECT_THAT(ReadFloats(*backend, all.Slice(1, 1, 1).Slice(2, 1, 2)),
              ElementsAre(1 + 5 / 128.0f, 1 + 6 / 128.0f, 1 + 17 / 128.0f, 1 + 18 / 128.0f));
  std::vector<int32_t> ints = {1, 2, 3, 4, 5, 6};
  const TensorView matrix = TensorView::Of(ints.data(), DType::kI32, {3, 2});
  EXPECT_THAT(ReadInts(*backend, matrix.Slice(1, 1, 1)), ElementsAre(2, 4, 6));
  EXPECT_THROW(ReadFloats(*backend, matrix), std::invalid_argument);
  EXPECT_THROW(ReadInts(*backend, all), std::invalid_argument);
  TensorView packed = all;
  packed.layout = Layout::kCpuPanels;
  EXPECT_THROW(ReadFloats(*backend, packed), std::invalid_argument);
}

TEST(OpOutputs, SplitProjectionsHaveTheirParts) {
  float memory[64] = {};
  const TensorView out = TensorView::Of(memory, DType::kF32, {2, 4});
  const TensorView partials = TensorView::Of(memory, DType::kF32, {3, 2, 4});
  ops::Gemv gemv{.out = out, .x = out, .weight = out};
  EXPECT_STREQ(OutputsOf(gemv)[0].name, "out");
  gemv.splits = 3;
  gemv.partials = partials;
  const std::vector<OpOutput> outputs = OutputsOf(gemv);
  ASSERT_THAT(outputs, SizeIs(1));
  EXPECT_STREQ(outputs[0].name, "partials");
  EXPECT_EQ(outputs[0].row_dim, 1);
}

// --- the KV range log ---

TEST(KvRangeLog, RangesFollowTheBlockTable) {
  // One key head of 64 f32 elements: 256 bytes a position, 16384 a page.
  TestModel a(GoldenDir(kHybrid));
  TestModel b(GoldenDir(kHybrid));
  DiffRun run(SideOf(a), SideOf(b), 0);
  const TestSequence sequence{.pages = {3, 1}, .slot = 0};
  const std::vector<int32_t> ids = Ids(kHybrid, "long");
  RunSteps(run, sequence, {ids.begin(), ids.begin() + 71}, 1);
  std::vector<std::string> lines;
  for (const KvAccess& access : run.kv_log().accesses()) lines.push_back(access.ToString());
  EXPECT_THAT(
      lines,
      ElementsAre("layer 3 prefill_kv_cache_update writes k [16384, 65536), 17920 bytes in 2 runs",
                  "layer 3 prefill_kv_cache_update writes v [16384, 65536), 17920 bytes in 2 runs",
                  "layer 3 prefill_attention reads k [16384, 65536), 17920 bytes in 2 runs",
                  "layer 3 prefill_attention reads v [16384, 65536), 17920 bytes in 2 runs",
                  "layer 3 attention writes k [17920, 18176), 256 bytes in 1 run",
                  "layer 3 attention writes v [17920, 18176), 256 bytes in 1 run",
                  "layer 3 attention reads k [16384, 65536), 18176 bytes in 2 runs",
                  "layer 3 attention reads v [16384, 65536), 18176 bytes in 2 runs"));
  EXPECT_THAT(run.kv_log().violations(), IsEmpty());
}

TEST(KvRangeLog, WhatNobodyWroteIsNotRead) {
  TestModel a(GoldenDir(kHybrid), {.plan = DecodePlan::kExplicit});
  TestModel b(GoldenDir(kHybrid), {.plan = DecodePlan::kExplicit});
  DiffRun run(SideOf(a), SideOf(b), 0);
  const std::vector<int32_t> ids = Ids(kHybrid, "ops");
  RunSteps(run, {.pages = {3, 1}, .slot = 0}, ids, 1);
  EXPECT_THAT(run.kv_log().violations(), IsEmpty());
  // The next token looks for its past in another page.
  const TestSequence wrong{.pages = {2, 1}, .slot = 0};
  const DecodeRow row{.sequence = wrong.view(),
                      .token = 1,
                      .position = static_cast<int>(ids.size()),
                      .sampling = {}};
  run.Decode({&row, 1});
  EXPECT_THAT(
      run.kv_log().violations(),
      ElementsAre("layer 3 qk_dot reads k: sequence 0, position 0, page 2 was never written",
                  "layer 3 pv_dot reads v: sequence 0, position 0, page 2 was never "
                  "written"));
}

}  // namespace
}  // namespace qwend
