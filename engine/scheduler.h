// Who runs next: admission by pages and slots, prefill chunks between decode steps, and the exact
// end of every request. Single-threaded; nothing here knows of locks or of the network.
//
// A request is admitted only when all pages for its prompt and its max_tokens are free, and keeps
// them to its end. So a running sequence is never preempted and never fails for want of memory.
// Waiting requests are served by priority, then arrival; the first one that does not fit waits, and
// nobody overtakes it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "engine/kv_pages.h"
#include "engine/request.h"
#include "engine/state_slots.h"
#include "engine/step_executor.h"
#include "engine/token_sink.h"

namespace qwend {

// The ids that end `request`: the model's EOS ids unless it ignores them, and its stop ids. Sorted,
// each once.
std::vector<int32_t> EndingTokens(const GenerationRequest& request,
                                  std::span<const int32_t> eos_token_ids);

// Thread: the engine thread, which is also where sinks and hooks are called.
class Scheduler {
 public:
  // Names a request from Submit to its close; grows with arrival and is never used twice.
  using Ticket = uint64_t;

  struct Hooks {
    // A request has left the queue and holds its pages and slot; its OnAdmitted follows at once.
    std::function<void()> before_admit = nullptr;
    // The request is over and holds nothing any more; its OnClose follows at once.
    std::function<void(const std::string& id)> before_close = nullptr;
    // After each decode call: its rows and its wall time.
    std::function<void(int rows, absl::Duration)> on_decode = nullptr;
  };

  struct Counts {
    int running = 0;  // admitted: prefilling or decoding
    int waiting = 0;
    int kv_pages_used = 0;
    uint64_t prompt_tokens = 0;      // of admitted requests
    uint64_t generation_tokens = 0;  // handed to sinks
  };

  // The executor and the pools must outlive the scheduler. Its prefill chunks must be multiples of
  // kPageTokens.
  Scheduler(StepExecutor& executor, KvPages& pages, StateSlots& slots,
            std::vector<int32_t> eos_token_ids, Hooks hooks);

  // Queues a request whose prompt and max_tokens fit into an empty pool. Tickets must grow.
  void Submit(Ticket ticket, GenerationRequest request, std::shared_ptr<TokenSink> sink);

  // Closes the request now, wherever it stands. False: there is no such request any more.
  bool End(Ticket ticket, CloseReason reason);

  // Closes all requests; those that were already over keep their own reason.
  void CloseAll(CloseReason reason);

  // One turn: drops what is past its deadline, admits, prefills one chunk of the oldest admission
  // that still needs it, decodes every sequence that is past its prefill, closes what is over.
  // Passes on what the executor throws; only CloseAll makes sense after that.
  void Step(absl::Time now);

  bool idle() const { return queue_.empty() && running_.empty(); }
  Counts counts() const;

 private:
  struct Sequence {
    Ticket ticket = 0;
    GenerationRequest request;
    std::shared_ptr<TokenSink> sink;
    KvPages::Lease pages;
    StateSlots::Lease slot;
    std::vector<int32_t> banned;  // until min_tokens
    int prefilled = 0;            // prompt tokens in the cache
    absl::Duration prefill_time;
    int generated = 0;
    int32_t last_token = 0;             // the newest one, not yet in the cache
    std::optional<CloseReason> finish;  // set: over, to be closed

    int prompt_size() const { return static_cast<int>(request.prompt.size()); }
    bool decoding() const { return prefilled == prompt_size() && !finish; }
    SequenceView view() const { return {.pages = pages.pages(), .state_slot = slot.slot()}; }
    SamplingRow NextSampling() const;  // of the token after everything generated so far
  };
  using SequencePtr = std::unique_ptr<Sequence>;

  struct QueueKey {
    int priority = 0;
    Ticket ticket = 0;
    bool operator<(const QueueKey& o) const {
      return priority != o.priority ? priority > o.priority : ticket < o.ticket;
    }
  };

  void DropExpired(absl::Time now);
  void Admit(absl::Time now);
  void PrefillOneChunk();
  void DecodeAll();
  void Take(Sequence& sequence, int32_t token);
  bool IsEos(int32_t token) const;
  void CloseFinished();
  void Close(SequencePtr sequence);

  StepExecutor& executor_;
  KvPages& pages_;
  StateSlots& slots_;
  const std::vector<int32_t> eos_token_ids_;
  const Hooks hooks_;
  std::map<QueueKey, SequencePtr> queue_;
  std::vector<SequencePtr> running_;  // in order of admission
  std::vector<Sequence*> decoding_;   // scratch of DecodeAll
  std::vector<DecodeRow> rows_;       // scratch of DecodeAll
  uint64_t prompt_tokens_ = 0;
  uint64_t generation_tokens_ = 0;
};

}  // namespace qwend
