// One generation from submission to its last message, whatever carries the messages.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "engine/token_sink.h"
#include "qwend/v1/inference.pb.h"
#include "server/delivery.h"
#include "server/output_stream.h"
#include "server/request_validation.h"
#include "server/service_context.h"

namespace qwend {

// Carries messages to a caller. Called by one thread at a time, without locks held. Exactly one of
// WriteAndFinish and Finish is called, last; the writer may be gone when it returns.
class ResponseWriter {
 public:
  virtual ~ResponseWriter() = default;
  // Whether messages may go out before the last one.
  virtual bool streams() const = 0;
  // Starts a write. GenerateCall::OnWriteDone follows, and until then `message` stays as it is.
  virtual void Write(const v1::GenerateResponse* message) = 0;
  // The last message, then status OK. `message` stays until the writer is done.
  virtual void WriteAndFinish(const v1::GenerateResponse* message) = 0;
  virtual void Finish(const absl::Status& status) = 0;
};

// Three kinds of threads meet here. The engine's thread and gRPC's only leave word in `inbox_`; the
// delivery pool, one thread at a time, does everything else in Deliver().
//
// The engine is never made to wait: while a write is pending tokens gather, and a caller too far
// behind is given up.
class GenerateCall : public TokenSink,
                     public DeliveryTask,
                     public std::enable_shared_from_this<GenerateCall> {
 public:
  struct Caller {
    std::string peer;
    absl::Time deadline = absl::InfiniteFuture();
  };

  // Validates, and submits to the engine. Otherwise the request counts as rejected, and the writer
  // is never called.
  static absl::StatusOr<std::shared_ptr<GenerateCall>> Start(ServiceContext* context,
                                                             const v1::GenerateRequest& request,
                                                             const Caller& caller,
                                                             ResponseWriter* writer);

  // From the transport.
  void OnWriteDone(bool ok);
  void OnCancel();

  // TokenSink.
  void OnAdmitted(absl::Time now, int cached_tokens) override;
  void OnPrefilled(absl::Time now, absl::Duration prefill) override;
  void OnToken(int32_t token) override;
  void OnClose(CloseReason reason) override;

  // DeliveryTask.
  void Deliver() override;

 private:
  struct TimedToken {
    int32_t id;
    absl::Time at;
  };
  // Why a call ends before, or other than, the engine's closing says.
  struct Failure {
    absl::Status status;
    Outcome outcome;
  };
  struct Inbox {
    std::optional<absl::Time> admitted;
    int cached_tokens = 0;
    std::optional<absl::Duration> prefill;
    std::vector<TimedToken> tokens;
    std::optional<CloseReason> close;
    std::optional<Failure> failure;
  };

  GenerateCall(ServiceContext* context, Engine* engine, std::string request_id,
               const PreparedRequest& request, const Caller& caller, ResponseWriter* writer);

  void Schedule();
  void EndInEngine(CloseReason reason);
  void Fail(Failure failure, CloseReason reason);
  void TakeIn(Inbox inbox);
  void Advance(bool write_pending);
  void Account();
  void WriteDelta();
  void WriteLast();
  void FillUsage(v1::Usage* usage) const;

  ServiceContext* const context_;
  Engine* const engine_;
  const std::string request_id_;
  const Caller caller_;
  const int prompt_tokens_;
  const absl::Time accepted_;
  const bool streams_;
  std::string engine_id_;  // set before anybody else knows of the call

  absl::Mutex mu_;
  Inbox inbox_ ABSL_GUARDED_BY(mu_);
  bool write_pending_ ABSL_GUARDED_BY(mu_) = false;
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  bool failed_ ABSL_GUARDED_BY(mu_) = false;
  int behind_ ABSL_GUARDED_BY(mu_) = 0;  // tokens that came while a write was pending

  // Of Deliver() alone.
  ResponseWriter* writer_;  // null once it was told to finish
  OutputStream output_;
  v1::GenerateResponse message_;  // untouched while a write is pending
  v1::Finish finish_;
  std::optional<CloseReason> close_;
  std::optional<Failure> failure_;
  std::optional<absl::Time> admitted_;
  std::optional<absl::Time> first_token_;
  absl::Time last_token_;
  absl::Time ended_;
  int cached_tokens_ = 0;
  bool stop_sent_ = false;
  bool accounted_ = false;
};

}  // namespace qwend
