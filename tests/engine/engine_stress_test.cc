// Many threads submit, stop, cancel, abort, time out and look, while the engine runs and while it
// ends. Meant for ThreadSanitizer (-DQWEND_SANITIZE=thread), and true without it.
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine_fixture.h"

namespace qwend {
namespace {

constexpr int kThreads = 4;
constexpr auto kTime = std::chrono::milliseconds(1200);

struct Sent {
  GenerationRequest request;
  std::shared_ptr<RecordingSink> sink;
};

// What one caller does until the time is over or the engine refuses for good.
std::vector<Sent> Call(Engine& engine, int thread, std::chrono::steady_clock::time_point end) {
  std::mt19937 random(100 + thread);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  std::vector<Sent> sent;
  for (int i = 0; std::chrono::steady_clock::now() < end; ++i) {
    // Some ids are shared between the threads.
    const std::string id =
        below(4) == 0 ? absl::StrCat("shared", below(3)) : absl::StrCat("t", thread, "-", i);
    Sent s{Request(id, 1 + below(150), 1 + below(30)), std::make_shared<RecordingSink>()};
    s.request.priority = below(3);
    if (below(5) == 0) s.request.deadline = absl::Now() + absl::Microseconds(below(3000));
    const absl::Status status = engine.Submit(s.request, s.sink);
    if (status.ok()) {
      sent.push_back(s);
    } else {
      EXPECT_TRUE(absl::IsAlreadyExists(status) || absl::IsResourceExhausted(status)) << status;
      EXPECT_EQ(s.sink.use_count(), 1);
      std::this_thread::yield();
    }
    switch (below(6)) {
      case 0:
        engine.End(id, CloseReason::kCancelled).IgnoreError();
        break;
      case 1:
        if (!sent.empty()) {
          engine.End(sent[random() % sent.size()].request.id, CloseReason::kAborted).IgnoreError();
        }
        break;
      case 2:
        if (status.ok()) sent.back().sink->WaitClosed();
        break;
      case 3:
        if (below(50) == 0) engine.AbortAll();
        break;
      default: {
        const EngineStats stats = engine.Stats();
        EXPECT_LE(stats.running, engine.device().max_sequences);
        EXPECT_LE(stats.kv_pages_used, engine.device().kv_pages_total);
        EXPECT_FALSE(stats.failed);
      }
    }
  }
  return sent;
}

void CheckAnswer(const Sent& s) {
  const auto reason = s.sink->closed();
  ASSERT_TRUE(reason);
  EXPECT_EQ(s.sink->misuses(), 0);
  const FakeAnswer expected = ExpectedAnswer(s.request, kEos, kVocab);
  const std::vector<int32_t> tokens = s.sink->tokens();
  if (reason == expected.reason) {
    EXPECT_EQ(tokens, expected.tokens);
  } else {
    EXPECT_TRUE(reason == CloseReason::kCancelled || reason == CloseReason::kAborted ||
                reason == CloseReason::kDeadline);
    ASSERT_LE(tokens.size(), expected.tokens.size());
    EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), expected.tokens.begin()));
  }
}

using EngineStressTest = EngineTest;

TEST_F(EngineStressTest, EveryStreamEndsOnceWithItsOwnTokens) {
  Make({.fake = {.pages = 9, .slots = 4, .max_rows = 3, .vocab = kVocab}, .max_queued = 6});
  steps_of_batch_[3] = 0;
  Start();
  std::vector<std::vector<Sent>> sent(kThreads);
  std::vector<std::thread> threads;
  const auto end = std::chrono::steady_clock::now() + kTime;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] { sent[t] = Call(*engine_, t, end); });
  }
  for (std::thread& thread : threads) thread.join();
  Finish();  // with whatever still runs
  size_t total = 0;
  size_t complete = 0;
  for (const auto& list : sent) {
    for (const Sent& s : list) {
      CheckAnswer(s);
      ++total;
      complete += s.sink->closed() == CloseReason::kLength;
    }
  }
  EXPECT_GT(total, 100u);
  EXPECT_GT(complete, 20u);
}

// The fault comes while callers call; from then on they are refused, and nobody waits for ever.
TEST_F(EngineStressTest, AFaultInTheMiddleEndsEveryStream) {
  Make({.fake = {.slots = 4, .vocab = kVocab}, .max_queued = 6});
  std::atomic<int> steps = 0;
  fake_->before_decode = [&](std::span<const DecodeRow>) {
    if (++steps == 200) throw DeviceError("lost the device");
  };
  Start();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0;; ++i) {
        auto sink = std::make_shared<RecordingSink>();
        const auto status = engine_->Submit(Request(absl::StrCat(t, "-", i), 5, 20), sink);
        if (absl::IsUnavailable(status)) return;
        ASSERT_TRUE(status.ok()) << status;
        const auto reason = sink->WaitClosed();
        ASSERT_TRUE(reason == CloseReason::kLength || reason == CloseReason::kDeviceFault);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(fault_.get_future().get().code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(engine_->Stats().failed);
}

}  // namespace
}  // namespace qwend
