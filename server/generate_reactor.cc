#include "server/generate_reactor.h"

#include <chrono>
#include <memory>
#include <utility>

#include "server/generate_call.h"
#include "server/status_mapping.h"

namespace qwend {
namespace {

GenerateCall::Caller CallerOf(const grpc::ServerContextBase& call) {
  GenerateCall::Caller caller;
  caller.peer = call.peer();
  const auto deadline = call.deadline();
  if (deadline != std::chrono::system_clock::time_point::max()) {
    caller.deadline = absl::FromChrono(deadline);
  }
  return caller;
}

// What both kinds of calls do around a GenerateCall. `Base` is the reactor's class.
template <typename Base>
class GenerateReactor : public Base, public ResponseWriter {
 public:
  explicit GenerateReactor(ServiceContext* context, grpc::CallbackServerContext* call)
      : context_(context), grpc_call_(call), ticket_(&context->live) {}

  // Once, right after construction.
  void Start(const v1::GenerateRequest& request) {
    if (absl::Status s = context_->authenticator.Check(*grpc_call_); !s.ok()) {
      context_->metrics.CountRequest(Outcome::kRejected);
      return Base::Finish(Refuse(s, grpc_call_));
    }
    auto call = GenerateCall::Start(context_, request, CallerOf(*grpc_call_), this);
    if (!call.ok()) return Base::Finish(Refuse(call.status(), grpc_call_));
    call_ = *std::move(call);
  }

  // gRPC calls the reactions only after the handler has returned, when call_ is set.
  void OnCancel() override {
    if (call_ != nullptr) call_->OnCancel();
  }
  void OnDone() override { delete this; }

  void Finish(const absl::Status& status) override { Base::Finish(ToGrpc(status)); }

 protected:
  std::shared_ptr<GenerateCall> call_;  // null: refused

 private:
  ServiceContext* const context_;
  grpc::CallbackServerContext* const grpc_call_;
  const LiveRequests::Ticket ticket_;
};

class StreamReactor final : public GenerateReactor<grpc::ServerWriteReactor<v1::GenerateResponse>> {
 public:
  using GenerateReactor::GenerateReactor;

  bool streams() const override { return true; }
  void Write(const v1::GenerateResponse* message) override { StartWrite(message); }
  void WriteAndFinish(const v1::GenerateResponse* message) override {
    StartWriteAndFinish(message, grpc::WriteOptions(), grpc::Status::OK);
  }
  void OnWriteDone(bool ok) override { call_->OnWriteDone(ok); }
};

class UnaryReactor final : public GenerateReactor<grpc::ServerUnaryReactor> {
 public:
  UnaryReactor(ServiceContext* context, grpc::CallbackServerContext* call,
               v1::GenerateUnaryResponse* response)
      : GenerateReactor(context, call), response_(response) {}

  bool streams() const override { return false; }
  void Write(const v1::GenerateResponse*) override {}
  void WriteAndFinish(const v1::GenerateResponse* message) override {
    response_->set_request_id(message->request_id());
    v1::Completion* output = response_->add_outputs();
    output->set_index(message->index());
    output->set_text(message->text());
    *output->mutable_token_ids() = message->token_ids();
    *output->mutable_finish() = message->finish();
    *response_->mutable_usage() = message->usage();
    grpc::ServerUnaryReactor::Finish(grpc::Status::OK);
  }

 private:
  v1::GenerateUnaryResponse* const response_;
};

}  // namespace

grpc::ServerWriteReactor<v1::GenerateResponse>* StartGenerate(ServiceContext* context,
                                                              grpc::CallbackServerContext* call,
                                                              const v1::GenerateRequest& request) {
  auto* reactor = new StreamReactor(context, call);
  reactor->Start(request);
  return reactor;
}

grpc::ServerUnaryReactor* StartGenerateUnary(ServiceContext* context,
                                             grpc::CallbackServerContext* call,
                                             const v1::GenerateRequest& request,
                                             v1::GenerateUnaryResponse* response) {
  auto* reactor = new UnaryReactor(context, call, response);
  reactor->Start(request);
  return reactor;
}

}  // namespace qwend
