// The engine's own life over the fake model: device faults, shutdown, idleness.
#include <ctime>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "engine_fixture.h"

namespace qwend {
namespace {

using EngineLifeTest = EngineTest;
using testing::HasSubstr;

TEST_F(EngineLifeTest, ADeviceFaultEndsEverything) {
  for (const bool in_prefill : {true, false}) {
    SCOPED_TRACE(in_prefill ? "prefill" : "decode");
    Gate gate;
    (in_prefill ? prefill_gate_ : decode_gate_) = &gate;
    (in_prefill ? fault_in_prefill_ : fault_in_decode_) = true;
    Make({.fake = {.slots = 1, .vocab = kVocab}});
    fault_ = {};
    sinks_.clear();
    Submit(Request("running"));
    Submit(Request("queued"));
    Start();
    gate.AwaitArrival();
    Submit(Request("in the inbox"));
    EXPECT_TRUE(engine_->End("queued", CloseReason::kAborted).ok());
    gate.Open();
    const absl::Status fault = fault_.get_future().get();
    EXPECT_EQ(fault.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(fault.message()), HasSubstr("lost the device"));
    ExpectAllClosed(CloseReason::kDeviceFault);
    const EngineStats stats = engine_->Stats();
    EXPECT_TRUE(stats.failed);
    EXPECT_EQ(stats.running + stats.waiting + stats.kv_pages_used, 0);
    EXPECT_EQ(Refused(Request("late")).code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(engine_->End("running", CloseReason::kAborted).code(), absl::StatusCode::kNotFound);
    engine_->AbortAll();
    Finish();
    prefill_gate_ = decode_gate_ = nullptr;
    fault_in_prefill_ = fault_in_decode_ = false;
  }
}

TEST_F(EngineLifeTest, TheDestructorClosesEveryStream) {
  Gate gate;
  decode_gate_ = &gate;
  Make({.fake = {.slots = 1, .vocab = kVocab}});
  Start();
  Submit(Request("running", 5, 1000));
  gate.AwaitArrival();
  Submit(Request("queued"));
  std::thread opener([&] {
    absl::SleepFor(absl::Milliseconds(20));
    gate.Open();
  });
  engine_.reset();
  opener.join();
  for (const auto& sink : sinks_) EXPECT_EQ(sink->closed(), CloseReason::kAborted);
}

TEST_F(EngineLifeTest, TheDestructorOfAnEngineThatNeverRanClosesToo) {
  Make();
  Submit(Request("a"));
  Submit(Request("b"));
  EXPECT_EQ(engine_->Stats().waiting, 2);
  engine_.reset();
  for (const auto& sink : sinks_) EXPECT_EQ(sink->closed(), CloseReason::kAborted);
}

TEST_F(EngineLifeTest, AnIdleEngineShowsItLivesAndSleeps) {
  Make();
  Start();
  EXPECT_EQ(Submit(Request("r"))->WaitClosed(), CloseReason::kLength);
  const absl::Time before = engine_->Stats().heartbeat;
  const std::clock_t cpu = std::clock();
  absl::SleepFor(absl::Milliseconds(1200));
  EXPECT_GE(engine_->Stats().heartbeat, before + absl::Milliseconds(400));
  EXPECT_LT(static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC, 0.2);
  EXPECT_EQ(Submit(Request("wakes up"))->WaitClosed(), CloseReason::kLength);
}

}  // namespace
}  // namespace qwend
