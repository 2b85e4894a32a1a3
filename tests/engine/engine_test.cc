// The engine thread over the fake model: statuses, gauges, and ends of every kind.
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine_fixture.h"

namespace qwend {
namespace {

using testing::HasSubstr;

TEST_F(EngineTest, ManyAtOnceGetTheTokensOfOneAlone) {
  Make({.fake = {.slots = 4, .max_rows = 4, .vocab = kVocab}, .max_queued = 100});
  Start();
  std::vector<GenerationRequest> requests;
  for (int i = 0; i < 60; ++i) {
    GenerationRequest request = Request(absl::StrCat("r", i), 1 + i * 7, 1 + i % 30);
    request.ignore_eos = false;
    request.sampling.temperature = i % 2;
    request.sampling.seed = i;
    requests.push_back(request);
    Submit(request);
  }
  for (size_t i = 0; i < requests.size(); ++i) {
    const FakeAnswer expected = ExpectedAnswer(requests[i], kEos, kVocab);
    EXPECT_EQ(sinks_[i]->WaitClosed(), expected.reason);
    EXPECT_EQ(sinks_[i]->tokens(), expected.tokens);
  }
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.kv_pages_used, 0);
  EXPECT_EQ(stats.preemptions, 0u);
  size_t prompt = 0;
  size_t generated = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    prompt += requests[i].prompt.size();
    generated += sinks_[i]->tokens().size();
  }
  EXPECT_EQ(stats.prompt_tokens, prompt);
  EXPECT_EQ(stats.generation_tokens, generated);
  engine_.reset();
  EXPECT_GT(steps_of_batch_[4], 0);
}

TEST_F(EngineTest, RefusesWhatIsNotARequest) {
  Make({.fake = {.pages = 10, .slots = 1, .vocab = kVocab}});
  Start();
  const auto refused = [&](const char* word, auto change) {
    GenerationRequest request = Request("bad");
    change(request);
    const absl::Status status = Refused(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << word;
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  };
  refused("prompt", [](auto& r) { r.prompt.clear(); });
  refused("prompt[1]", [](auto& r) { r.prompt = {1, kVocab, 2}; });
  refused("prompt[0]", [](auto& r) { r.prompt = {-1}; });
  refused("stop_token_ids[0]", [](auto& r) { r.stop_token_ids = {kVocab}; });
  refused("max_tokens", [](auto& r) { r.max_tokens = 0; });
  refused("min_tokens", [](auto& r) { r.min_tokens = 10; });
  refused("min_tokens", [](auto& r) { r.min_tokens = -1; });
  refused("context of 1024", [](auto& r) { r.max_tokens = kContext - 4; });
  refused("max_tokens", [](auto& r) { r.max_tokens = std::numeric_limits<int>::max(); });
  refused("cache of 640", [](auto& r) { r.max_tokens = 640 - 4; });
  refused("stop_token_ids", [](auto& r) {
    r.min_tokens = 1;
    for (int i = 0; i <= SamplingRow::kMaxBanned; ++i) r.stop_token_ids.push_back(i);
  });
  refused("temperature", [](auto& r) { r.sampling.temperature = std::nanf(""); });
  refused("temperature", [](auto& r) { r.sampling.temperature = -0.5f; });
  refused("top_p", [](auto& r) { r.sampling.top_p = 0; });
  refused("top_p", [](auto& r) { r.sampling.top_p = std::nanf(""); });
  refused("min_p", [](auto& r) { r.sampling.min_p = 1; });
  refused("top_k", [](auto& r) { r.sampling.top_k = -1; });

  GenerationRequest most = Request("most", 5, 635);
  EXPECT_EQ(Submit(most)->WaitClosed(), CloseReason::kLength);
  EXPECT_EQ(sinks_[0]->tokens().size(), 635u);
}

TEST_F(EngineTest, TheQueueIsBounded) {
  Gate gate;
  decode_gate_ = &gate;
  Make({.fake = {.slots = 1, .vocab = kVocab}, .max_queued = 2});
  Start();
  Submit(Request("running"));
  gate.AwaitArrival();
  Submit(Request("second"));
  Submit(Request("third"));
  EXPECT_EQ(Refused(Request("fourth")).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->Stats().running, 1);
  EXPECT_EQ(engine_->Stats().waiting, 2);
  EXPECT_TRUE(engine_->End("second", CloseReason::kCancelled).ok());
  gate.Open();
  EXPECT_EQ(sinks_[1]->WaitClosed(), CloseReason::kCancelled);
  EXPECT_FALSE(sinks_[1]->admitted());
  Submit(Request("fourth"));
  EXPECT_EQ(sinks_[2]->WaitClosed(), CloseReason::kLength);
  EXPECT_EQ(sinks_[3]->WaitClosed(), CloseReason::kLength);
}

TEST_F(EngineTest, AnIdIsTakenUntilItsCloseAndFreeFromThen) {
  Gate gate;
  decode_gate_ = &gate;
  Make();
  Start();
  auto again = std::make_shared<RecordingSink>();
  absl::Status reused = absl::UnknownError("not tried");
  EngineStats at_close;
  auto sink = std::make_shared<RecordingSink>();
  // Another thread learns of the end and uses the id again before OnClose has returned.
  sink->on_close = [&](CloseReason) {
    std::thread([&] {
      at_close = engine_->Stats();
      reused = engine_->Submit(Request("id"), again);
    }).join();
  };
  ASSERT_TRUE(engine_->Submit(Request("id"), sink).ok());
  EXPECT_EQ(Refused(Request("id")).code(), absl::StatusCode::kAlreadyExists);
  gate.AwaitArrival();
  EXPECT_EQ(Refused(Request("id")).code(), absl::StatusCode::kAlreadyExists);
  gate.Open();
  EXPECT_EQ(sink->WaitClosed(), CloseReason::kLength);
  EXPECT_TRUE(reused.ok()) << reused;
  EXPECT_EQ(at_close.running, 0);
  EXPECT_EQ(at_close.kv_pages_used, 0);
  EXPECT_EQ(at_close.generation_tokens, 9u);
  EXPECT_EQ(again->WaitClosed(), CloseReason::kLength);
}

TEST_F(EngineTest, EndsOnlyWhatIsLiveAndOnlyForACallersReason) {
  Make();
  Start();
  EXPECT_EQ(engine_->End("none", CloseReason::kAborted).code(), absl::StatusCode::kNotFound);
  Submit(Request("r", 5, 800));
  EXPECT_EQ(engine_->End("r", CloseReason::kEos).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(engine_->End("r", CloseReason::kAborted).ok());
  ExpectAllClosed(CloseReason::kAborted);
  EXPECT_EQ(engine_->End("r", CloseReason::kAborted).code(), absl::StatusCode::kNotFound);
}

// An end that is still in the inbox when its request finishes must not hit the next request of the
// same id.
TEST_F(EngineTest, AnOldEndDoesNotHitANewRequestOfTheSameId) {
  Gate gate;
  decode_gate_ = &gate;
  Make();
  Start();
  auto again = std::make_shared<RecordingSink>();
  auto sink = std::make_shared<RecordingSink>();
  sink->on_close = [&](CloseReason) {
    std::thread([&] { EXPECT_TRUE(engine_->Submit(Request("id"), again).ok()); }).join();
  };
  ASSERT_TRUE(engine_->Submit(Request("id", 5, 2), sink).ok());
  gate.AwaitArrival();
  EXPECT_TRUE(engine_->End("id", CloseReason::kAborted).ok());
  gate.Open();
  EXPECT_EQ(sink->WaitClosed(), CloseReason::kLength);
  EXPECT_EQ(again->WaitClosed(), CloseReason::kLength);
}

TEST_F(EngineTest, AReceiverStopsItsOwnStream) {
  Make();
  Start();
  auto sink = std::make_shared<RecordingSink>();
  std::atomic<int> seen = 0;
  sink->on_token = [&](int32_t) {
    if (++seen != 3) return;
    EXPECT_TRUE(engine_->End("r", CloseReason::kStopped).ok());
  };
  const GenerationRequest request = Request("r", 5, 800);
  ASSERT_TRUE(engine_->Submit(request, sink).ok());
  EXPECT_EQ(sink->WaitClosed(), CloseReason::kStopped);
  EXPECT_EQ(sink->tokens().size(), 3u);
}

TEST_F(EngineTest, DeadlinesEndQueuedAndRunningRequests) {
  Make({.fake = {.slots = 1, .vocab = kVocab}});
  fake_->before_decode = [](std::span<const DecodeRow>) { absl::SleepFor(absl::Milliseconds(1)); };
  Start();
  GenerationRequest running = Request("running", 5, 1000);
  running.deadline = absl::Now() + absl::Milliseconds(150);
  GenerationRequest queued = Request("queued");
  queued.deadline = absl::Now() + absl::Milliseconds(30);
  Submit(running);
  ASSERT_TRUE(sinks_[0]->WaitTokens(1));
  Submit(queued);
  EXPECT_EQ(sinks_[1]->WaitClosed(), CloseReason::kDeadline);
  EXPECT_FALSE(sinks_[1]->admitted());
  EXPECT_FALSE(sinks_[0]->closed());
  EXPECT_EQ(sinks_[0]->WaitClosed(), CloseReason::kDeadline);
  EXPECT_GE(absl::Now(), running.deadline);
}

TEST_F(EngineTest, AbortAllEndsWhatIsLiveAndNothingLater) {
  Make({.fake = {.slots = 2, .vocab = kVocab}});
  fake_->before_decode = [](std::span<const DecodeRow>) { absl::SleepFor(absl::Milliseconds(1)); };
  Start();
  for (int i = 0; i < 6; ++i) Submit(Request(absl::StrCat("r", i), 5, 1000));
  ASSERT_TRUE(sinks_[0]->WaitTokens(2));
  engine_->AbortAll();
  auto later = Submit(Request("later"));
  sinks_.pop_back();
  ExpectAllClosed(CloseReason::kAborted);
  EXPECT_EQ(later->WaitClosed(), CloseReason::kLength);
}

// Ends race with admission and with completion; whoever wins, each stream ends once, with one of
// the two reasons, and its tokens are a beginning of its own.
TEST_F(EngineTest, CancelRacesWithAdmissionAndCompletion) {
  Make({.fake = {.slots = 2, .vocab = kVocab}, .max_queued = 100});
  Start();
  std::mt19937 random(7);
  int cancelled = 0;
  int complete = 0;
  for (int round = 0; round < 2000; ++round) {
    const GenerationRequest request =
        Request(absl::StrCat("r", round), 1 + random() % 130, 1 + random() % 4);
    auto sink = Submit(request);
    if (random() % 2 == 0) sink->WaitAdmitted();
    for (unsigned spin = random() % 300; spin > 0; --spin)
      std::atomic_signal_fence(std::memory_order_seq_cst);
    const absl::Status status = engine_->End(request.id, CloseReason::kCancelled);
    const auto reason = sink->WaitClosed();
    const FakeAnswer expected = ExpectedAnswer(request, kEos, kVocab);
    const std::vector<int32_t> tokens = sink->tokens();
    if (reason == CloseReason::kCancelled) {
      ++cancelled;
      EXPECT_TRUE(status.ok());
      ASSERT_TRUE(tokens.size() < expected.tokens.size());
      EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), expected.tokens.begin()));
    } else {
      ++complete;
      EXPECT_EQ(reason, CloseReason::kLength);
      EXPECT_EQ(tokens, expected.tokens);
    }
  }
  EXPECT_GT(cancelled, 20);
  EXPECT_GT(complete, 20);
  EXPECT_EQ(engine_->Stats().kv_pages_used, 0);
}

}  // namespace
}  // namespace qwend
