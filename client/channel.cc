#include "client/channel.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <tuple>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/format.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace qwend::client {
namespace {

absl::StatusOr<std::string> ReadPem(absl::string_view flag, const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::InvalidArgumentError(absl::StrCat("--", flag, " ", path, ": cannot read"));
  return std::string(std::istreambuf_iterator<char>(in), {});
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const ConnectionOptions& options) {
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetUserAgentPrefix("qwend-client");
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // each channel is its own connection
  if (options.tls) {
    grpc::SslCredentialsOptions ssl;
    for (auto [flag, path, pem] : {std::tuple{"tls_ca", &options.tls_ca, &ssl.pem_root_certs},
                                   std::tuple{"tls_cert", &options.tls_cert, &ssl.pem_cert_chain},
                                   std::tuple{"tls_key", &options.tls_key, &ssl.pem_private_key}}) {
      auto text = ReadPem(flag, *path);
      if (!text.ok()) return text.status();
      *pem = *std::move(text);
    }
    credentials = grpc::SslCredentials(ssl);
    if (!options.tls_server_name.empty()) {
      arguments.SetSslTargetNameOverride(options.tls_server_name);
    }
  }
  return grpc::CreateCustomChannel(options.server, credentials, arguments);
}

void Prepare(const ConnectionOptions& options, grpc::ClientContext* context) {
  if (options.timeout != absl::InfiniteDuration()) {
    context->set_deadline(absl::ToChronoTime(absl::Now() + options.timeout));
  }
  if (!options.token.empty()) {
    context->AddMetadata("authorization", absl::StrCat("Bearer ", options.token));
  }
}

grpc::Status CheckHealth(const ConnectionOptions& options,
                         const std::shared_ptr<grpc::Channel>& channel, const std::string& service,
                         std::string* serving) {
  grpc::ClientContext context;
  Prepare(options, &context);
  grpc::health::v1::HealthCheckRequest request;
  request.set_service(service);
  grpc::health::v1::HealthCheckResponse response;
  const grpc::Status status =
      grpc::health::v1::Health::NewStub(channel)->Check(&context, request, &response);
  if (status.ok()) {
    *serving = grpc::health::v1::HealthCheckResponse::ServingStatus_Name(response.status());
  }
  return status;
}

std::shared_ptr<grpc::Channel> Connect(const ConnectionOptions& options) {
  auto channel = MakeChannel(options);
  if (!channel.ok()) {
    PrintError(std::string(channel.status().message()));
    return nullptr;
  }
  if (options.wait == absl::ZeroDuration()) return *channel;
  const absl::Time until = absl::Now() + options.wait;
  std::string last = "no answer";
  while (absl::Now() < until) {
    ConnectionOptions attempt = options;
    attempt.timeout = std::min(until - absl::Now(), absl::Seconds(2));
    std::string serving;
    // A fresh channel each time: a failed connection would otherwise back off for seconds.
    auto probe = MakeChannel(options);
    const grpc::Status status = CheckHealth(attempt, *probe, "", &serving);
    if (status.ok() && serving == "SERVING") return *probe;
    last = status.ok() ? serving : status.error_message();
    absl::SleepFor(absl::Milliseconds(100));
  }
  PrintError(absl::StrCat(options.server, " is not SERVING after ",
                          absl::FormatDuration(options.wait), ": ", last));
  return nullptr;
}

}  // namespace qwend::client
