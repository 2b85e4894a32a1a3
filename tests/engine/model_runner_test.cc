// The runner as the scheduler uses it: bits that depend neither on chunks, batch, plan nor slot;
// profiles; limits; requests that go wrong.
#include "engine/model_runner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "engine/models/model_tensors.h"
#include "tests/engine/test_model.h"

namespace qwend {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<int32_t> Prompt(const std::string& model, const std::string& name) {
  return GoldenFile(GoldenDir(model) / "golden.safetensors").Get("ids." + name).ids;
}

// Row `row` of logits of `vocab` columns, as bits: NaN equals NaN, -0 differs from 0.
std::string Bits(const std::vector<float>& logits, int64_t row, int64_t vocab) {
  return std::string(reinterpret_cast<const char*>(logits.data() + row * vocab),
                     vocab * sizeof(float));
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b,
                    const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0)
      << what << ": relative error " << RelativeError(a.data(), b.data(), a.size());
}

class BitsTest : public testing::TestWithParam<const char*> {};

TEST_P(BitsTest, ChunksAndSingleTokensEqualTheWholePrompt) {
  const std::vector<int32_t> ids = Prompt(GetParam(), "long");
  for (DecodePlan plan : {DecodePlan::kExplicit, DecodePlan::kFused}) {
    TestModel model(GoldenDir(GetParam()), {.plan = plan});
    const int64_t vocab = model.spec().vocab_size;
    const std::vector<float> whole = model.PrefillLogits(model.Sequence(0), ids);
    for (int chunk : {1, 7, 64}) {
      ExpectSameBits(model.PrefillLogits(model.Sequence(1), ids, chunk), whole,
                     "chunks of " + std::to_string(chunk));
    }
    const TestSequence sequence = model.Sequence(2);
    const int32_t first = model.Prefill(sequence, {ids[0]});
    EXPECT_EQ(first, std::max_element(whole.begin(), whole.begin() + vocab) - whole.begin());
    for (int i = 1; i < static_cast<int>(ids.size()); ++i) {
      model.DecodeOne(sequence, ids[i], i);
      ASSERT_EQ(Bits(model.runner().LastDecodeLogits(1), 0, vocab), Bits(whole, i, vocab))
          << "decoding position " << i;
    }
  }
}

TEST_P(BitsTest, ABatchEqualsEachSequenceAlone) {
  const std::vector<int32_t> ids = Prompt(GetParam(), "long");
  for (DecodePlan plan : {DecodePlan::kExplicit, DecodePlan::kFused}) {
    TestModel model(GoldenDir(GetParam()), {.plan = plan, .max_sequences = 5});
    const int64_t vocab = model.spec().vocab_size;
    const std::vector<int> lengths = {130, 1, 63, 64, 37};
    constexpr int kSteps = 4;
    // Alone, each in the slot it has later.
    std::vector<std::vector<std::string>> alone(lengths.size());
    for (size_t s = 0; s < lengths.size(); ++s) {
      const TestSequence sequence = model.Sequence(static_cast<int>(s));
      model.Prefill(sequence, {ids.begin(), ids.begin() + lengths[s]});
      for (int step = 0; step < kSteps; ++step) {
        model.DecodeOne(sequence, ids[s + step], lengths[s] + step);
        alone[s].push_back(Bits(model.runner().LastDecodeLogits(1), 0, vocab));
      }
    }
    // Together; the batch shrinks, so that buckets 8, 4 and 1 run, padded and full.
    for (size_t s = 0; s < lengths.size(); ++s) {
      model.Prefill(model.Sequence(static_cast<int>(s)), {ids.begin(), ids.begin() + lengths[s]});
    }
    for (int step = 0; step < kSteps; ++step) {
      const size_t count = std::array<size_t, kSteps>{5, 4, 3, 1}[step];
      std::vector<TestSequence> sequences;
      std::vector<DecodeRow> rows;
      for (size_t s = 0; s < count; ++s) sequences.push_back(model.Sequence(static_cast<int>(s)));
      for (size_t s = 0; s < count; ++s) {
        rows.push_back({.sequence = sequences[s].view(),
                        .token = ids[s + step],
                        .position = lengths[s] + step,
                        .sampling = {}});
      }
      ASSERT_EQ(model.runner().Decode(rows).size(), count);
      const std::vector<float> logits = model.runner().LastDecodeLogits(static_cast<int>(count));
      for (size_t s = 0; s < count; ++s) {
        EXPECT_EQ(Bits(logits, static_cast<int64_t>(s), vocab), alone[s][step])
            << "sequence " << s << " of " << count << ", step " << step;
      }
    }
  }
}

TEST_P(BitsTest, ASlotRemembersNothingOfItsLastSequence) {
  const std::vector<int32_t> ids = Prompt(GetParam(), "mid");
  TestModel fresh(GoldenDir(GetParam()));
  TestModel used(GoldenDir(GetParam()));
  used.Greedy(used.Sequence(1), Prompt(GetParam(), "long"), 20);
  ExpectSameBits(used.PrefillLogits(used.Sequence(1), ids),
                 fresh.PrefillLogits(fresh.Sequence(1), ids), "a used slot");
  used.Greedy(used.Sequence(1), Prompt(GetParam(), "long"), 20);
  EXPECT_EQ(used.Greedy(used.Sequence(1), {ids[0]}, 12),
            fresh.Greedy(fresh.Sequence(3), {ids[0]}, 12));
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, BitsTest,
                         testing::Values("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-qwen35",
                                         "tiny-qwen35-realheads"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// Weights of the spec in a given type, the same values in each: multiples of 1/64 that bf16, f16
// and f32 all hold. One element may be replaced.
class ExactWeights : public WeightSource {
 public:
  ExactWeights(const ModelSpec& spec, DType type) : type_(type) {
    for (TensorSpec& t : ModelTensors(spec)) {
      std::string name = t.name;
      tensors_.emplace(std::move(name), std::move(t));
    }
  }
  void Poison(const std::string& name, int64_t at, float value) {
    poisoned_ = name;
    poison_at_ = at;
    poison_ = value;
  }
  DType weight_type() const override { return type_; }
  absl::StatusOr<TensorView> Get(std::string_view name) override {
    const TensorSpec& t = tensors_.at(std::string(name));
    TensorView view = t.shape.size() == 1 ? TensorView::Of(nullptr, type_, {t.shape[0]})
                      : t.shape.size() == 2
                          ? TensorView::Of(nullptr, type_, {t.shape[0], t.shape[1]})
                          : TensorView::Of(nullptr, type_, {t.shape[0], t.shape[1], t.shape[2]});
    memory_.resize(view.bytes());
    view.data = memory_.data();
    uint32_t state = static_cast<uint32_t>(name.size() * 7919 + name.back());
    for (int64_t i = 0; i < view.elements(); ++i) {
      state = state * 1664525u + 1013904223u;
      float x = (static_cast<int>(state >> 24) - 128) / 64.0f / 8.0f;
      if (name == poisoned_ && i == poison_at_) x = poison_;
      Put(view.data, i, x);
    }
    return view;
  }

 private:
  void Put(void* to, int64_t i, float x) const {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (type_ == DType::kF32) {
      static_cast<float*>(to)[i] = x;
    } else if (type_ == DType::kBF16) {
      static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(bits >> 16);
    } else if (x == 0) {
      static_cast<uint16_t*>(to)[i] = 0;
    } else {
      const uint32_t exponent = ((bits >> 23) & 0xff) - 127 + 15;
      static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(
          ((bits >> 16) & 0x8000) | (exponent << 10) | ((bits >> 13) & 0x3ff));
    }
  }

  DType type_;
  std::map<std::string, TensorSpec> tensors_;
  std::string poisoned_;
  int64_t poison_at_ = 0;
  float poison_ = 0;
  std::vector<char> memory_;
};

ModelSpec TinyHybrid() { return LoadModelConfig(GoldenDir("tiny-qwen35"))->spec; }

TEST(ModelRunner, WeightTypesGiveTheSameNumbers) {
  const std::vector<int32_t> ids = {3, 1, 4, 1, 5, 9, 2, 6};
  std::vector<float> want;
  for (DType type : {DType::kBF16, DType::kF16, DType::kF32}) {
    ModelSpec spec = TinyHybrid();
    spec.weight_type = type;
    ExactWeights weights(spec, type);
    TestModel model(spec, weights);
    const std::vector<float> logits = model.PrefillLogits(model.Sequence(0), ids);
    if (want.empty()) want = logits;
    EXPECT_LT(RelativeError(logits.data(), want.data(), want.size()), 1e-5) << Name(type);
    EXPECT_GT(*std::max_element(want.begin(), want.end()), 0.01f);
  }
}

TEST(ModelRunner, TypesThatCannotBeKeptAreRefused) {
  ModelSpec spec = TinyHybrid();
  spec.weight_type = DType::kBF16;
  ExactWeights weights(spec, DType::kF32);
  try {
    TestModel model(spec, weights);
    FAIL() << "f32 weights were kept as bf16";
  } catch (const std::runtime_error& e) {
    EXPECT_THAT(e.what(), HasSubstr("embed_tokens.weight is f32"));
  }
}

TEST(ModelRunner, NonFiniteLogitsStayWithTheirRow) {
  ModelSpec spec = TinyHybrid();
  spec.weight_type = DType::kBF16;
  spec.tied_embeddings = false;  // so that the poison is in one token's embedding alone
  constexpr int32_t kBadToken = 7;
  for (float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    ExactWeights weights(spec, DType::kBF16);
    weights.Poison("embed_tokens.weight", int64_t{kBadToken} * spec.hidden + 3, poison);
    TestModel model(spec, weights);
    const std::vector<int32_t> good = model.Greedy(model.Sequence(0), {1, 2, 3}, 2);
    EXPECT_EQ(model.Prefill(model.Sequence(1), {4, kBadToken}), kInvalidToken);
    // A batch with a poisoned row: its neighbours are as they were.
    const TestSequence a = model.Sequence(2);
    const TestSequence b = model.Sequence(3);
    ASSERT_EQ(model.Prefill(a, {1, 2, 3}), good[0]);
    model.Prefill(b, {4});
    const std::vector<DecodeRow> rows = {
        {.sequence = b.view(), .token = kBadToken, .position = 1, .sampling = {}},
        {.sequence = a.view(), .token = good[0], .position = 3, .sampling = {}}};
    const std::span<const int32_t> tokens = model.runner().Decode(rows);
    EXPECT_THAT(std::vector<int32_t>(tokens.begin(), tokens.end()),
                ElementsAre(kInvalidToken, good[1]));
    // And the slot is clean for the next.
    EXPECT_EQ(model.Greedy(b, {1, 2, 3}, 2), good);
  }
}

TEST(ModelRunner, OnlyTokensBelowTheLimitAreSampled) {
  TestModel model(GoldenDir("tiny-llama"), {.sampleable_tokens = 10});
  const std::vector<int32_t> tokens = model.Greedy(model.Sequence(0), {400, 3}, 20);
  EXPECT_LT(*std::max_element(tokens.begin(), tokens.end()), 10);
  EXPECT_GE(*std::min_element(tokens.begin(), tokens.end()), 0);
}

TEST(ModelRunner, SeededTokensDoNotDependOnTheBatch) {
  TestModel model(GoldenDir("tiny-qwen35"));
  std::vector<TestSequence> sequences;
  std::vector<DecodeRow> rows;
  for (int s = 0; s < 3; ++s) sequences.push_back(model.Sequence(s));
  std::set<int32_t> seen;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    rows.clear();
    for (int s = 0; s < 3; ++s) {
      SamplingRow sampling;
      sampling.temperature = 1.5f;
      sampling.seed = seed * 3 + s;
      sampling.position = 2;
      model.Prefill(sequences[s], {10 + s});
      rows.push_back(
          {.sequence = sequences[s].view(), .token = 20 + s, .position = 1, .sampling = sampling});
    }
    const std::span<const int32_t> got = model.runner().Decode(rows);
    const std::vector<int32_t> together(got.begin(), got.end());
    for (int s = 0; s < 3; ++s) {
      model.Prefill(sequences[s], {10 + s});
      EXPECT_EQ(model.runner().Decode({&rows[s], 1})[0], together[s]);
      seen.insert(together[s]);
    }
  }
  EXPECT_GT(seen.size(), 8u);  // the seeds matter
}

TEST(ModelRunner, InstrumentedStepsAreProfiled) {
  TestModel model(GoldenDir("tiny-qwen35"), {.chunk = 64, .profile_every = 2});
  EXPECT_TRUE(model.runner().profiler().Totals().empty());
  const TestSequence sequence = model.Sequence(0);
  model.Greedy(sequence, std::vector<int32_t>(100, 5), 9);  // 2 chunks, 8 decode steps
  std::map<std::string, KernelTotals> decode;
  std::map<std::string, KernelTotals> prefill;
  for (const KernelTotals& k : model.runner().profiler().Totals()) {
    (k.phase == "decode" ? decode : prefill)[k.kernel] = k;
  }
  const uint64_t linear = 3;
  const uint64_t full = 1;
  ASSERT_TRUE(decode.count("linear_attention") == 1 && prefill.count("gated_delta_rule") == 1);
  EXPECT_EQ(decode["linear_attention"].calls, 4 * linear);
  EXPECT_EQ(decode["attention"].calls, 4 * full);
  EXPECT_EQ(decode["norm_lm_head"].calls, 4u);
  EXPECT_EQ(prefill["gated_delta_rule"].calls, linear);  // the second chunk of 36 tokens
  EXPECT_EQ(prefill["lm_head_gemv"].calls, 1u);
  for (const auto& [name, k] : decode) {
    EXPECT_GT(k.seconds, 0) << name;
    EXPECT_GT(k.bytes, 0) << name;
    EXPECT_THAT(name, testing::Not(HasSubstr("prefill"))) << name;
  }
  const std::vector<StepProfile> profiles = model.runner().profiler().Profiles();
  ASSERT_EQ(profiles.size(), 1u);
  EXPECT_EQ(profiles[0].batch, 1);
  EXPECT_EQ(profiles[0].steps, 4u);
  double sum = 0;
  for (const StepProfile::Kernel& k : profiles[0].kernels) sum += k.seconds_per_step;
  EXPECT_NEAR(sum, profiles[0].step_seconds, 1e-9);
  // lm_head reads its matrix once a step.
  const auto head = std::find_if(profiles[0].kernels.begin(), profiles[0].kernels.end(),
                                 [](const auto& k) { return k.kernel == "norm_lm_head"; });
  ASSERT_NE(head, profiles[0].kernels.end());
  EXPECT_GE(head->bytes_per_step, 704 * 128 * 2);
  EXPECT_LE(head->bytes_per_step, 704 * 128 * 2 * 1.2);
  EXPECT_TRUE(std::is_sorted(
      profiles[0].kernels.begin(), profiles[0].kernels.end(),
      [](const auto& a, const auto& b) { return a.seconds_per_step > b.seconds_per_step; }));
}

TEST(ModelRunner, BucketsCountTheirReplays) {
  TestModel model(GoldenDir("tiny-llama"), {.max_sequences = 5});
  EXPECT_THAT(model.runner().buckets(), ElementsAre(1, 2, 4, 8));
  EXPECT_EQ(model.runner().max_decode_rows(), 5);
  std::vector<TestSequence> sequences;
  std::vector<DecodeRow> rows;
  for (int s = 0; s < 5; ++s) sequences.push_back(model.Sequence(s));
  for (int s = 0; s < 5; ++s) {
    model.Prefill(sequences[s], {1});
    rows.push_back({.sequence = sequences[s].view(), .token = 2, .position = 1, .sampling = {}});
  }
  for (int count : {1, 3, 4, 5, 5})
    model.runner().Decode({rows.data(), static_cast<size_t>(count)});
  std::vector<uint64_t> replays;
  for (const EngineStats::PerBucket& b : model.runner().BucketCounters()) {
    EXPECT_EQ(b.captures, 1u);
    replays.push_back(b.replays);
  }
  EXPECT_THAT(replays, ElementsAre(1, 0, 2, 2));
}

TEST(ModelRunner, CallsOutsideTheLimitsThrow) {
  TestModel model(GoldenDir("tiny-qwen35"), {.max_sequences = 2, .max_context = 100, .chunk = 64});
  const TestSequence sequence = model.Sequence(0);
  EXPECT_EQ(model.runner().max_prefill_tokens(), 64);
  const auto prefill = [&](std::vector<int32_t> tokens, int start, SequenceView view) {
    return model.runner().Prefill({.sequence = view,
                                   .tokens = tokens,
                                   .start_position = start,
                                   .sample = true,
                                   .sampling = {}});
  };
  EXPECT_GE(prefill(std::vector<int32_t>(64, 1), 0, sequence.view()), 0);
  EXPECT_GE(prefill(std::vector<int32_t>(36, 1), 64, sequence.view()), 0);
  EXPECT_THROW(prefill(std::vector<int32_t>(65, 1), 0, sequence.view()), std::invalid_argument);
  EXPECT_THROW(prefill(std::vector<int32_t>(37, 1), 64, sequence.view()), std::invalid_argument);
  EXPECT_THROW(prefill({}, 0, sequence.view()), std::invalid_argument);
  EXPECT_THROW(prefill({704}, 0, sequence.view()), std::invalid_argument);
  EXPECT_THROW(prefill({-1}, 0, sequence.view()), std::invalid_argument);
  EXPECT_THROW(prefill({1}, 0, {.pages = {}, .state_slot = 0}), std::invalid_argument);
  EXPECT_THROW(prefill({1}, 0, {.pages = sequence.pages, .state_slot = 3}), std::invalid_argument);
  const DecodeRow row{.sequence = sequence.view(), .token = 1, .position = 99, .sampling = {}};
  EXPECT_EQ(model.runner().Decode({&row, 1}).size(), 1u);
  EXPECT_THROW(model.runner().Decode({}), std::invalid_argument);
  const std::vector<DecodeRow> many(3, row);
  EXPECT_THROW(model.runner().Decode(many), std::invalid_argument);
}

TEST(ModelRunner, ChunksThatAreNotTheLastSampleNothing) {
  TestModel model(GoldenDir("tiny-llama"));
  const std::vector<int32_t> tokens = {5, 6, 7};
  const TestSequence sequence = model.Sequence(0);
  EXPECT_EQ(model.runner().Prefill({.sequence = sequence.view(),
                                    .tokens = tokens,
                                    .start_position = 0,
                                    .sample = false,
                                    .sampling = {}}),
            0);
}

TEST(ModelRunner, WhatCannotBeBuiltSaysWhy) {
  absl::StatusOr<OpenedModel> model = OpenModel(GoldenDir("tiny-llama"));
  ASSERT_TRUE(model.ok()) << model.status();
  const ModelSpec& spec = model->config.spec;
  const std::unique_ptr<Backend> backend = MakeCpuBackend(1);
  absl::StatusOr<MemoryPlan> plan = PlanMemory(spec, *backend, {.max_sequences = 1});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto create = [&](const RunnerOptions& options) {
    return ModelRunner::Create(*backend, spec, *model->weights, options).status();
  };
  EXPECT_EQ(create({.plan = *plan}), absl::OkStatus());
  const absl::Status persistent = create({.plan = *plan, .decode_plan = DecodePlan::kPersistent});
  EXPECT_EQ(persistent.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(persistent.message()), HasSubstr("--decode_plan=persistent: the cpu"));
  const absl::Status no_scores = create({.plan = *plan, .decode_plan = DecodePlan::kExplicit});
  EXPECT_EQ(no_scores.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(no_scores.message()), HasSubstr("MemoryLimits::decode_plan"));
  MemoryPlan of_another = *plan;
  of_another.weight_bytes += 4096;
  EXPECT_THAT(std::string(create({.plan = of_another}).message()),
              HasSubstr("the memory plan has"));
}

}  // namespace
}  // namespace qwend
