// Which plan the decode programs follow: what was asked for, or with auto what is measured to take
// less time a row over the buckets; and what a backend without the persistent plan means for each.
#include "engine/decode_plan_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <thread>

#include "tests/engine/test_model.h"

namespace qwend {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// How a fake backend's plans behave, and what was done with them.
struct Fake {
  std::chrono::microseconds fused_delay{0};         // of a step
  std::chrono::microseconds persistent_delay{0};    // of a step
  int most_rows = std::numeric_limits<int>::max();  // that the persistent plan takes
  int fused_compiled = 0, persistent_compiled = 0;
  int fused_runs = 0, persistent_runs = 0;
};

class SlowProgram : public Program {
 public:
  SlowProgram(std::unique_ptr<Program> program, std::chrono::microseconds delay, int& runs)
      : program_(std::move(program)), delay_(delay), runs_(runs) {}
  void Run() override {
    std::this_thread::sleep_for(delay_);
    ++runs_;
    program_->Run();
  }
  std::span<const double> RunTimed() override {
    ++runs_;
    return program_->RunTimed();
  }

 private:
  std::unique_ptr<Program> program_;
  const std::chrono::microseconds delay_;
  int& runs_;
};

// A program that moves a clock instead of working.
class PaperProgram : public Program {
 public:
  PaperProgram(double& clock, double seconds) : clock_(clock), seconds_(seconds) {}
  void Run() override {
    // Every seventh run stumbles.
    clock_ += ++runs % 7 == 0 ? 3 * seconds_ : seconds_;
  }
  std::span<const double> RunTimed() override { return {}; }
  int runs = 0;

 private:
  double& clock_;
  const double seconds_;
};

int RowsOf(std::span<const OpCall> calls) {
  return static_cast<int>(std::get<ops::EmbeddingLookup>(calls[0].op).token_ids.rows());
}

// The CPU backend with a persistent plan, which is the plain loop too.
class FakeBackend : public Backend {
 public:
  explicit FakeBackend(Fake& fake) : fake_(fake), cpu_(MakeCpuBackend(1)) {}

  BackendInfo Info() const override { return cpu_->Info(); }
  Buffer Allocate(int64_t bytes) override { return cpu_->Allocate(bytes); }
  void CopyToDevice(void* to, const void* from, int64_t bytes) override {
    cpu_->CopyToDevice(to, from, bytes);
  }
  void CopyToHost(void* to, const void* from, int64_t bytes) override {
    cpu_->CopyToHost(to, from, bytes);
  }
  void Zero(void* at, int64_t bytes) override { cpu_->Zero(at, bytes); }
  std::unique_ptr<StepPort> MakeStepPort(void* inputs, int64_t input_bytes, const void* outputs,
                                         int64_t output_bytes) override {
    return cpu_->MakeStepPort(inputs, input_bytes, outputs, output_bytes);
  }
  int64_t PackedBytes(DType dtype, int64_t rows, int64_t cols) const override {
    return cpu_->PackedBytes(dtype, rows, cols);
  }
  TensorView Pack(const TensorView& host, void* to) override { return cpu_->Pack(host, to); }
  void Run(const Op& op) override { cpu_->Run(op); }
  void Synchronize() override { cpu_->Synchronize(); }
  double MeasureReadBandwidth() override { return cpu_->MeasureReadBandwidth(); }

  std::unique_ptr<Program> Compile(std::span<const OpCall> calls, StepPort* port) override {
    ++fake_.fused_compiled;
    return std::make_unique<SlowProgram>(Compiled(calls, port), fake_.fused_delay,
                                         fake_.fused_runs);
  }
  std::unique_ptr<Program> CompilePersistent(std::span<const OpCall> calls, StepPort* port,
                                             std::string& why_not) override {
    ++fake_.persistent_compiled;
    if (RowsOf(calls) > fake_.most_rows) {
      why_not = "the device is too small";
      return nullptr;
    }
    return std::make_unique<SlowProgram>(Compiled(calls, port), fake_.persistent_delay,
                                         fake_.persistent_runs);
  }

 private:
  // Runs once, as on CUDA.
  std::unique_ptr<Program> Compiled(std::span<const OpCall> calls, StepPort* port) {
    std::unique_ptr<Program> program = cpu_->Compile(calls, port);
    program->Run();
    return program;
  }

  Fake& fake_;
  std::unique_ptr<Backend> cpu_;
};

// Three buckets: 1, 2 and 4; or 1 alone for one sequence.
std::unique_ptr<TestModel> Make(Fake& fake, DecodePlan plan, const char* name = "tiny-llama",
                                int max_sequences = 4) {
  return std::make_unique<TestModel>(GoldenDir(name),
                                     TestModelOptions{.plan = plan, .max_sequences = max_sequences},
                                     std::make_unique<FakeBackend>(fake));
}

// Greedy decoding of 4 sequences that end one by one, so that every bucket runs; all tokens.
std::vector<int32_t> DecodeInEveryBucket(TestModel& model) {
  std::vector<TestSequence> sequences;
  std::vector<DecodeRow> rows;
  std::vector<int32_t> tokens;
  for (int s = 0; s < 4; ++s) sequences.push_back(model.Sequence(s));
  for (int s = 0; s < 4; ++s) {
    rows.push_back({.sequence = sequences[s].view(),
                    .token = model.Prefill(sequences[s], {5 + s, 9, 2}),
                    .position = 3,
                    .sampling = {}});
  }
  for (; !rows.empty(); rows.pop_back()) {
    const std::span<const int32_t> next = model.runner().Decode(rows);
    for (size_t i = 0; i < rows.size(); ++i) {
      tokens.push_back(next[i]);
      rows[i].token = next[i];
      ++rows[i].position;
    }
  }
  return tokens;
}

TEST(DecodePlanChoice, AutoTakesTheFasterForEveryBucket) {
  for (const bool persistent : {false, true}) {
    Fake fake;
    (persistent ? fake.fused_delay : fake.persistent_delay) = std::chrono::milliseconds(25);
    const std::unique_ptr<TestModel> model = Make(fake, DecodePlan::kAuto);
    const DecodePlanChoice& choice = model->runner().plan_choice();
    EXPECT_EQ(choice.plan, persistent ? DecodePlan::kPersistent : DecodePlan::kFused);
    EXPECT_EQ(model->runner().decode_plan(), choice.plan);
    EXPECT_THAT(choice.measured_buckets, ElementsAre(1, 2, 4));
    EXPECT_GT(persistent ? choice.fused_seconds_a_row : choice.persistent_seconds_a_row,
              25e-3 * (1 + 1 / 2.0 + 1 / 4.0));
    EXPECT_GT(persistent ? choice.persistent_seconds_a_row : choice.fused_seconds_a_row, 0);
    EXPECT_EQ(choice.why_not_persistent, "");
    EXPECT_EQ(fake.persistent_compiled, 3);
    EXPECT_EQ(fake.fused_compiled, 3);

    fake.fused_runs = fake.persistent_runs = 0;
    DecodeInEveryBucket(*model);
    EXPECT_EQ(fake.persistent_runs, persistent ? 4 : 0);
    EXPECT_EQ(fake.fused_runs, persistent ? 0 : 4);
  }
}

// A step of the fused plan takes the same time for any rows, one of the persistent plan takes it
// row by row.
class PaperBackend : public FakeBackend {
 public:
  PaperBackend(Fake& fake, double& clock, double fused, double persistent_row)
      : FakeBackend(fake), clock_(clock), fused_(fused), persistent_row_(persistent_row) {}
  std::unique_ptr<Program> Compile(std::span<const OpCall>, StepPort*) override {
    return std::make_unique<PaperProgram>(clock_, fused_);
  }
  std::unique_ptr<Program> CompilePersistent(std::span<const OpCall> calls, StepPort*,
                                             std::string&) override {
    return std::make_unique<PaperProgram>(clock_, RowsOf(calls) * persistent_row_);
  }

 private:
  double& clock_;
  const double fused_, persistent_row_;
};

// Of 1, 2 and 4 rows, in milliseconds a row: fused 8, 4 and 2; persistent the same each time.
TEST(DecodePlanChoice, AutoSumsTheTimeARowOverTheBuckets) {
  struct Case {
    double persistent_milliseconds;
    std::vector<int> buckets;
    DecodePlan plan;
  };
  for (const Case& c :
       {Case{6, {1, 2, 4}, DecodePlan::kFused},  // although the first bucket is faster
        Case{6, {1}, DecodePlan::kPersistent},
        Case{3, {1, 2, 4}, DecodePlan::kPersistent}}) {  // although the last is slower
    std::vector<float> memory(256);
    std::vector<OpList> lists;
    for (const int rows : c.buckets) {
      lists.emplace_back().Add(
          "embedding_lookup",
          ops::EmbeddingLookup{
              .out = TensorView::Of(memory.data(), DType::kF32, {rows, 8}),
              .table = TensorView::Of(memory.data() + 64, DType::kF32, {16, 8}),
              .token_ids = TensorView::Of(memory.data() + 192, DType::kI32, {rows})});
    }
    Fake fake;
    double clock = 0;
    PaperBackend backend(fake, clock, 8e-3, c.persistent_milliseconds * 1e-3);
    const auto decode = CompileDecode(
        backend, DecodePlan::kAuto, lists, c.buckets, /*port=*/nullptr, [](size_t) {},
        [&] { return clock; });
    ASSERT_TRUE(decode.ok()) << decode.status();
    const DecodePlanChoice& choice = decode->choice;
    EXPECT_EQ(choice.plan, c.plan) << choice.ToString();
    EXPECT_EQ(choice.measured_buckets, c.buckets);
    EXPECT_NEAR(choice.fused_seconds_a_row, c.buckets.size() == 1 ? 8e-3 : 14e-3, 1e-9);
    EXPECT_NEAR(choice.persistent_seconds_a_row,
                1e-3 * c.persistent_milliseconds * static_cast<double>(c.buckets.size()), 1e-9);
  }
}

TEST(DecodePlanChoice, TheLogLineHasBothSums) {
  DecodePlanChoice choice{.plan = DecodePlan::kPersistent,
                          .measured_buckets = {1},
                          .fused_seconds_a_row = 661e-6,
                          .persistent_seconds_a_row = 598.2e-6,
                          .why_not_persistent = ""};
  EXPECT_EQ(choice.ToString(),
            "persistent; measured over buckets 1: 661.0 us a row fused, 598.2 us persistent");
  choice.measured_buckets = {1, 2, 4};
  EXPECT_THAT(choice.ToString(), HasSubstr("; measured over buckets 1, 2, 4: 661.0 us a row"));
}

TEST(DecodePlanChoice, AutoIsFusedWithTheReasonWherePersistentIsNotPossible) {
  for (const int most_rows : {0, 2}) {  // refused at once, or for the last bucket only
    Fake fake{.fused_delay = std::chrono::milliseconds(2), .most_rows = most_rows};
    const std::unique_ptr<TestModel> model = Make(fake, DecodePlan::kAuto);
    const DecodePlanChoice& choice = model->runner().plan_choice();
    EXPECT_EQ(choice.plan, DecodePlan::kFused);
    EXPECT_EQ(choice.why_not_persistent, "the device is too small");
    EXPECT_EQ(fake.fused_runs, 0) << "measured without need";
    EXPECT_EQ(choice.ToString(), "fused; persistent is not possible: the device is too small");
    fake.fused_runs = fake.persistent_runs = 0;
    DecodeInEveryBucket(*model);
    EXPECT_EQ(fake.persistent_runs, 0);
    EXPECT_EQ(fake.fused_runs, 4);
  }
}

TEST(DecodePlanChoice, APlanThatWasAskedForIsTakenWithoutMeasuring) {
  for (const DecodePlan plan :
       {DecodePlan::kExplicit, DecodePlan::kFused, DecodePlan::kPersistent}) {
    Fake fake;
    const std::unique_ptr<TestModel> model = Make(fake, plan);
    EXPECT_EQ(model->runner().decode_plan(), plan);
    EXPECT_EQ(model->runner().plan_choice().ToString(), PlanName(plan));
    EXPECT_EQ(fake.fused_runs + fake.persistent_runs, 0);
    EXPECT_EQ(fake.persistent_compiled, plan == DecodePlan::kPersistent ? 3 : 0);
    EXPECT_EQ(fake.fused_compiled, plan == DecodePlan::kPersistent ? 0 : 3);
  }
}

TEST(DecodePlanChoice, PersistentThatIsNotPossibleNamesFlagReasonAndRemedy) {
  for (const int most_rows : {0, 2}) {
    Fake fake{.most_rows = most_rows};
    try {
      Make(fake, DecodePlan::kPersistent);
      FAIL() << "refused for more than " << most_rows << " rows, and built";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(),
                   "FAILED_PRECONDITION: --decode_plan=persistent: the device is too small; use "
                   "--decode_plan=fused or auto");
    }
    EXPECT_EQ(fake.fused_compiled, 0);
  }
}

TEST(DecodePlanChoice, EveryPlanAndTheMeasurementLeaveTheSameBits) {
  for (const char* name : {"tiny-llama", "tiny-qwen35"}) {
    Fake fake;
    const std::unique_ptr<TestModel> fused = Make(fake, DecodePlan::kFused, name);
    const std::unique_ptr<TestModel> persistent = Make(fake, DecodePlan::kPersistent, name);
    const std::unique_ptr<TestModel> measured = Make(fake, DecodePlan::kAuto, name);
    EXPECT_GT(fake.persistent_runs, 0);
    const std::vector<int32_t> want = DecodeInEveryBucket(*fused);
    EXPECT_THAT(want, Not(testing::Contains(kInvalidToken)));
    EXPECT_EQ(DecodeInEveryBucket(*persistent), want);
    EXPECT_EQ(DecodeInEveryBucket(*measured), want);

    // Operator by operator, the persistent plan's step is the fused list.
    const TestSequence sequence = persistent->Sequence(0);
    const int32_t token = persistent->Prefill(sequence, {7, 8});
    ASSERT_EQ(fused->Prefill(sequence, {7, 8}), token);
    const DecodeRow row{
        .sequence = sequence.view(), .token = token, .position = 2, .sampling = {.keep_logits = 1}};
    persistent->runner().DecodeEagerly({&row, 1}, nullptr);
    fused->runner().Decode({&row, 1});
    EXPECT_EQ(persistent->runner().LastDecodeLogits(1), fused->runner().LastDecodeLogits(1));
  }
}

bool IsZero(const TensorView& view) {
  const char* bytes = view.As<char>();
  return std::all_of(bytes, bytes + view.bytes(), [](char byte) { return byte == 0; });
}

TEST(DecodePlanChoice, CompilingAndMeasuringWriteThePaddingsPageAndSlotAlone) {
  for (const DecodePlan plan : {DecodePlan::kAuto, DecodePlan::kFused, DecodePlan::kPersistent}) {
    Fake fake;
    const std::unique_ptr<TestModel> model = Make(fake, plan, "tiny-qwen35");
    int caches = 0;
    const auto expect_last_only = [&](const TensorView& cache, const OpCall& call) {
      const int64_t last = cache.shape[0] - 1;
      EXPECT_TRUE(IsZero(cache.Slice(0, 0, last))) << call.tag << " of layer " << call.layer;
      EXPECT_FALSE(IsZero(cache.Slice(0, last, 1))) << call.tag << " of layer " << call.layer;
      ++caches;
    };
    for (const OpCall& call : model->runner().DecodeCalls(4)) {
      if (const auto* attention = std::get_if<ops::DecodeAttention>(&call.op)) {
        expect_last_only(attention->update.k_pages, call);
        expect_last_only(attention->update.v_pages, call);
      } else if (const auto* linear = std::get_if<ops::LinearAttention>(&call.op)) {
        expect_last_only(linear->rule.state, call);
        expect_last_only(linear->conv.state, call);
      }
    }
    EXPECT_EQ(caches, 2 * model->spec().num_layers());
  }
}

TEST(TimeSteps, MediansOfBlocksWithinTheTime) {
  constexpr double kSeconds = 0.08;
  struct Case {
    double fused, persistent;
  };
  for (const Case& c : {Case{1e-3, 0.7e-3}, {50e-6, 80e-6}, {1e-6, 2e-6}, {0.03, 0.02}}) {
    double clock = 100;
    int synchronized = 0;
    PaperProgram fused(clock, c.fused);
    PaperProgram persistent(clock, c.persistent);
    const StepSeconds seconds = TimeSteps(
        fused, persistent, kSeconds, [&] { ++synchronized; }, [&] { return clock; });
    EXPECT_GE(seconds.fused, c.fused * 0.999);
    EXPECT_LE(seconds.fused, c.fused * 1.5);
    EXPECT_GE(seconds.persistent, c.persistent * 0.999);
    EXPECT_LE(seconds.persistent, c.persistent * 1.5);
    EXPECT_EQ(seconds.persistent < seconds.fused, c.persistent < c.fused);
    // Only runs that are longer than a block take more.
    EXPECT_LE(clock - 100, std::max(1.6 * kSeconds, 10 * (c.fused + c.persistent))) << c.fused;
    EXPECT_GE(fused.runs, 7);
    EXPECT_EQ(synchronized, 2 * 2 * 7);  // around each of 5 blocks and 2 of warming up
  }
}

}  // namespace
}  // namespace qwend
