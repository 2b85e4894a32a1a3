#include "engine/engine_impl.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/ops.h"
#include "spdlog/spdlog.h"

namespace qwend {
namespace {

// How often an idle engine thread shows that it lives.
constexpr absl::Duration kIdleBeat = absl::Milliseconds(500);

int BucketOf(const std::vector<int>& buckets, int rows) {
  const auto it = std::lower_bound(buckets.begin(), buckets.end(), rows);
  return it == buckets.end() ? rows : *it;
}

}  // namespace

EngineImpl::EngineImpl(EngineParts parts)
    : parts_(std::move(parts)),
      pages_(parts_.device.kv_pages_total),
      slots_(parts_.device.max_sequences),
      scheduler_(*parts_.executor, pages_, slots_, parts_.model.eos_token_ids,
                 {.before_admit = [this] { Publish(); },
                  .before_close = [this](const std::string& id) { ForgetAndPublish(id); },
                  .on_decode =
                      [this](int rows, absl::Duration time) {
                        if (on_step_) on_step_(BucketOf(parts_.device.batch_buckets, rows), time);
                      }}) {
  std::sort(parts_.device.batch_buckets.begin(), parts_.device.batch_buckets.end());
  Beat();
}

EngineImpl::~EngineImpl() {
  {
    absl::MutexLock lock(&mu_);
    shutting_down_ = true;
    wake_.Signal();
  }
  if (thread_.joinable()) {
    thread_.join();
  } else {
    CloseEverything(CloseReason::kAborted);
  }
}

void EngineImpl::Start(StepObserver on_step, FaultObserver on_fault) {
  on_step_ = std::move(on_step);
  on_fault_ = std::move(on_fault);
  Beat();
  thread_ = std::thread([this] { Loop(); });
}

absl::Status EngineImpl::Validate(const GenerationRequest& r) const {
  const ModelDescription& m = parts_.model;
  if (r.prompt.empty()) return absl::InvalidArgumentError("prompt: is empty");
  const auto outside = [&](int32_t id) { return id < 0 || id >= m.vocab_size; };
  for (const auto& [name, ids] :
       {std::pair{"prompt", &r.prompt}, std::pair{"stop_token_ids", &r.stop_token_ids}}) {
    const auto bad = std::find_if(ids->begin(), ids->end(), outside);
    if (bad == ids->end()) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, "[", bad - ids->begin(), "]: id ", *bad,
                                                   " is outside the vocabulary of ", m.vocab_size));
  }
  if (r.max_tokens < 1) {
    return absl::InvalidArgumentError(absl::StrCat("max_tokens: ", r.max_tokens, " is below 1"));
  }
  if (r.min_tokens < 0 || r.min_tokens > r.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "min_tokens: ", r.min_tokens, " is not between 0 and max_tokens (", r.max_tokens, ")"));
  }
  const int64_t positions = static_cast<int64_t>(r.prompt.size()) + r.max_tokens;
  if (positions > m.max_context_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_tokens: a prompt of ", r.prompt.size(), " tokens and max_tokens ",
                     r.max_tokens, " exceed the context of ", m.max_context_tokens));
  }
  if (KvPages::PagesFor(positions) > parts_.device.kv_pages_total) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_tokens: a prompt of ", r.prompt.size(), " tokens and max_tokens ", r.max_tokens,
        " exceed the whole cache of ", parts_.device.kv_pages_total * kPageTokens, " tokens"));
  }
  if (r.min_tokens > 0) {
    const size_t banned = EndingTokens(r, m.eos_token_ids).size();
    if (banned > SamplingRow::kMaxBanned) {
      return absl::InvalidArgumentError(
          absl::StrCat("stop_token_ids: with min_tokens at most ", SamplingRow::kMaxBanned,
                       " stop and end-of-sequence ids are possible, not ", banned));
    }
  }
  const SamplingParams& s = r.sampling;
  if (!(s.temperature >= 0) || !std::isfinite(s.temperature)) {
    return absl::InvalidArgumentError("temperature: is not a number of at least 0");
  }
  if (!(s.top_p > 0 && s.top_p <= 1)) return absl::InvalidArgumentError("top_p: not in (0, 1]");
  if (!(s.min_p >= 0 && s.min_p < 1)) return absl::InvalidArgumentError("min_p: not in [0, 1)");
  if (s.top_k < 0) return absl::InvalidArgumentError("top_k: is below 0");
  return absl::OkStatus();
}

absl::Status EngineImpl::Submit(GenerationRequest request, std::shared_ptr<TokenSink> sink) {
  if (absl::Status valid = Validate(request); !valid.ok()) return valid;
  absl::MutexLock lock(&mu_);
  if (failed_) return absl::UnavailableError("the device has failed; restart the server");
  if (shutting_down_) return absl::UnavailableError("the engine is shutting down");
  if (live_.contains(request.id)) {
    return absl::AlreadyExistsError(
        absl::StrCat("request_id: a live request has the id \"", request.id, "\""));
  }
  const size_t limit = static_cast<size_t>(parts_.device.max_sequences) + parts_.max_queued;
  if (live_.size() >= limit) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", live_.size(), " requests are running or waiting (",
                     parts_.device.max_sequences, " sequences, --max_queued ", parts_.max_queued,
                     "); try again later"));
  }
  const Scheduler::Ticket ticket = next_ticket_++;
  live_.emplace(request.id, ticket);
  inbox_.submissions.push_back({ticket, std::move(request), std::move(sink)});
  wake_.Signal();
  return absl::OkStatus();
}

absl::Status EngineImpl::End(const std::string& id, CloseReason reason) {
  if (reason != CloseReason::kStopped && reason != CloseReason::kCancelled &&
      reason != CloseReason::kAborted && reason != CloseReason::kDeadline) {
    return absl::InvalidArgumentError("a caller can only stop, cancel, abort or time out");
  }
  absl::MutexLock lock(&mu_);
  const auto it = live_.find(id);
  if (it == live_.end()) {
    return absl::NotFoundError(absl::StrCat("no live request has the id \"", id, "\""));
  }
  inbox_.endings.push_back({it->second, reason});
  wake_.Signal();
  return absl::OkStatus();
}

void EngineImpl::AbortAll() {
  absl::MutexLock lock(&mu_);
  for (const auto& [id, ticket] : live_) {
    inbox_.endings.push_back({ticket, CloseReason::kAborted});
  }
  wake_.Signal();
}

EngineStats EngineImpl::Stats() const {
  EngineStats stats;
  {
    absl::MutexLock lock(&mu_);
    stats.running = published_.running;
    stats.waiting = published_.waiting + static_cast<int>(inbox_.submissions.size());
    stats.kv_pages_used = published_.kv_pages_used;
    stats.prompt_tokens = published_.prompt_tokens;
    stats.generation_tokens = published_.generation_tokens;
    stats.failed = failed_;
  }
  stats.heartbeat = absl::FromUnixNanos(heartbeat_ns_.load(std::memory_order_relaxed));
  if (parts_.kernel_stats) parts_.kernel_stats(stats);
  return stats;
}

void EngineImpl::Loop() {
  try {
    if (parts_.backend) parts_.backend->BindThread();
    Inbox work;
    while (WaitForWork(work)) {
      for (Submission& s : work.submissions) {
        scheduler_.Submit(s.ticket, std::move(s.request), std::move(s.sink));
      }
      for (const Ending& e : work.endings) scheduler_.End(e.ticket, e.reason);
      scheduler_.Step(absl::Now());
      Publish();
    }
    CloseEverything(CloseReason::kAborted);
  } catch (const std::exception& e) {
    Fail(e.what());
  } catch (...) {
    Fail("an exception of an unknown type");
  }
}

// Sleeps while there is nothing to do, and takes the inbox.
bool EngineImpl::WaitForWork(Inbox& work) {
  work.submissions.clear();
  work.endings.clear();
  absl::MutexLock lock(&mu_);
  Beat();
  while (inbox_.empty() && scheduler_.idle() && !shutting_down_) {
    wake_.WaitWithTimeout(&mu_, kIdleBeat);
    Beat();
  }
  if (shutting_down_) return false;
  std::swap(work, inbox_);
  published_.waiting += static_cast<int>(work.submissions.size());
  return true;
}

// Only once new requests are refused.
void EngineImpl::CloseEverything(CloseReason reason) {
  scheduler_.CloseAll(reason);
  Inbox rest;
  {
    absl::MutexLock lock(&mu_);
    std::swap(rest, inbox_);
  }
  for (Submission& s : rest.submissions) {
    ForgetAndPublish(s.request.id);
    s.sink->OnClose(reason);
  }
}

void EngineImpl::Fail(const std::string& what) {
  spdlog::error("the device has failed, every request ends: {}", what);
  {
    absl::MutexLock lock(&mu_);
    failed_ = true;
  }
  CloseEverything(CloseReason::kDeviceFault);
  if (on_fault_) on_fault_(absl::InternalError(absl::StrCat("device fault: ", what)));
}

void EngineImpl::Publish() {
  absl::MutexLock lock(&mu_);
  published_ = scheduler_.counts();
}

// Called before the OnClose of a request: whoever learns of the end finds the id free and the
// gauges right.
void EngineImpl::ForgetAndPublish(const std::string& id) {
  absl::MutexLock lock(&mu_);
  live_.erase(id);
  published_ = scheduler_.counts();
}

}  // namespace qwend
