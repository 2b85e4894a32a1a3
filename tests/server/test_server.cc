#include "tests/server/test_server.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/logging.h"

namespace qwend::testing {

using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

ServerOptions TestOptions() {
  InitLogging("off", false);
  ServerOptions options;
  options.engine.model_dir = "/models/fake/";
  options.listen = "127.0.0.1:0";
  options.metrics_listen = "";
  options.drain = absl::Seconds(10);
  return options;
}

std::shared_ptr<grpc::Channel> Connect(int port) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Small windows, so that a reader that does not read is noticed soon.
  args.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", port),
                                   grpc::InsecureChannelCredentials(), args);
}

TestServer::TestServer(std::unique_ptr<FakeEngine> engine, ServerOptions options)
    : engine_(engine.get()) {
  auto server = Server::Open(options);
  if (!server.ok()) {
    ADD_FAILURE() << server.status();
    std::abort();
  }
  server_ = *std::move(server);
  channel_ = Connect(port());
  inference_ = v1::Inference::NewStub(channel_);
  control_ = v1::Control::NewStub(channel_);
  health_ = grpc::health::v1::Health::NewStub(channel_);
  EXPECT_EQ(Health(), HealthCheckResponse::NOT_SERVING) << "before the model is loaded";
  thread_ = std::thread([this, engine = engine.release()] {
    result_ = server_->Run([engine](const EngineOptions&) {
      return absl::StatusOr<std::unique_ptr<Engine>>(std::unique_ptr<Engine>(engine));
    });
  });
  while (Health() != HealthCheckResponse::SERVING) absl::SleepFor(absl::Milliseconds(1));
}

TestServer::~TestServer() {
  if (!thread_.joinable()) return;
  RequestStop();
  const Server::Result result = Wait();
  EXPECT_EQ(result.exit_code, 0) << result.error;
}

Server::Result TestServer::Wait() {
  thread_.join();
  return result_;
}

double TestServer::Counted(const std::string& finish_reason) {
  const std::string text = MetricsText();
  const std::string name = "finish_reason=\"" + finish_reason + "\"} ";
  const size_t at = text.find(name);
  return at == std::string::npos ? -1 : std::stod(text.substr(at + name.size()));
}

HealthCheckResponse::ServingStatus TestServer::Health(const std::string& service) {
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  HealthCheckRequest request;
  request.set_service(service);
  HealthCheckResponse response;
  const grpc::Status status = health_->Check(&context, request, &response);
  return status.ok() ? response.status() : HealthCheckResponse::UNKNOWN;
}

Call::Call(TestServer* server, const v1::GenerateRequest& request, absl::Duration timeout) {
  context_.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  reader_ = server->inference().Generate(&context_, request);
}

grpc::Status Call::Finish() {
  v1::GenerateResponse message;
  while (reader_->Read(&message)) messages_.push_back(message);
  return reader_->Finish();
}

std::string Call::text() const {
  std::string text;
  for (const auto& m : messages_) text += m.text();
  return text;
}

std::vector<int32_t> Call::ids() const {
  std::vector<int32_t> ids;
  for (const auto& m : messages_) {
    for (const uint32_t id : m.token_ids()) ids.push_back(static_cast<int32_t>(id));
  }
  return ids;
}

v1::GenerateRequest TextRequest(const std::string& text, const std::string& id) {
  v1::GenerateRequest request;
  request.set_request_id(id);
  request.set_text(text);
  return request;
}

}  // namespace qwend::testing
