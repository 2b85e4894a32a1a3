// The whole engine on the demo model: the texts that the reference gives, alone, all at once and in
// small chunks, and the same bits whatever else runs.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/engine.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "nlohmann/json.hpp"
#include "recording_sink.h"

namespace qwend {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

const fs::path kDemo = fs::path(QWEND_SOURCE_DIR) / "models/demo";
constexpr double kMargin = 0.05;  // below it another order of sums may choose another token

struct Golden {
  std::vector<int32_t> prompt;
  std::vector<int32_t> greedy;
  std::string text;
  double min_margin = 0;
};

std::vector<Golden> LoadGolden() {
  std::ifstream file(fs::path(QWEND_SOURCE_DIR) / "tests/golden/demo-greedy.json");
  std::vector<Golden> all;
  for (const auto& entry : nlohmann::json::parse(file)) {
    all.push_back({.prompt = entry.at("prompt_ids"),
                   .greedy = entry.at("greedy_ids"),
                   .text = entry.at("text"),
                   .min_margin = entry.at("min_margin")});
  }
  return all;
}

std::unique_ptr<Engine> Open(EngineOptions options) {
  options.backend = "cpu";
  auto engine = Engine::Create(options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  if (!engine.ok()) return nullptr;
  (*engine)->Start({}, {});
  return *std::move(engine);
}

GenerationRequest Request(const std::string& id, const std::vector<int32_t>& prompt,
                          int max_tokens) {
  GenerationRequest request;
  request.id = id;
  request.prompt = prompt;
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  return request;
}

struct Answer {
  std::vector<int32_t> tokens;
  CloseReason reason = CloseReason::kAborted;
  bool operator==(const Answer&) const = default;
};

Answer Wait(RecordingSink& sink) {
  const auto reason = sink.WaitClosed();
  EXPECT_TRUE(reason);
  EXPECT_EQ(sink.misuses(), 0);
  return {.tokens = sink.tokens(), .reason = reason.value_or(CloseReason::kAborted)};
}

std::vector<Answer> AllAtOnce(Engine& engine, const std::vector<GenerationRequest>& requests,
                              const std::vector<size_t>& order) {
  std::vector<std::shared_ptr<RecordingSink>> sinks(requests.size());
  for (size_t i : order) {
    sinks[i] = std::make_shared<RecordingSink>();
    EXPECT_TRUE(engine.Submit(requests[i], sinks[i]).ok());
  }
  std::vector<Answer> answers;
  for (const auto& sink : sinks) answers.push_back(Wait(*sink));
  return answers;
}

std::vector<Answer> OneByOne(Engine& engine, const std::vector<GenerationRequest>& requests) {
  std::vector<Answer> answers;
  for (size_t i = 0; i < requests.size(); ++i) {
    auto sink = std::make_shared<RecordingSink>();
    EXPECT_TRUE(engine.Submit(requests[i], sink).ok());
    answers.push_back(Wait(*sink));
  }
  return answers;
}

std::vector<size_t> Order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

void ExpectWholeAgain(const Engine& engine) {
  const EngineStats stats = engine.Stats();
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.kv_pages_used, 0);
  EXPECT_FALSE(stats.failed);
}

class EngineDemoTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    engine_ = Open({.model_dir = kDemo, .max_sequences = 16}).release();
  }
  static void TearDownTestSuite() { delete engine_; }
  void SetUp() override { ASSERT_NE(engine_, nullptr); }
  static Engine* engine_;
};
Engine* EngineDemoTest::engine_ = nullptr;

void ExpectGolden(Engine& engine, bool at_once) {
  const std::vector<Golden> golden = LoadGolden();
  std::vector<GenerationRequest> requests;
  for (const Golden& g : golden) {
    requests.push_back(
        Request(absl::StrCat("g", requests.size()), g.prompt, static_cast<int>(g.greedy.size())));
  }
  const std::vector<Answer> answers =
      at_once ? AllAtOnce(engine, requests, Order(requests.size())) : OneByOne(engine, requests);
  int compared = 0;
  for (size_t i = 0; i < golden.size(); ++i) {
    if (golden[i].min_margin <= kMargin) continue;
    SCOPED_TRACE(i);
    ++compared;
    EXPECT_EQ(answers[i].tokens, golden[i].greedy);
    EXPECT_EQ(engine.tokenizer()->Decode(answers[i].tokens, true), golden[i].text);
    const auto& eos = engine.model().eos_token_ids;
    const bool ends = std::count(eos.begin(), eos.end(), golden[i].greedy.back()) > 0;
    EXPECT_EQ(answers[i].reason, ends ? CloseReason::kEos : CloseReason::kLength);
  }
  EXPECT_GT(compared, 5);
  ExpectWholeAgain(engine);
}

TEST_F(EngineDemoTest, GreedyTextsOneByOne) { ExpectGolden(*engine_, false); }
TEST_F(EngineDemoTest, GreedyTextsAllAtOnce) { ExpectGolden(*engine_, true); }

TEST_F(EngineDemoTest, GreedyTextsInSmallChunksAndBatches) {
  auto engine = Open({.model_dir = kDemo, .max_sequences = 3, .prefill_chunk_tokens = 64});
  ASSERT_NE(engine, nullptr);
  ExpectGolden(*engine, true);
}

TEST_F(EngineDemoTest, ABatchAndItsOrderChangeNoBit) {
  const std::vector<Golden> golden = LoadGolden();
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 16; ++i) {
    const std::vector<int32_t>& prompt = golden[i % golden.size()].prompt;
    GenerationRequest r = Request(absl::StrCat("b", i), prompt, 16 + i);
    r.ignore_eos = i % 4 == 3;
    if (i % 2 == 1) {
      r.sampling = {.temperature = 0.9f, .top_p = 0.95f, .top_k = i % 3 == 0 ? 20 : 0};
      r.sampling.seed = 1000 + i;
    }
    requests.push_back(r);
  }
  const std::vector<Answer> alone = OneByOne(*engine_, requests);
  std::vector<size_t> order = Order(requests.size());
  std::mt19937 random(3);
  for (int round = 0; round < 3; ++round) {
    SCOPED_TRACE(round);
    EXPECT_EQ(AllAtOnce(*engine_, requests, order), alone);
    std::shuffle(order.begin(), order.end(), random);
  }
  ExpectWholeAgain(*engine_);
}

TEST_F(EngineDemoTest, SeedsDecide) {
  const std::vector<int32_t> prompt = LoadGolden()[0].prompt;
  std::vector<GenerationRequest> requests;
  for (uint64_t seed : {1, 2, 1}) {
    GenerationRequest r = Request(absl::StrCat("s", requests.size()), prompt, 24);
    r.sampling.temperature = 1.5f;
    r.sampling.seed = seed;
    r.ignore_eos = true;
    requests.push_back(r);
  }
  const std::vector<Answer> answers = AllAtOnce(*engine_, requests, Order(3));
  EXPECT_EQ(answers[0], answers[2]);
  EXPECT_NE(answers[0], answers[1]);
}

TEST_F(EngineDemoTest, DescribesModelAndDevice) {
  const ModelDescription& model = engine_->model();
  EXPECT_EQ(model.model_id, "demo");
  EXPECT_EQ(model.architecture, "qwen3_5");
  EXPECT_THAT(model.eos_token_ids, ElementsAre(3176, 3178));  // config, generation_config
  EXPECT_EQ(model.weight_dtype, "bf16");
  EXPECT_EQ(model.vocab_size, 3264);
  ASSERT_NE(engine_->tokenizer(), nullptr);
  EXPECT_EQ(model.sampleable_tokens, engine_->tokenizer()->size());
  EXPECT_LT(model.sampleable_tokens, model.vocab_size);
  EXPECT_EQ(model.max_context_tokens, 4096);
  EXPECT_NEAR(model.default_sampling.temperature, 0.7, 1e-6);
  EXPECT_NE(engine_->chat_template(), nullptr);
  EXPECT_TRUE(engine_->chat_template_status().ok());
  const DeviceDescription& device = engine_->device();
  EXPECT_EQ(device.backend, "cpu");
  EXPECT_EQ(device.max_sequences, 16);
  EXPECT_GE(device.batch_buckets.back(), 16);
  EXPECT_GT(device.peak_bandwidth, 1e8);
  EXPECT_NE(device.decode_plan, "auto");
  const EngineStats stats = engine_->Stats();
  ASSERT_FALSE(stats.buckets.empty());
  EXPECT_GT(stats.buckets[0].replays, 0u);
}

TEST_F(EngineDemoTest, TheLastPositionOfTheContextIsUsed) {
  GenerationRequest r = Request("long", std::vector<int32_t>(4094, 300), 2);
  r.ignore_eos = true;
  auto sink = std::make_shared<RecordingSink>();
  ASSERT_TRUE(engine_->Submit(r, sink).ok());
  EXPECT_EQ(Wait(*sink).tokens.size(), 2u);
  r.max_tokens = 3;
  EXPECT_EQ(engine_->Submit(r, sink).code(), absl::StatusCode::kInvalidArgument);
}

// A folder with links to some of the demo model's files.
class Folder {
 public:
  explicit Folder(const std::vector<std::string>& files) {
    std::string name = (fs::temp_directory_path() / "qwend-demo-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) ADD_FAILURE() << name;
    path_ = name;
    for (const std::string& file : files) fs::create_symlink(kDemo / file, path_ / file);
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

TEST(EngineCreate, WithoutTokenizerServesIdsOnly) {
  Folder folder({"config.json", "model.safetensors"});
  auto engine = Open({.model_dir = folder.path(), .max_sequences = 1});
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->tokenizer(), nullptr);
  EXPECT_EQ(engine->chat_template(), nullptr);
  EXPECT_EQ(engine->chat_template_status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine->model().sampleable_tokens, 3264);
  EXPECT_THAT(engine->model().eos_token_ids, ElementsAre(3176));
  auto sink = std::make_shared<RecordingSink>();
  ASSERT_TRUE(engine->Submit(Request("r", {300, 198}, 3), sink).ok());
  EXPECT_EQ(Wait(*sink).tokens.size(), 3u);
}

TEST(EngineCreate, ATemplateThatCannotBeUsedDoesNotStopTheStart) {
  Folder folder({"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"});
  std::ofstream(folder.path() / "chat_template.jinja") << "{% for m in %}";
  auto engine = Open({.model_dir = folder.path(), .max_sequences = 1});
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->chat_template(), nullptr);
  const absl::Status status = engine->chat_template_status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("chat template"));
  // The tokenizer's own end of sequence joins config.json's.
  EXPECT_THAT(engine->model().eos_token_ids, ElementsAre(3176, 3178));
}

TEST(EngineCreate, SaysWhatIsWrong) {
  const auto fails = [](const EngineOptions& options, absl::StatusCode code,
                        const std::string& word) {
    const auto engine = Engine::Create(options);
    EXPECT_EQ(engine.status().code(), code) << engine.status();
    EXPECT_THAT(std::string(engine.status().message()), HasSubstr(word));
  };
  fails({.model_dir = "/nowhere/at/all"}, absl::StatusCode::kNotFound, "/nowhere/at/all");
  fails({.model_dir = kDemo, .backend = "tpu"}, absl::StatusCode::kInvalidArgument,
        "--backend tpu");
  fails({.model_dir = kDemo, .backend = "cpu", .max_queued = -1},
        absl::StatusCode::kInvalidArgument, "--max_queued");
  fails({.model_dir = kDemo, .backend = "cpu", .max_context_tokens = 5000},
        absl::StatusCode::kInvalidArgument, "4096");
  fails({.model_dir = kDemo, .backend = "cpu", .prefill_chunk_tokens = 100},
        absl::StatusCode::kInvalidArgument, "64");
  if (CudaDeviceCount() == 0) {
    fails({.model_dir = kDemo, .backend = "cuda"}, absl::StatusCode::kFailedPrecondition,
          "--backend cuda");
  }
}

}  // namespace
}  // namespace qwend
