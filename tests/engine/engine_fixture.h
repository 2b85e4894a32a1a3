// An engine over the fake model, for the tests of the engine thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/engine_impl.h"
#include "fake_executor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "recording_sink.h"

namespace qwend {

inline constexpr int kVocab = 100;
inline constexpr int kContext = 1024;
inline const std::vector<int32_t> kEos = {7, 8};

// Where the engine thread waits until the test lets it on.
class Gate {
 public:
  void Pass() {
    std::unique_lock lock(mu_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    --waiting_;
  }
  void AwaitArrival() {
    std::unique_lock lock(mu_);
    changed_.wait(lock, [&] { return waiting_ > 0; });
  }
  void Open() {
    std::lock_guard lock(mu_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mu_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0;
};

struct EngineSetup {
  FakeOptions fake{.pages = 64, .slots = 4, .vocab = kVocab};
  int max_queued = 8;
};

// An engine over the fake model.
class EngineTest : public testing::Test {
 protected:
  void Make(const EngineSetup& setup = {}) {
    EngineParts parts;
    parts.model.vocab_size = kVocab;
    parts.model.max_context_tokens = kContext;
    parts.model.eos_token_ids = kEos;
    parts.device.max_sequences = setup.fake.slots;
    parts.device.kv_pages_total = setup.fake.pages;
    parts.device.batch_buckets = {1, 2, 4};
    parts.max_queued = setup.max_queued;
    fake_ = std::make_unique<FakeExecutor>(setup.fake);
    fake_->before_prefill = [this](const PrefillChunk&) {
      if (prefill_gate_ != nullptr) prefill_gate_->Pass();
      if (fault_in_prefill_) throw DeviceError("prefill lost the device");
    };
    fake_->before_decode = [this](std::span<const DecodeRow>) {
      if (decode_gate_ != nullptr) decode_gate_->Pass();
      if (fault_in_decode_) throw DeviceError("decode lost the device");
    };
    parts.executor = Borrow(*fake_);
    engine_ = std::make_unique<EngineImpl>(std::move(parts));
  }
  void Start() {
    engine_->Start([this](int batch, absl::Duration) { ++steps_of_batch_.at(batch); },
                   [this](const absl::Status& status) {
                     for (const auto& sink : sinks_) EXPECT_TRUE(sink->closed());
                     fault_.set_value(status);
                   });
  }
  // The request's sink, when it was accepted.
  std::shared_ptr<RecordingSink> Submit(const GenerationRequest& request) {
    auto sink = std::make_shared<RecordingSink>();
    const absl::Status status = engine_->Submit(request, sink);
    EXPECT_TRUE(status.ok()) << status;
    if (status.ok()) sinks_.push_back(sink);
    return sink;
  }
  absl::Status Refused(const GenerationRequest& request) {
    auto sink = std::make_shared<RecordingSink>();
    const absl::Status status = engine_->Submit(request, sink);
    EXPECT_EQ(sink.use_count(), 1);
    return status;
  }
  void ExpectAllClosed(CloseReason reason) {
    for (const auto& sink : sinks_) EXPECT_EQ(sink->WaitClosed(), reason);
  }
  // Ends the engine and checks what can be checked of every test.
  void Finish() {
    engine_.reset();
    EXPECT_THAT(fake_->violations, testing::IsEmpty());
    for (const auto& sink : sinks_) {
      EXPECT_TRUE(sink->closed());
      EXPECT_EQ(sink->misuses(), 0);
    }
  }
  void TearDown() override { Finish(); }

  Gate* prefill_gate_ = nullptr;  // these four are set before the first request
  Gate* decode_gate_ = nullptr;
  bool fault_in_prefill_ = false;
  bool fault_in_decode_ = false;
  std::map<int, int> steps_of_batch_ = {{1, 0}, {2, 0}, {4, 0}};
  std::promise<absl::Status> fault_;
  std::unique_ptr<FakeExecutor> fake_;
  std::unique_ptr<EngineImpl> engine_;
  std::vector<std::shared_ptr<RecordingSink>> sinks_;
};

// A greedy request that runs to its max_tokens, with a prompt of its own.
inline GenerationRequest Request(const std::string& id, int prompt = 5, int max_tokens = 9) {
  GenerationRequest request;
  request.id = id;
  const size_t salt = std::hash<std::string>()(id);
  for (int i = 0; i < prompt; ++i) {
    request.prompt.push_back(10 + static_cast<int>((salt + i * 7) % 80));
  }
  request.sampling.temperature = 0;
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  return request;
}

}  // namespace qwend
