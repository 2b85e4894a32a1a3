#include "server/generate_call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/logging.h"
#include "tests/server/fake_engine.h"

namespace qwend {
namespace {

using ::testing::ElementsAre;
using testing::FakeEngine;
using ::testing::HasSubstr;
using testing::Ids;

// A transport whose writes end when the test says so.
class FakeWriter : public ResponseWriter {
 public:
  explicit FakeWriter(bool streams = true) : streams_(streams) {}

  bool streams() const override { return streams_; }
  void Write(const v1::GenerateResponse* message) override {
    absl::MutexLock lock(&mu_);
    EXPECT_FALSE(pending_) << "one write at a time";
    EXPECT_EQ(ends_, 0);
    pending_ = true;
    messages_.push_back(*message);
  }
  void WriteAndFinish(const v1::GenerateResponse* message) override {
    absl::MutexLock lock(&mu_);
    EXPECT_FALSE(pending_);
    messages_.push_back(*message);
    ++ends_;
  }
  void Finish(const absl::Status& status) override {
    absl::MutexLock lock(&mu_);
    status_ = status;
    ++ends_;
  }

  bool WaitForMessages(size_t count) {
    absl::MutexLock lock(&mu_);
    const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return messages_.size() >= count; };
    return mu_.AwaitWithTimeout(absl::Condition(&there), absl::Seconds(10));
  }
  bool WaitForEnd() {
    absl::MutexLock lock(&mu_);
    const auto ended = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return ends_ > 0; };
    return mu_.AwaitWithTimeout(absl::Condition(&ended), absl::Seconds(10));
  }
  // Ends writes as they come until `done`. How many there are depends on how tokens gather.
  bool ReleaseUntil(GenerateCall* call, const std::function<bool()>& done) {
    const absl::Time limit = absl::Now() + absl::Seconds(10);
    while (absl::Now() < limit) {
      if (pending()) Release(call);
      if (done() && !pending()) return true;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return false;
  }
  void Release(GenerateCall* call, bool ok = true) {
    {
      absl::MutexLock lock(&mu_);
      pending_ = false;
    }
    call->OnWriteDone(ok);
  }
  v1::GenerateResponse message(size_t i) {
    absl::MutexLock lock(&mu_);
    return messages_.at(i);
  }
  size_t count() {
    absl::MutexLock lock(&mu_);
    return messages_.size();
  }
  std::string text() {
    absl::MutexLock lock(&mu_);
    std::string text;
    for (const v1::GenerateResponse& m : messages_) text += m.text();
    return text;
  }
  bool pending() {
    absl::MutexLock lock(&mu_);
    return pending_;
  }
  int ends() {
    absl::MutexLock lock(&mu_);
    return ends_;
  }
  absl::Status status() {
    absl::MutexLock lock(&mu_);
    return status_;
  }

 private:
  const bool streams_;
  absl::Mutex mu_;
  std::vector<v1::GenerateResponse> messages_;
  bool pending_ = false;
  int ends_ = 0;
  absl::Status status_;
};

class GenerateCallTest : public ::testing::Test {
 protected:
  GenerateCallTest() {
    InitLogging("off", false);
    options_.max_buffered_tokens = 8;
    context_ = std::make_unique<ServiceContext>(options_, Authenticator(), "fake");
    context_->state.SetEngine(&engine_);
  }
  std::shared_ptr<GenerateCall> Start(FakeWriter* writer,
                                      absl::Duration deadline = absl::InfiniteDuration()) {
    v1::GenerateRequest request;
    request.set_request_id("r");
    request.set_text("prompt");
    *request.mutable_stopping() = stopping_;
    auto call =
        GenerateCall::Start(context_.get(), request, {"peer", absl::Now() + deadline}, writer);
    EXPECT_TRUE(call.ok()) << call.status();
    return *call;
  }
  FakeWriter& NewWriter(bool streams = true) {
    writers_.push_back(std::make_unique<FakeWriter>(streams));
    return *writers_.back();
  }
  // Waits for what has been scheduled so far, on all threads.
  void Settle() {
    engine_.Emit("nobody", {});
    absl::SleepFor(absl::Milliseconds(30));
  }
  double Counted(const std::string& reason) {
    const std::string text = context_->metrics.Text();
    const std::string name = "finish_reason=\"" + reason + "\"} ";
    return std::stod(text.substr(text.find(name) + name.size()));
  }

  // Destroyed last to first: the engine closes its calls, the context's threads deliver that, and
  // the writers hear of it.
  std::vector<std::unique_ptr<FakeWriter>> writers_;
  ServerOptions options_;
  std::unique_ptr<ServiceContext> context_;
  FakeEngine engine_;
  v1::Stopping stopping_;
};

TEST_F(GenerateCallTest, NothingIsWrittenBeforeTheFirstToken) {
  FakeWriter& writer = NewWriter();
  auto call = Start(&writer);
  Settle();
  engine_.Admit("r");
  Settle();
  EXPECT_EQ(writer.count(), 0u);
  engine_.Emit("r", Ids("a"));
  ASSERT_TRUE(writer.WaitForMessages(1));
  EXPECT_EQ(writer.message(0).text(), "a");
  EXPECT_EQ(writer.message(0).request_id(), "r");
  EXPECT_FALSE(writer.message(0).has_usage());
}

TEST_F(GenerateCallTest, TokensGatherWhileAWriteIsPending) {
  FakeWriter& writer = NewWriter();
  auto call = Start(&writer);
  engine_.Admit("r");
  engine_.Emit("r", Ids("a"));
  ASSERT_TRUE(writer.WaitForMessages(1));
  engine_.Emit("r", Ids("bcd"));
  Settle();
  EXPECT_EQ(writer.count(), 1u);
  writer.Release(call.get());
  ASSERT_TRUE(writer.WaitForMessages(2));
  EXPECT_EQ(writer.message(1).text(), "bcd");
  EXPECT_THAT(writer.message(1).token_ids(), ElementsAre('b', 'c', 'd'));
  // The last message waits for the pending write, too.
  engine_.Emit("r", Ids("e", true));
  engine_.Close("r", CloseReason::kEos);
  Settle();
  EXPECT_EQ(writer.ends(), 0);
  writer.Release(call.get());
  ASSERT_TRUE(writer.WaitForEnd());
  EXPECT_EQ(writer.message(2).text(), "e");
  EXPECT_EQ(writer.message(2).finish().reason(), v1::FINISH_REASON_EOS);
  EXPECT_EQ(writer.message(2).usage().completion_tokens(), 6u);
  EXPECT_EQ(writer.message(2).usage().prompt_tokens(), 6u);
  EXPECT_EQ(Counted("eos"), 1);
}

TEST_F(GenerateCallTest, SlowReaderIsEndedAndTheEngineNeverWaits) {
  FakeWriter& writer = NewWriter();
  auto call = Start(&writer);
  engine_.Admit("r");
  engine_.Emit("r", Ids("a"));
  ASSERT_TRUE(writer.WaitForMessages(1));
  engine_.Emit("r", Ids("12345678"));  // as far behind as it may be
  Settle();
  EXPECT_EQ(writer.ends(), 0);
  engine_.Emit("r", Ids("9"));
  ASSERT_TRUE(writer.WaitForEnd());
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(engine_.WaitUntilIdle());
  Settle();
  EXPECT_EQ(Counted("error"), 1);
  EXPECT_EQ(writer.ends(), 1);
  writer.Release(call.get());
  Settle();
  EXPECT_EQ(writer.ends(), 1);
}

TEST_F(GenerateCallTest, ReaderThatKeepsUpMayTakeAnyNumber) {
  FakeWriter& writer = NewWriter();
  auto call = Start(&writer);
  engine_.Admit("r");
  for (size_t i = 1; i <= 20; ++i) {
    engine_.Emit("r", Ids("abcd"));
    ASSERT_TRUE(writer.ReleaseUntil(call.get(), [&] { return writer.text().size() == 4 * i; }))
        << i;
  }
  EXPECT_EQ(writer.ends(), 0);
}

TEST_F(GenerateCallTest, UnaryGathersEverything) {
  FakeWriter& writer = NewWriter(/*streams=*/false);
  auto call = Start(&writer);
  engine_.Admit("r");
  engine_.Emit("r", Ids("more than eight tokens"));
  Settle();
  EXPECT_EQ(writer.count(), 0u);
  engine_.Close("r", CloseReason::kLength);
  ASSERT_TRUE(writer.WaitForEnd());
  EXPECT_EQ(writer.message(0).text(), "more than eight tokens");
  EXPECT_EQ(writer.message(0).finish().reason(), v1::FINISH_REASON_LENGTH);
}

TEST_F(GenerateCallTest, CancelInEveryStateEndsOnceAndFreesTheSequence) {
  enum State { kQueued, kAdmitted, kWriting, kIdleStream, kClosing };
  int cancelled = 0;
  for (const State state : {kQueued, kAdmitted, kWriting, kIdleStream, kClosing}) {
    FakeWriter& writer = NewWriter();
    auto call = Start(&writer);
    if (state >= kAdmitted) engine_.Admit("r");
    if (state >= kWriting) {
      engine_.Emit("r", Ids("a"));
      ASSERT_TRUE(writer.WaitForMessages(1));
    }
    if (state == kIdleStream) writer.Release(call.get());
    if (state == kClosing) {
      engine_.Close("r", CloseReason::kLength);
      ASSERT_TRUE(engine_.WaitUntilIdle());
      Settle();
    }
    call->OnCancel();
    ASSERT_TRUE(writer.WaitForEnd()) << state;
    EXPECT_EQ(writer.status().code(), absl::StatusCode::kCancelled) << state;
    ASSERT_TRUE(engine_.WaitUntilIdle()) << state;
    Settle();
    call->OnCancel();
    engine_.Emit("r", Ids("late"));
    Settle();
    EXPECT_EQ(writer.ends(), 1) << state;
    // What was over for the engine before the cancel keeps its reason.
    cancelled += state != kClosing;
    EXPECT_EQ(Counted("cancelled"), cancelled) << state;
  }
  EXPECT_EQ(Counted("length"), 1);
}

TEST_F(GenerateCallTest, StopStringEndsTheEngineAndIgnoresWhatFollows) {
  stopping_.add_stop_strings("stop");
  FakeWriter& writer = NewWriter();
  auto call = Start(&writer);
  engine_.Admit("r");
  engine_.Block(true);
  engine_.Emit("r", Ids("xstopyz"));
  engine_.Block(false);
  ASSERT_TRUE(writer.ReleaseUntil(call.get(), [&] { return writer.ends() > 0; }));
  EXPECT_THAT(engine_.EndsOf("r"), ElementsAre(CloseReason::kStopped));
  EXPECT_EQ(writer.text(), "x");
  const auto last = writer.message(writer.count() - 1);
  EXPECT_EQ(last.finish().reason(), v1::FINISH_REASON_STOP_STRING);
  EXPECT_EQ(last.usage().completion_tokens(), 5u);
  EXPECT_EQ(Counted("stop_string"), 1);
}

TEST_F(GenerateCallTest, ErrorsComeWithoutFinishMessage) {
  const std::pair<CloseReason, absl::StatusCode> cases[] = {
      {CloseReason::kNonFiniteLogits, absl::StatusCode::kInternal},
      {CloseReason::kDeviceFault, absl::StatusCode::kInternal},
      {CloseReason::kDeadline, absl::StatusCode::kDeadlineExceeded},
      {CloseReason::kCancelled, absl::StatusCode::kCancelled}};
  for (const auto& [reason, code] : cases) {
    FakeWriter& writer = NewWriter();
    auto call = Start(&writer);
    engine_.Admit("r");
    engine_.Close("r", reason);
    ASSERT_TRUE(writer.WaitForEnd());
    EXPECT_EQ(writer.status().code(), code);
    EXPECT_EQ(writer.count(), 0u);
  }
  EXPECT_EQ(Counted("error"), 2);
  EXPECT_EQ(Counted("deadline"), 1);
  EXPECT_EQ(Counted("cancelled"), 1);
}

TEST_F(GenerateCallTest, LateCancelDoesNotEndALaterRequestOfTheSameName) {
  FakeWriter& first = NewWriter();
  auto old_call = Start(&first);
  engine_.Close("r", CloseReason::kLength);
  ASSERT_TRUE(first.WaitForEnd());
  FakeWriter& second = NewWriter();
  auto new_call = Start(&second);
  old_call->OnCancel();
  Settle();
  EXPECT_TRUE(engine_.EndsOf("r").empty());
  EXPECT_EQ(engine_.Stats().waiting, 1);
  engine_.Close("r", CloseReason::kLength);
  ASSERT_TRUE(second.WaitForEnd());
}

TEST_F(GenerateCallTest, RefusedRequestsCountAsRejectedOnly) {
  FakeWriter& writer = NewWriter();
  v1::GenerateRequest request;
  EXPECT_FALSE(GenerateCall::Start(context_.get(), request, {}, &writer).ok());
  request.set_text("a");
  engine_.RefuseWith(absl::ResourceExhaustedError("the queue is full"));
  EXPECT_FALSE(GenerateCall::Start(context_.get(), request, {}, &writer).ok());
  context_->state.SetPhase(Phase::kDraining);
  const auto refused = GenerateCall::Start(context_.get(), request, {}, &writer);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(Counted("rejected"), 3);
  EXPECT_EQ(writer.ends(), 0);
  EXPECT_THAT(context_->metrics.Text(), HasSubstr("qwend_prompt_tokens_total{model=\"fake\"} 0"));
  EXPECT_THAT(context_->metrics.Text(),
              HasSubstr("_request_duration_seconds_count{model=\"fake\"} 0"));
}

}  // namespace
}  // namespace qwend
