// A whole server on 127.0.0.1 with a FakeEngine in it, and a client's view of it.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "google/rpc/error_details.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "qwend/v1/inference.grpc.pb.h"
#include "server/lifecycle.h"
#include "tests/server/fake_engine.h"

namespace qwend::testing {

ServerOptions TestOptions();  // a free port, no metrics endpoint, no log

class TestServer {
 public:
  // Serving when the constructor returns.
  explicit TestServer(std::unique_ptr<FakeEngine> engine, ServerOptions options = TestOptions());
  ~TestServer();  // stops and expects exit code 0, unless Wait() was called

  void RequestStop() { server_->RequestStop(); }
  Server::Result Wait();  // until Run() has returned

  FakeEngine& engine() { return *engine_; }
  int port() const { return server_->port(); }
  std::string MetricsText() { return server_->MetricsText(); }
  double Counted(const std::string& finish_reason);

  std::shared_ptr<grpc::Channel> channel() { return channel_; }
  v1::Inference::Stub& inference() { return *inference_; }
  v1::Control::Stub& control() { return *control_; }
  grpc::health::v1::HealthCheckResponse::ServingStatus Health(const std::string& service = "");

 private:
  FakeEngine* engine_;
  std::unique_ptr<Server> server_;
  std::thread thread_;
  Server::Result result_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Inference::Stub> inference_;
  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<grpc::health::v1::Health::Stub> health_;
};

std::shared_ptr<grpc::Channel> Connect(int port);

// One stream. Reads to its end in the constructor's thread when asked to by Finish().
class Call {
 public:
  Call(TestServer* server, const v1::GenerateRequest& request,
       absl::Duration timeout = absl::Seconds(20));
  bool Read(v1::GenerateResponse* message) { return reader_->Read(message); }
  grpc::Status Finish();  // reads what is left
  void Cancel() { context_.TryCancel(); }

  const std::vector<v1::GenerateResponse>& messages() const { return messages_; }
  std::string text() const;
  std::vector<int32_t> ids() const;
  const v1::GenerateResponse& last() const { return messages_.back(); }
  grpc::ClientContext& context() { return context_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>> reader_;
  std::vector<v1::GenerateResponse> messages_;
};

v1::GenerateRequest TextRequest(const std::string& text, const std::string& id = "");

// The message of this kind among a status's details; default-constructed when there is none.
template <typename Message>
Message DetailOf(const grpc::Status& status) {
  google::rpc::Status details;
  Message message;
  if (!details.ParseFromString(status.error_details())) return message;
  for (const auto& any : details.details()) {
    if (any.UnpackTo(&message)) return message;
  }
  return Message();
}

}  // namespace qwend::testing
