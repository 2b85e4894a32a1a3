// What PlanMemory promises: sizes that the runner then takes to the byte, limits, and pages that
// give way when memory is short.
#include "engine/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/engine/test_model.h"

namespace qwend {
namespace {

using testing::HasSubstr;

// A device of which only the memory matters. Packed weights take the bytes of their elements.
class PaperBackend : public Backend {
 public:
  explicit PaperBackend(int64_t total, int64_t free, std::string name = "cuda") {
    info_.name = std::move(name);
    info_.memory_bytes = total;
    info_.free_bytes = free;
    info_.activation_type = DType::kBF16;
    info_.kv_type = DType::kBF16;
    info_.conv_type = DType::kBF16;
  }
  BackendInfo Info() const override { return info_; }
  int64_t PackedBytes(DType dtype, int64_t rows, int64_t cols) const override {
    return rows * cols * SizeOf(dtype);
  }
  Buffer Allocate(int64_t) override { throw DeviceError("paper"); }
  void CopyToDevice(void*, const void*, int64_t) override {}
  void CopyToHost(void*, const void*, int64_t) override {}
  void Zero(void*, int64_t) override {}
  std::unique_ptr<StepPort> MakeStepPort(void*, int64_t, const void*, int64_t) override {
    return nullptr;
  }
  TensorView Pack(const TensorView&, void*) override { return {}; }
  void Run(const Op&) override {}
  std::unique_ptr<Program> Compile(std::span<const OpCall>, StepPort*) override { return nullptr; }
  void Synchronize() override {}
  double MeasureReadBandwidth() override { return 0; }

 private:
  BackendInfo info_;
};

constexpr int64_t kGiB = int64_t{1} << 30;

TEST(MemoryPlan, TheRunnerTakesExactlyWhatWasPlanned) {
  // ModelRunner::Create fails when its arena is not used to the byte; TestModel throws then.
  for (const char* name :
       {"tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen35", "tiny-qwen35-realheads"}) {
    for (DecodePlan plan : {DecodePlan::kAuto, DecodePlan::kFused, DecodePlan::kExplicit}) {
      for (int context : {2, 65, 2048}) {
        EXPECT_NO_THROW(TestModel(GoldenDir(name), {.plan = plan,
                                                    .max_sequences = context == 65 ? 3 : 1,
                                                    .max_context = context,
                                                    .chunk = 64,
                                                    .threads = 1}))
            << name;
      }
    }
  }
}

TEST(MemoryPlan, PublishedSizesAddUp) {
  absl::StatusOr<ModelSpec> spec = SyntheticSpec("qwen3.5-0.8b");
  ASSERT_TRUE(spec.ok());
  const PaperBackend backend(140 * kGiB, 139 * kGiB);
  absl::StatusOr<MemoryPlan> plan = PlanMemory(*spec, backend, {.max_sequences = 8});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->max_context_tokens, 32768);
  EXPECT_EQ(plan->prefill_chunk_tokens, 512);
  EXPECT_EQ(plan->decode_plan, DecodePlan::kAuto);  // until a runner has measured
  EXPECT_EQ(plan->kv_pages, 8 * 32768 / 64);
  EXPECT_EQ(plan->kv_bytes, int64_t{plan->kv_pages + 1} * 64 * 12288);
  EXPECT_EQ(plan->state_bytes, 9 * (18 * (16 * 128 * 128 * 4 + 6144 * 3 * 2)));
  // 2 bytes a weight, but 4 for the vectors and convolutions.
  EXPECT_NEAR(static_cast<double>(plan->weight_bytes), 1504786048.0, 2e6);
  EXPECT_GE(plan->weight_bytes, 1504786048);
  // 8 rows of logits, rope tables, and little else.
  EXPECT_NEAR(static_cast<double>(plan->workspace_bytes), 8.0 * 248320 * 4 + 2.0 * 32768 * 32 * 4,
              1e5);
  EXPECT_THAT(plan->Table(), HasSubstr("1.40 GiB"));
}

TEST(MemoryPlan, TheExplicitPlanHasRoomForScores) {
  absl::StatusOr<ModelSpec> spec = SyntheticSpec("article-0.8b");
  const PaperBackend backend(140 * kGiB, 139 * kGiB);
  MemoryLimits limits{
      .max_sequences = 4, .max_context_tokens = 1000, .decode_plan = DecodePlan::kFused};
  absl::StatusOr<MemoryPlan> fused = PlanMemory(*spec, backend, limits);
  limits.decode_plan = DecodePlan::kExplicit;
  absl::StatusOr<MemoryPlan> explicit_plan = PlanMemory(*spec, backend, limits);
  ASSERT_TRUE(fused.ok() && explicit_plan.ok());
  EXPECT_EQ(explicit_plan->workspace_bytes - fused->workspace_bytes, 4 * 8 * 1000 * 4);
  EXPECT_EQ(explicit_plan->decode_plan, DecodePlan::kExplicit);
  for (const DecodePlan plan : {DecodePlan::kAuto, DecodePlan::kPersistent}) {
    limits.decode_plan = plan;
    absl::StatusOr<MemoryPlan> other = PlanMemory(*spec, backend, limits);
    ASSERT_TRUE(other.ok()) << other.status();
    EXPECT_EQ(other->total(), fused->total());
    EXPECT_EQ(other->decode_plan, plan);
  }
}

TEST(MemoryPlan, PagesGiveWayWhenMemoryIsShort) {
  absl::StatusOr<ModelSpec> spec = SyntheticSpec("qwen3-0.6b");
  const MemoryLimits limits{.max_sequences = 16, .max_context_tokens = 8192};
  const PaperBackend large(64 * kGiB, 64 * kGiB);
  absl::StatusOr<MemoryPlan> whole = PlanMemory(*spec, large, limits);
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->kv_pages, 16 * 128);
  const PaperBackend small(8 * kGiB, 8 * kGiB);
  absl::StatusOr<MemoryPlan> some = PlanMemory(*spec, small, limits);
  ASSERT_TRUE(some.ok()) << some.status();
  EXPECT_LT(some->kv_pages, 16 * 128);
  EXPECT_GE(some->kv_pages, 128);
  const auto budget = static_cast<int64_t>(0.85 * 8 * kGiB);
  EXPECT_LE(some->total(), budget);
  const int64_t page = 64 * 114688;
  EXPECT_GT(some->total() + page, budget);  // not one more would fit
  // What others have taken counts as well.
  const PaperBackend busy(64 * kGiB, 4 * kGiB);
  absl::StatusOr<MemoryPlan> beside = PlanMemory(*spec, busy, limits);
  ASSERT_TRUE(beside.ok()) << beside.status();
  EXPECT_LE(beside->total(), 4 * kGiB);
}

TEST(MemoryPlan, WhatCannotFitSaysWhatToLower) {
  absl::StatusOr<ModelSpec> spec = SyntheticSpec("qwen3-0.6b");
  const PaperBackend tiny(2 * kGiB, 2 * kGiB);
  const absl::Status status =
      PlanMemory(*spec, tiny, {.max_context_tokens = 8192, .memory_fraction = 0.5}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  for (const char* part : {"1.00 GiB", "weights", "kv cache", "--max_context_tokens",
                           "--max_sequences", "--memory_fraction"}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

TEST(MemoryPlan, DefaultsFollowBackendAndModel) {
  absl::StatusOr<ModelSpec> spec = SyntheticSpec("qwen3-0.6b");
  const PaperBackend cpu(64 * kGiB, 64 * kGiB, "cpu");
  absl::StatusOr<MemoryPlan> plan = PlanMemory(*spec, cpu, {});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->max_context_tokens, 8192);
  EXPECT_EQ(plan->max_sequences, 16);
  spec->max_positions = 100;
  plan = PlanMemory(*spec, cpu, {});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->max_context_tokens, 100);
  EXPECT_EQ(plan->prefill_chunk_tokens, 128);  // the context in whole pages
}

TEST(MemoryPlan, LimitsOutsideTheirRangeNameTheFlag) {
  absl::StatusOr<ModelSpec> spec = SyntheticSpec("qwen3-0.6b");
  const PaperBackend backend(64 * kGiB, 64 * kGiB);
  struct Case {
    MemoryLimits limits;
    const char* flag;
  };
  for (const Case& c : {
           Case{{.max_sequences = -1}, "--max_sequences"},
           Case{{.max_sequences = 65}, "--max_sequences"},
           Case{{.max_context_tokens = -5}, "--max_context_tokens"},
           Case{{.max_context_tokens = 40961}, "--max_context_tokens"},
           Case{{.prefill_chunk_tokens = 63}, "--prefill_chunk_tokens"},
           Case{{.prefill_chunk_tokens = 100}, "--prefill_chunk_tokens"},
           Case{{.prefill_chunk_tokens = 1 << 20}, "--prefill_chunk_tokens"},
           Case{{.memory_fraction = 0.0}, "--memory_fraction"},
           Case{{.memory_fraction = 1.5}, "--memory_fraction"},
           Case{{.memory_fraction = std::nan("")}, "--memory_fraction"},
       }) {
    const absl::Status status = PlanMemory(*spec, backend, c.limits).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.flag;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.flag));
  }
}

}  // namespace
}  // namespace qwend
