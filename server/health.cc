#include "server/health.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "server/status_mapping.h"
#include "server/violations.h"

namespace qwend {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// One Watch stream. Its fields are under the state's mutex; gRPC runs none of the reactions inside
// StartWrite or Finish, so these may be called with it held.
class HealthState::Watcher final : public grpc::ServerWriteReactor<HealthCheckResponse> {
 public:
  Watcher(HealthState* state, bool known) : state_(state), known_(known) {
    absl::MutexLock lock(&state_->mu_);
    state_->watchers_.insert(this);
    state_->Advance(this);
  }
  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&state_->mu_);
    writing_ = false;
    cancelled_ = cancelled_ || !ok;
    state_->Advance(this);
  }
  void OnCancel() override {
    absl::MutexLock lock(&state_->mu_);
    cancelled_ = true;
    state_->Advance(this);
  }
  void OnDone() override {
    {
      absl::MutexLock lock(&state_->mu_);
      state_->watchers_.erase(this);
    }
    delete this;
  }

 private:
  friend class HealthState;
  HealthState* const state_;
  const bool known_;
  bool writing_ = false;
  bool cancelled_ = false;
  bool finished_ = false;
  std::optional<HealthCheckResponse::ServingStatus> told_;
  HealthCheckResponse message_;
};

bool HealthState::KnowsService(const std::string& name) {
  return name.empty() || name == "qwend.v1.Inference";
}

void HealthState::SetServing(bool serving) {
  absl::MutexLock lock(&mu_);
  serving_ = serving;
  for (Watcher* w : watchers_) Advance(w);
}

void HealthState::EndWatches() {
  absl::MutexLock lock(&mu_);
  ended_ = true;
  for (Watcher* w : watchers_) Advance(w);
}

bool HealthState::serving() const {
  absl::MutexLock lock(&mu_);
  return serving_;
}

void HealthState::Advance(Watcher* w) {
  if (w->finished_) return;
  const auto status = !w->known_ ? HealthCheckResponse::SERVICE_UNKNOWN
                      : serving_ ? HealthCheckResponse::SERVING
                                 : HealthCheckResponse::NOT_SERVING;
  if (w->cancelled_) {
    w->finished_ = true;
    w->Finish(ToGrpc(StatusOf(CloseReason::kCancelled)));
  } else if (!w->writing_ && w->told_ != status) {
    w->writing_ = true;
    w->told_ = status;
    w->message_.set_status(status);
    w->StartWrite(&w->message_);
  } else if (ended_ && !w->writing_) {
    w->finished_ = true;
    w->Finish(ToGrpc(DrainingError()));
  }
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* call,
                                               const HealthCheckRequest* request,
                                               HealthCheckResponse* response) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  if (HealthState::KnowsService(request->service())) {
    response->set_status(state_->serving() ? HealthCheckResponse::SERVING
                                           : HealthCheckResponse::NOT_SERVING);
    reactor->Finish(grpc::Status::OK);
  } else {
    reactor->Finish(ToGrpc(
        absl::NotFoundError(absl::StrCat("service: ", Quoted(request->service()),
                                         " is unknown; ask for \"\" or \"qwend.v1.Inference\""))));
  }
  return reactor;
}

grpc::ServerWriteReactor<HealthCheckResponse>* HealthService::Watch(
    grpc::CallbackServerContext*, const HealthCheckRequest* request) {
  return new HealthState::Watcher(state_, HealthState::KnowsService(request->service()));
}

}  // namespace qwend
