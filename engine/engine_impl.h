// The engine over any StepExecutor: the engine thread, its inbox, and the snapshot that other
// threads read.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "engine/engine.h"
#include "engine/kv_pages.h"
#include "engine/scheduler.h"
#include "engine/state_slots.h"
#include "engine/step_executor.h"
#include "engine/tokenizer/chat_template.h"
#include "engine/tokenizer/tokenizer.h"
#include "kernels/backend.h"

namespace qwend {

// What an engine is made of. The executor is taken over warm: nothing allocates or compiles later.
struct EngineParts {
  ModelDescription model;            // max_context_tokens and eos_token_ids bound the requests
  DeviceDescription device;          // max_sequences and kv_pages_total size the pools
  std::unique_ptr<Backend> backend;  // what the executor runs on, when it needs one
  std::unique_ptr<StepExecutor> executor;
  std::function<void(EngineStats&)> kernel_stats;  // fills buckets, kernels and profiles; from any
                                                   // thread; may be empty
  std::unique_ptr<Tokenizer> tokenizer;            // may be null
  std::unique_ptr<ChatTemplate> chat_template;     // null: chat_template_status says why
  absl::Status chat_template_status;
  int max_queued = 256;
};

class EngineImpl final : public Engine {
 public:
  explicit EngineImpl(EngineParts parts);
  ~EngineImpl() override;

  void Start(StepObserver on_step, FaultObserver on_fault) override;
  absl::Status Submit(GenerationRequest request, std::shared_ptr<TokenSink> sink) override;
  absl::Status End(const std::string& id, CloseReason reason) override;
  void AbortAll() override;

  const ModelDescription& model() const override { return parts_.model; }
  const DeviceDescription& device() const override { return parts_.device; }
  const Tokenizer* tokenizer() const override { return parts_.tokenizer.get(); }
  const ChatTemplate* chat_template() const override { return parts_.chat_template.get(); }
  absl::Status chat_template_status() const override { return parts_.chat_template_status; }
  EngineStats Stats() const override;

 private:
  struct Submission {
    Scheduler::Ticket ticket = 0;
    GenerationRequest request;
    std::shared_ptr<TokenSink> sink;
  };
  struct Ending {
    Scheduler::Ticket ticket = 0;
    CloseReason reason = CloseReason::kAborted;
  };
  // What other threads ask of the engine thread, in order within each list.
  struct Inbox {
    std::vector<Submission> submissions;
    std::vector<Ending> endings;
    bool empty() const { return submissions.empty() && endings.empty(); }
  };

  absl::Status Validate(const GenerationRequest& request) const;
  void Loop();
  bool WaitForWork(Inbox& work);  // false: shutting down
  void CloseEverything(CloseReason reason);
  void Fail(const std::string& what);
  void Publish();
  void ForgetAndPublish(const std::string& id);
  void Beat() { heartbeat_ns_.store(absl::ToUnixNanos(absl::Now()), std::memory_order_relaxed); }

  EngineParts parts_;
  KvPages pages_;        // engine thread
  StateSlots slots_;     // engine thread
  Scheduler scheduler_;  // engine thread
  StepObserver on_step_;
  FaultObserver on_fault_;
  std::atomic<int64_t> heartbeat_ns_{0};

  mutable absl::Mutex mu_;
  absl::CondVar wake_;  // the inbox has something, or shutting_down_
  Inbox inbox_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Scheduler::Ticket> live_ ABSL_GUARDED_BY(mu_);
  Scheduler::Ticket next_ticket_ ABSL_GUARDED_BY(mu_) = 1;
  bool shutting_down_ ABSL_GUARDED_BY(mu_) = false;
  bool failed_ ABSL_GUARDED_BY(mu_) = false;
  Scheduler::Counts published_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;
};

}  // namespace qwend
