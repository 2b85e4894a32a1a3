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
    ASSERT_GT(tags.size(), 20u);
    EXPECT_EQ(tags.front(), "cache_mask");
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
                  "layer 3 kv_cache_update writes k [17920, 18176), 256 bytes in 1 run",
                  "layer 3 kv_cache_update writes v [17920, 18176), 256 bytes in 1 run",
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

// Operators of a pool of two pages and two heads, which do not run: only their tensors are read.
class KvPoolTest : public testing::Test {
 protected:
  static constexpr int64_t kPages = 2;
  static constexpr int64_t kHeads = 2;
  static constexpr int64_t kDim = 4;

  TensorView Ints(std::vector<int32_t> values, std::initializer_list<int64_t> shape) {
    kept_.push_back(std::move(values));
    return TensorView::Of(kept_.back().data(), DType::kI32, shape);
  }
  void Write(std::vector<int32_t> slots) {
    const auto rows = static_cast<int64_t>(slots.size());
    log_.Observe({.op = ops::KvCacheUpdate{.k = {},
                                           .v = {},
                                           .k_pages = k_,
                                           .v_pages = v_,
                                           .slots = Ints(std::move(slots), {rows})},
                  .tag = "kv_cache_update",
                  .layer = 5},
                 rows);
  }
  // One row of sequence `sequence` that sees `length` positions in these two pages.
  void Attend(int32_t sequence, int32_t length, std::vector<int32_t> table) {
    const StepSequences sequences{.query_start = {},
                                  .row_sequence = Ints({sequence}, {1}),
                                  .positions = {},
                                  .block_table = Ints(std::move(table), {1, 2}),
                                  .state_slot = {}};
    log_.Observe({.op = ops::Attention{.out = {},
                                       .q = {},
                                       .k_pages = k_,
                                       .v_pages = v_,
                                       .lengths = Ints({length}, {1}),
                                       .sequences = sequences},
                  .tag = "attention",
                  .layer = 5},
                 1);
  }

  std::unique_ptr<Backend> backend_ = MakeCpuBackend(1);
  std::vector<uint16_t> k_memory_ = std::vector<uint16_t>(kPages * kHeads * 64 * kDim);
  std::vector<uint16_t> v_memory_ = k_memory_;
  TensorView k_ = TensorView::Of(k_memory_.data(), DType::kBF16, {kPages, kHeads, 64, kDim});
  TensorView v_ = TensorView::Of(v_memory_.data(), DType::kBF16, {kPages, kHeads, 64, kDim});
  std::vector<std::vector<int32_t>> kept_;
  KvRangeLog log_{*backend_};
};

TEST_F(KvPoolTest, EachHeadHasItsRun) {
  Write({65, 66});  // page 1, offsets 1 and 2; 8 bytes each, 512 a head, 1024 a page
  ASSERT_THAT(log_.accesses(), SizeIs(2));
  EXPECT_EQ(log_.accesses()[0].ToString(),
            "layer 5 kv_cache_update writes k [1032, 1560), 32 bytes in 2 runs");
  EXPECT_THAT(log_.violations(), IsEmpty());
}

TEST_F(KvPoolTest, WritesOutsideThePoolAreReported) {
  Write({0, 128});
  EXPECT_THAT(
      log_.violations(),
      ElementsAre("layer 5 kv_cache_update writes k: row 1, slot 128 is outside the pool of 128",
                  "layer 5 kv_cache_update writes v: row 1, slot 128 is outside the pool of 128"));
  EXPECT_GT(log_.accesses()[0].end, k_.bytes());
  Write({-1});
  ASSERT_THAT(log_.violations(), SizeIs(4));
  EXPECT_THAT(log_.violations()[2], HasSubstr("row 0, slot -1 is outside"));
}

TEST_F(KvPoolTest, ReadsOutsideThePoolAndTheTablesAreReported) {
  Write({0, 1});
  Attend(0, 2, {0, 0});
  EXPECT_THAT(log_.violations(), IsEmpty());
  Attend(0, 3, {0, 0});
  ASSERT_THAT(log_.violations(), SizeIs(2));
  EXPECT_EQ(log_.violations()[1],
            "layer 5 attention reads v: sequence 0, position 2, page 0 was never written");
  Attend(0, 1, {2, 0});
  ASSERT_THAT(log_.violations(), SizeIs(4));
  EXPECT_EQ(log_.violations()[2],
            "layer 5 attention reads k: sequence 0, position 0, page 2 is outside the pool of 2 "
            "pages");
  Attend(0, 129, {0, 1});
  ASSERT_THAT(log_.violations(), SizeIs(6));
  EXPECT_THAT(log_.violations()[4], HasSubstr("length 129, its block table ends at 128"));
  Attend(1, 1, {0, 1});
  ASSERT_THAT(log_.violations(), SizeIs(8));
  EXPECT_THAT(log_.ToString(), HasSubstr("VIOLATION: layer 5 attention reads k: row 0 is of "
                                         "sequence 1 of 1"));
}

}  // namespace
}  // namespace qwend
