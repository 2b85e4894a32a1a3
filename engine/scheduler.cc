#include "engine/scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/time/clock.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace qwend {
namespace {

using SteadyClock = std::chrono::steady_clock;

absl::Duration Since(SteadyClock::time_point start) {
  return absl::FromChrono(SteadyClock::now() - start);
}

}  // namespace

std::vector<int32_t> EndingTokens(const GenerationRequest& request,
                                  std::span<const int32_t> eos_token_ids) {
  std::vector<int32_t> ids = request.stop_token_ids;
  if (!request.ignore_eos) ids.insert(ids.end(), eos_token_ids.begin(), eos_token_ids.end());
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

SamplingRow Scheduler::Sequence::NextSampling() const {
  SamplingRow row{.temperature = request.sampling.temperature,
                  .top_p = request.sampling.top_p,
                  .min_p = request.sampling.min_p,
                  .top_k = request.sampling.top_k,
                  .seed = request.sampling.seed,
                  .position = prompt_size() + generated};
  if (generated < request.min_tokens) {
    row.num_banned = static_cast<int32_t>(banned.size());
    std::copy(banned.begin(), banned.end(), row.banned);
  }
  return row;
}

Scheduler::Scheduler(StepExecutor& executor, KvPages& pages, StateSlots& slots,
                     std::vector<int32_t> eos_token_ids, Hooks hooks)
    : executor_(executor),
      pages_(pages),
      slots_(slots),
      eos_token_ids_(std::move(eos_token_ids)),
      hooks_(std::move(hooks)) {
  const int chunk = executor_.max_prefill_tokens();
  Require(chunk > 0 && chunk % kPageTokens == 0, "Scheduler: prefill chunks of ", chunk,
          " tokens are no multiple of ", kPageTokens);
}

void Scheduler::Submit(Ticket ticket, GenerationRequest request, std::shared_ptr<TokenSink> sink) {
  auto sequence = std::make_unique<Sequence>();
  sequence->ticket = ticket;
  sequence->request = std::move(request);
  sequence->sink = std::move(sink);
  const GenerationRequest& r = sequence->request;
  Require(!r.prompt.empty() && r.max_tokens >= 1, "Scheduler: a request of ", r.prompt.size(),
          " prompt tokens and max_tokens ", r.max_tokens);
  Require(KvPages::PagesFor(int64_t{sequence->prompt_size()} + r.max_tokens) <= pages_.total(),
          "Scheduler: a request of ", r.prompt.size(), " + ", r.max_tokens,
          " tokens can never fit into ", pages_.total(), " pages");
  if (r.min_tokens > 0) sequence->banned = EndingTokens(r, eos_token_ids_);
  Require(sequence->banned.size() <= SamplingRow::kMaxBanned,
          "Scheduler: ", sequence->banned.size(), " ids to ban");
  const QueueKey key{.priority = r.priority, .ticket = ticket};
  queue_.emplace(key, std::move(sequence));
}

bool Scheduler::End(Ticket ticket, CloseReason reason) {
  for (SequencePtr& sequence : running_) {
    if (sequence->ticket != ticket) continue;
    sequence->finish = reason;
    CloseFinished();
    return true;
  }
  for (auto it = queue_.begin(); it != queue_.end(); ++it) {
    if (it->first.ticket != ticket) continue;
    SequencePtr sequence = std::move(it->second);
    queue_.erase(it);
    sequence->finish = reason;
    Close(std::move(sequence));
    return true;
  }
  return false;
}

void Scheduler::CloseAll(CloseReason reason) {
  for (SequencePtr& sequence : running_) {
    if (!sequence->finish) sequence->finish = reason;
  }
  std::map<QueueKey, SequencePtr> queued;
  queued.swap(queue_);
  CloseFinished();
  for (auto& [key, sequence] : queued) {
    sequence->finish = reason;
    Close(std::move(sequence));
  }
}

void Scheduler::Step(absl::Time now) {
  DropExpired(now);
  Admit(now);
  PrefillOneChunk();
  DecodeAll();
  CloseFinished();
}

Scheduler::Counts Scheduler::counts() const {
  return {.running = static_cast<int>(running_.size()),
          .waiting = static_cast<int>(queue_.size()),
          .kv_pages_used = pages_.used(),
          .prompt_tokens = prompt_tokens_,
          .generation_tokens = generation_tokens_};
}

void Scheduler::DropExpired(absl::Time now) {
  for (SequencePtr& sequence : running_) {
    if (sequence->request.deadline <= now) sequence->finish = CloseReason::kDeadline;
  }
  CloseFinished();
  for (auto it = queue_.begin(); it != queue_.end();) {
    if (it->second->request.deadline > now) {
      ++it;
      continue;
    }
    SequencePtr sequence = std::move(it->second);
    it = queue_.erase(it);
    sequence->finish = CloseReason::kDeadline;
    Close(std::move(sequence));
  }
}

void Scheduler::Admit(absl::Time now) {
  while (!queue_.empty() && slots_.free() > 0) {
    Sequence& head = *queue_.begin()->second;
    auto pages =
        pages_.Reserve(KvPages::PagesFor(int64_t{head.prompt_size()} + head.request.max_tokens));
    if (!pages) return;
    head.pages = *std::move(pages);
    head.slot = *slots_.Reserve();
    prompt_tokens_ += head.request.prompt.size();
    running_.push_back(std::move(queue_.begin()->second));
    queue_.erase(queue_.begin());
    if (hooks_.before_admit) hooks_.before_admit();
    head.sink->OnAdmitted(now, /*cached_tokens=*/0);
  }
}

// Chunks end at multiples of the chunk size, whatever else happens, so a prompt is always cut in
// the same places.
void Scheduler::PrefillOneChunk() {
  const auto it = std::find_if(running_.begin(), running_.end(), [](const SequencePtr& s) {
    return s->prefilled < s->prompt_size();
  });
  if (it == running_.end()) return;
  Sequence& sequence = **it;
  const int size = executor_.max_prefill_tokens();
  const int begin = sequence.prefilled;
  const int end = std::min(sequence.prompt_size(), (begin / size + 1) * size);
  const bool last = end == sequence.prompt_size();

  const auto start = SteadyClock::now();
  const int32_t token = executor_.Prefill(
      {.sequence = sequence.view(),
       .tokens = std::span<const int32_t>(sequence.request.prompt).subspan(begin, end - begin),
       .start_position = begin,
       .sample = last,
       .sampling = sequence.NextSampling()});
  sequence.prefill_time += Since(start);
  sequence.prefilled = end;
  if (!last) return;
  if (token != kInvalidToken) sequence.sink->OnPrefilled(absl::Now(), sequence.prefill_time);
  Take(sequence, token);
}

void Scheduler::DecodeAll() {
  decoding_.clear();
  for (SequencePtr& sequence : running_) {
    if (sequence->decoding()) decoding_.push_back(sequence.get());
  }
  const size_t max_rows = executor_.max_decode_rows();
  for (size_t begin = 0; begin < decoding_.size(); begin += max_rows) {
    const auto batch =
        std::span(decoding_).subspan(begin, std::min(max_rows, decoding_.size() - begin));
    rows_.clear();
    for (const Sequence* s : batch) {
      rows_.push_back({.sequence = s->view(),
                       .token = s->last_token,
                       .position = s->prompt_size() + s->generated - 1,
                       .sampling = s->NextSampling()});
    }
    const auto start = SteadyClock::now();
    const std::span<const int32_t> tokens = executor_.Decode(rows_);
    if (hooks_.on_decode) hooks_.on_decode(static_cast<int>(batch.size()), Since(start));
    for (size_t i = 0; i < batch.size(); ++i) Take(*batch[i], tokens[i]);
  }
}

// Hands one sampled token on and says whether it was the last. An end-of-sequence id that is also
// the last allowed token is an EOS, not a length.
void Scheduler::Take(Sequence& sequence, int32_t token) {
  if (token == kInvalidToken) {
    sequence.finish = CloseReason::kNonFiniteLogits;
    return;
  }
  const GenerationRequest& request = sequence.request;
  sequence.last_token = token;
  ++sequence.generated;
  ++generation_tokens_;
  if (!request.ignore_eos && IsEos(token)) {
    sequence.finish = CloseReason::kEos;
  } else if (std::find(request.stop_token_ids.begin(), request.stop_token_ids.end(), token) !=
             request.stop_token_ids.end()) {
    sequence.finish = CloseReason::kStopToken;
  } else if (sequence.generated >= request.max_tokens) {
    sequence.finish = CloseReason::kLength;
  }
  sequence.sink->OnToken(token);
}

bool Scheduler::IsEos(int32_t token) const {
  return std::find(eos_token_ids_.begin(), eos_token_ids_.end(), token) != eos_token_ids_.end();
}

void Scheduler::CloseFinished() {
  const auto over = std::stable_partition(running_.begin(), running_.end(),
                                          [](const SequencePtr& s) { return !s->finish; });
  if (over == running_.end()) return;
  std::vector<SequencePtr> finished(std::make_move_iterator(over),
                                    std::make_move_iterator(running_.end()));
  running_.erase(over, running_.end());
  for (SequencePtr& sequence : finished) {
    sequence->pages.Release();
    sequence->slot.Release();
  }
  for (SequencePtr& sequence : finished) Close(std::move(sequence));
}

void Scheduler::Close(SequencePtr sequence) {
  if (hooks_.before_close) hooks_.before_close(sequence->request.id);
  sequence->sink->OnClose(*sequence->finish);
}

}  // namespace qwend
