#include "server/generate_call.h"

#include <algorithm>
#include <exception>

#include "server/logging.h"
#include "server/model_view.h"
#include "server/status_mapping.h"

namespace qwend {
namespace {

// A caller whose deadline passes cancels the call, and its clock may be a little ahead of ours:
// gRPC rounds the timeout that it sends up.
bool DeadlineIsUp(absl::Time deadline, absl::Time accepted, absl::Time now) {
  if (deadline == absl::InfiniteFuture()) return false;
  const absl::Duration slack = std::max(absl::Milliseconds(10), (deadline - accepted) / 50);
  return now + slack >= deadline;
}

Outcome OutcomeOf(const v1::Finish& finish) {
  switch (finish.reason()) {
    case v1::FINISH_REASON_EOS:
      return Outcome::kEos;
    case v1::FINISH_REASON_STOP_STRING:
      return Outcome::kStopString;
    case v1::FINISH_REASON_STOP_TOKEN:
      return Outcome::kStopToken;
    case v1::FINISH_REASON_LENGTH:
      return Outcome::kLength;
    default:
      return Outcome::kAborted;
  }
}

Outcome OutcomeOfError(CloseReason reason) {
  switch (reason) {
    case CloseReason::kCancelled:
      return Outcome::kCancelled;
    case CloseReason::kDeadline:
      return Outcome::kDeadline;
    default:
      return Outcome::kError;
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<GenerateCall>> GenerateCall::Start(
    ServiceContext* context, const v1::GenerateRequest& request, const Caller& caller,
    ResponseWriter* writer) {
  std::shared_ptr<GenerateCall> call;
  std::string registered;
  const absl::Status status = Guarded([&]() -> absl::Status {
    const absl::StatusOr<Engine*> engine = context->state.ForGeneration();
    if (!engine.ok()) return engine.status();
    RequestLimits limits;
    limits.max_stop_strings = context->options.max_stop_strings;
    absl::StatusOr<PreparedRequest> prepared =
        PrepareRequest(request, ModelView::Of(**engine), limits);
    if (!prepared.ok()) return prepared.status();
    GenerationRequest& submission = prepared->engine;
    const std::string id = submission.id.empty() ? LiveRequests::MakeId() : submission.id;
    if (auto s = context->live.Register(id, &submission.id); !s.ok()) return s;
    registered = id;
    call.reset(new GenerateCall(context, *engine, id, *prepared, caller, writer));
    call->engine_id_ = submission.id;
    submission.deadline = caller.deadline;
    return RefusedBySubmit((*engine)->Submit(std::move(submission), call));
  });
  if (status.ok()) return call;
  if (!registered.empty()) context->live.Unregister(registered);
  context->metrics.CountRequest(Outcome::kRejected);
  LogEvent("request refused", {{"request_id", Quoted(request.request_id())},
                               {"code", absl::StatusCodeToString(status.code())},
                               {"reason", std::string(status.message())},
                               {"peer", caller.peer}});
  return status;
}

GenerateCall::GenerateCall(ServiceContext* context, Engine* engine, std::string request_id,
                           const PreparedRequest& request, const Caller& caller,
                           ResponseWriter* writer)
    : context_(context),
      engine_(engine),
      request_id_(std::move(request_id)),
      caller_(caller),
      prompt_tokens_(static_cast<int>(request.engine.prompt.size())),
      accepted_(absl::Now()),
      streams_(writer->streams()),
      writer_(writer),
      output_(engine->tokenizer(), request.engine, engine->model().eos_token_ids, request.output) {}

void GenerateCall::Schedule() { context_->pool.Schedule(shared_from_this()); }

void GenerateCall::OnAdmitted(absl::Time now, int cached_tokens) {
  absl::MutexLock lock(&mu_);
  inbox_.admitted = now;
  inbox_.cached_tokens = cached_tokens;
}

void GenerateCall::OnPrefilled(absl::Time, absl::Duration prefill) {
  absl::MutexLock lock(&mu_);
  inbox_.prefill = prefill;
}

void GenerateCall::OnToken(int32_t token) {
  const absl::Time now = absl::Now();
  const int limit = context_->options.max_buffered_tokens;
  {
    absl::MutexLock lock(&mu_);
    if (failed_) return;
    if (streams_ && write_pending_ && ++behind_ > limit) {
      failed_ = true;
      inbox_.failure = Failure{SlowReaderError(limit), Outcome::kError};
    } else {
      inbox_.tokens.push_back({token, now});
    }
  }
  Schedule();
}

void GenerateCall::OnClose(CloseReason reason) {
  {
    absl::MutexLock lock(&mu_);
    closed_ = true;
    inbox_.close = reason;
  }
  Schedule();
}

void GenerateCall::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    write_pending_ = false;
    behind_ = 0;
  }
  // A write that failed means that the caller is gone.
  if (!ok) return OnCancel();
  Schedule();
}

void GenerateCall::OnCancel() {
  const bool deadline = DeadlineIsUp(caller_.deadline, accepted_, absl::Now());
  const CloseReason reason = deadline ? CloseReason::kDeadline : CloseReason::kCancelled;
  Fail({StatusOf(reason), OutcomeOfError(reason)}, reason);
}

void GenerateCall::Fail(Failure failure, CloseReason reason) {
  {
    absl::MutexLock lock(&mu_);
    if (!failed_) {
      failed_ = true;
      inbox_.failure = std::move(failure);
    }
  }
  EndInEngine(reason);
  Schedule();
}

void GenerateCall::EndInEngine(CloseReason reason) {
  {
    absl::MutexLock lock(&mu_);
    if (closed_) return;
  }
  // NOT_FOUND: it has ended meanwhile.
  engine_->End(engine_id_, reason).IgnoreError();
}

void GenerateCall::Deliver() {
  Inbox inbox;
  bool write_pending = false;
  {
    absl::MutexLock lock(&mu_);
    inbox = std::exchange(inbox_, Inbox());
    write_pending = write_pending_;
  }
  const absl::Status status = Guarded([&] {
    TakeIn(std::move(inbox));
    Advance(write_pending);
    return absl::OkStatus();
  });
  if (!status.ok()) Fail({status, Outcome::kError}, CloseReason::kCancelled);
}

void GenerateCall::TakeIn(Inbox inbox) {
  if (inbox.close) {
    close_ = inbox.close;
    ended_ = absl::Now();
  }
  if (inbox.failure) {
    failure_ = std::move(inbox.failure);
    // A slow reader is noticed on the engine's thread, where nothing can be ended.
    if (failure_->outcome == Outcome::kError) EndInEngine(CloseReason::kCancelled);
  }
  if (inbox.admitted) {
    admitted_ = inbox.admitted;
    cached_tokens_ = inbox.cached_tokens;
    context_->metrics.ObserveQueueTime(*admitted_ - accepted_);
  }
  if (inbox.prefill) context_->metrics.ObservePrefillTime(*inbox.prefill);
  for (const TimedToken& token : inbox.tokens) {
    // Once the caller has had its last word, a shutdown may have taken the tokenizer away.
    if (output_.stopped() || writer_ == nullptr) break;
    if (first_token_) {
      context_->metrics.ObserveInterTokenLatency(token.at - last_token_);
    } else {
      first_token_ = token.at;
      context_->metrics.ObserveTimeToFirstToken(token.at - accepted_);
    }
    last_token_ = token.at;
    output_.Append(token.id);
  }
  if (output_.stopped() && !stop_sent_) {
    stop_sent_ = true;
    EndInEngine(CloseReason::kStopped);
  }
}

void GenerateCall::Advance(bool write_pending) {
  if (failure_ && writer_ != nullptr) {
    // The engine may take a step more; the caller need not wait for it.
    std::exchange(writer_, nullptr)->Finish(failure_->status);
  }
  if (close_) Account();
  if (writer_ == nullptr) return;
  if (!close_) {
    if (streams_ && !write_pending && output_.has_delta()) WriteDelta();
    return;
  }
  const absl::Status status = output_.stopped() ? absl::OkStatus() : StatusOf(*close_);
  if (!status.ok()) {
    std::exchange(writer_, nullptr)->Finish(status);
  } else if (!write_pending) {
    WriteLast();
  }
}

// The request is over for the engine: its id is free, and how it ended is settled and counted,
// before the caller can know.
void GenerateCall::Account() {
  if (accounted_) return;
  accounted_ = true;
  context_->live.Unregister(request_id_);
  Outcome outcome = OutcomeOfError(*close_);
  if (failure_ && *close_ != CloseReason::kDeadline) {
    outcome = failure_->outcome;
  } else if (output_.stopped() || StatusOf(*close_).ok()) {
    finish_ = output_.End(*close_);
    outcome = OutcomeOf(finish_);
  }
  context_->metrics.CountRequest(outcome);
  context_->metrics.ObserveRequestDuration(ended_ - accepted_);
  const auto seconds = [this](absl::Time at) {
    return absl::ToInt64Microseconds(at - accepted_) / 1e6;
  };
  nlohmann::ordered_json fields = {{"request_id", request_id_},
                                   {"finish_reason", OutcomeName(outcome)},
                                   {"prompt_tokens", prompt_tokens_},
                                   {"completion_tokens", output_.completion_tokens()}};
  if (admitted_) fields["queue_seconds"] = seconds(*admitted_);
  if (first_token_) fields["time_to_first_token_seconds"] = seconds(*first_token_);
  fields["total_seconds"] = seconds(ended_);
  fields["peer"] = caller_.peer;
  LogEvent("request finished", fields);
}

void GenerateCall::WriteDelta() {
  message_.Clear();
  message_.set_request_id(request_id_);
  output_.Take(&message_);
  {
    absl::MutexLock lock(&mu_);
    write_pending_ = true;
    behind_ = static_cast<int>(inbox_.tokens.size());
  }
  writer_->Write(&message_);
}

void GenerateCall::WriteLast() {
  message_.Clear();
  message_.set_request_id(request_id_);
  output_.Take(&message_);
  *message_.mutable_finish() = finish_;
  FillUsage(message_.mutable_usage());
  std::exchange(writer_, nullptr)->WriteAndFinish(&message_);
}

void GenerateCall::FillUsage(v1::Usage* usage) const {
  usage->set_prompt_tokens(prompt_tokens_);
  usage->set_cached_prompt_tokens(cached_tokens_);
  usage->set_completion_tokens(output_.completion_tokens());
  const auto seconds = [this](std::optional<absl::Time> at) {
    return static_cast<float>(absl::ToDoubleSeconds(at.value_or(ended_) - accepted_));
  };
  usage->set_queue_seconds(seconds(admitted_));
  usage->set_time_to_first_token_seconds(first_token_ ? seconds(first_token_) : 0.0f);
  usage->set_total_seconds(seconds(ended_));
}

}  // namespace qwend
