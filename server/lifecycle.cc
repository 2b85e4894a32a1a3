#include "server/lifecycle.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/impl/server_builder_plugin.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/control_service.h"
#include "server/inference_service.h"
#include "server/listen_address.h"
#include "server/logging.h"
#include "server/service_context.h"
#include "server/version.h"
#include "server/watchdog.h"

namespace qwend {
namespace {

constexpr int kKeepaliveTimeMs = 60'000;
constexpr int kKeepaliveTimeoutMs = 20'000;
// Clients that ping every 10 s are welcome; a ping that comes a little early must not count.
constexpr int kMinClientPingMs = 9'000;

constexpr absl::Duration kAbortGrace = absl::Seconds(1);  // for the last messages after an abort
constexpr absl::Duration kFaultGrace = absl::Seconds(2);
constexpr absl::Duration kHurryLimit = absl::Milliseconds(4500);
constexpr absl::Duration kShutdownLimit = absl::Seconds(10);  // after the drain
constexpr absl::Duration kHeartbeatPeriod = absl::Seconds(1);
constexpr absl::Duration kHeartbeatLimit = absl::Seconds(30);

absl::StatusOr<std::string> ReadPem(const char* flag, const std::string& path) {
  if (path.empty()) return std::string();
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat("--", flag, "=", path, ": cannot be read; give a PEM file"));
  }
  if (text.str().find("-----BEGIN ") == std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, "=", path, ": holds no PEM block; give a PEM file"));
  }
  return text.str();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> Credentials(const ServerOptions& o) {
  if (o.tls_cert.empty()) return grpc::InsecureServerCredentials();
  const auto cert = ReadPem("tls_cert", o.tls_cert);
  const auto key = ReadPem("tls_key", o.tls_key);
  const auto ca = ReadPem("tls_client_ca", o.tls_client_ca);
  for (const auto& file : {cert, key, ca}) {
    if (!file.ok()) return file.status();
  }
  grpc::SslServerCredentialsOptions tls(
      ca->empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                  : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  tls.pem_root_certs = *ca;
  tls.pem_key_cert_pairs.push_back({*key, *cert});
  return grpc::SslServerCredentials(tls);
}

void SetArguments(const ServerOptions& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(options.max_message_bytes);
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kMinClientPingMs);
}

// The reflection library adds itself to every server of the process; this takes it out of one.
class WithoutReflection : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    std::erase_if(*plugins, [](const auto& p) { return p->name() == "proto_server_reflection"; });
  }
};

// Process-wide switches of the gRPC library, before the first server.
void PrepareLibrary() {
  grpc::EnableDefaultHealthCheckService(false);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
}

std::string ModelName(const std::filesystem::path& dir) {
  const std::filesystem::path normal = dir.lexically_normal();
  return normal.has_filename() ? normal.filename().string()
                               : normal.parent_path().filename().string();
}

}  // namespace

struct Server::Ports {
  explicit Ports(ServiceContext* context, HealthState* health)
      : inference(context), control(context), main_health(health), probe_health(health) {}

  InferenceService inference;
  ControlService control;
  HealthService main_health;
  HealthService probe_health;
  std::unique_ptr<grpc::Server> main;
  std::unique_ptr<grpc::Server> probe;
  std::unique_ptr<MetricsEndpoint> metrics;
};

// Ends the process when closing hangs, on a device call that never returns for one.
class Server::Guard : public Watchdog {
 public:
  Guard()
      : Watchdog([] {
          LogWarning("shutdown hangs; ending the process", {});
          FlushLogs();
          std::_Exit(1);
        }) {}
};

Server::Server(const ServerOptions& options) : options_(options) {}
Server::~Server() = default;

absl::StatusOr<std::unique_ptr<Server>> Server::Open(const ServerOptions& options) {
  std::unique_ptr<Server> server(new Server(options));
  if (auto s = server->OpenPorts(); !s.ok()) return s;
  return server;
}

std::string Server::MetricsText() const { return context_->metrics.Text(); }

absl::Status Server::OpenPorts() {
  PrepareLibrary();
  Authenticator authenticator;
  if (!options_.auth_token_file.empty()) {
    auto loaded = Authenticator::Load(options_.auth_token_file);
    if (!loaded.ok()) return loaded.status();
    authenticator = *std::move(loaded);
  }
  const auto credentials = Credentials(options_);
  if (!credentials.ok()) return credentials.status();
  context_ = std::make_unique<ServiceContext>(options_, std::move(authenticator),
                                              ModelName(options_.engine.model_dir));
  auto ports = std::make_unique<Ports>(context_.get(), &health_);

  grpc::ServerBuilder builder;
  SetArguments(options_, &builder);
  if (!options_.reflection) builder.SetOption(std::make_unique<WithoutReflection>());
  builder.AddListeningPort(options_.listen, *credentials, &port_);
  builder.RegisterService(&ports->inference);
  builder.RegisterService(&ports->control);
  builder.RegisterService(&ports->main_health);
  ports->main = builder.BuildAndStart();
  if (ports->main == nullptr || port_ == 0) {
    const std::string why = WhyNotListening(options_.listen);
    const bool tls = !options_.tls_cert.empty() && why == "cannot listen";
    return absl::UnavailableError(
        tls ? absl::StrCat("--tls_cert=", options_.tls_cert, " --tls_key=", options_.tls_key,
                           ": not a certificate chain and its private key; give a matching pair")
            : absl::StrCat("--listen=", options_.listen, ": ", why, "; choose another address"));
  }
  if (!options_.health_listen.empty()) {
    grpc::ServerBuilder probe;
    SetArguments(options_, &probe);
    probe.SetOption(std::make_unique<WithoutReflection>());
    probe.AddListeningPort(options_.health_listen, grpc::InsecureServerCredentials(),
                           &health_port_);
    probe.RegisterService(&ports->probe_health);
    ports->probe = probe.BuildAndStart();
    if (ports->probe == nullptr || health_port_ == 0) {
      return absl::UnavailableError(absl::StrCat("--health_listen=", options_.health_listen, ": ",
                                                 WhyNotListening(options_.health_listen),
                                                 "; choose another address"));
    }
  }
  if (!options_.metrics_listen.empty()) {
    auto endpoint = MetricsEndpoint::Open(options_.metrics_listen, context_->metrics);
    if (!endpoint.ok()) return endpoint.status();
    ports->metrics = *std::move(endpoint);
    metrics_port_ = ports->metrics->port();
  }
  ports_ = std::move(ports);
  guard_ = std::make_unique<Guard>();
  return absl::OkStatus();
}

Server::Result Server::Run(const EngineFactory& factory) {
  struct Loading {
    absl::Mutex mu;
    std::optional<absl::StatusOr<std::unique_ptr<Engine>>> engine ABSL_GUARDED_BY(mu);
  };
  auto loading = std::make_shared<Loading>();
  std::thread loader([loading, factory, options = options_.engine] {
    absl::StatusOr<std::unique_ptr<Engine>> engine = absl::UnknownError("not loaded");
    const absl::Status status = Guarded([&] {
      engine = factory(options);
      return engine.status();
    });
    if (!status.ok()) engine = status;
    absl::MutexLock lock(&loading->mu);
    loading->engine = std::move(engine);
  });
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      if (stops_ > 0) break;
    }
    absl::MutexLock lock(&loading->mu);
    const auto loaded = [&]() { return loading->engine.has_value(); };
    if (loading->mu.AwaitWithTimeout(absl::Condition(&loaded), absl::Milliseconds(20))) break;
  }
  std::optional<absl::StatusOr<std::unique_ptr<Engine>>> engine;
  {
    absl::MutexLock lock(&loading->mu);
    engine = std::move(loading->engine);
  }
  Result result;
  if (!engine) {
    loader.detach();
    LogEvent("stopped while loading", {});
    CloseEverything();
    result.loader_left_behind = true;
    return result;
  }
  loader.join();
  if (!engine->ok()) {
    CloseEverything();
    result.exit_code = 1;
    result.error = std::string(engine->status().message());
    return result;
  }
  Serve(**std::move(engine));
  WaitForEnd();
  Drain();
  CloseEverything();
  absl::MutexLock lock(&mu_);
  if (fault_) {
    result.exit_code = 1;
    result.error = absl::StrCat("the device has failed: ", fault_->message());
  }
  return result;
}

void Server::Serve(std::unique_ptr<Engine> engine) {
  engine_ = std::move(engine);
  engine_->Start([metrics = &context_->metrics](
                     int batch, absl::Duration d) { metrics->ObserveDecodeStep(batch, d); },
                 [this](const absl::Status& status) {
                   context_->state.SetPhase(Phase::kFailed);
                   health_.SetServing(false);
                   absl::MutexLock lock(&mu_);
                   fault_ = status;
                 });
  context_->metrics.SetEngine(engine_.get());
  context_->state.SetEngine(engine_.get());
  {
    // Under the lock, so that no SERVING comes after the NOT_SERVING of a stop or a fault.
    absl::MutexLock lock(&mu_);
    if (stops_ == 0 && !fault_) health_.SetServing(true);
  }
  const ModelDescription& m = engine_->model();
  const DeviceDescription& d = engine_->device();
  nlohmann::ordered_json fields = {{"version", kVersion},
                                   {"listen", options_.listen},
                                   {"port", port_},
                                   {"metrics_port", metrics_port_}};
  if (health_port_ != 0) fields["health_port"] = health_port_;
  fields["tls"] = !options_.tls_cert.empty();
  fields["model"] = m.model_id;
  fields["architecture"] = m.architecture;
  fields["parameters"] = m.parameters;
  fields["context"] = m.max_context_tokens;
  fields["backend"] = d.backend;
  fields["device"] = d.device_name;
  fields["decode_plan"] = d.decode_plan;
  fields["max_sequences"] = d.max_sequences;
  LogEvent("serving", fields);
}

void Server::WaitForEnd() {
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      const auto ended = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
        return stops_ > 0 || fault_.has_value();
      };
      if (mu_.AwaitWithTimeout(absl::Condition(&ended), kHeartbeatPeriod)) return;
    }
    CheckHeartbeat();
  }
}

// An idle engine may sleep as long as it likes; one that has work and does not go round its loop is
// stuck.
void Server::CheckHeartbeat() {
  const EngineStats stats = engine_->Stats();
  const bool old = absl::Now() - stats.heartbeat > kHeartbeatLimit;
  const bool stalled =
      old && stats.running + stats.waiting > 0 && stats.heartbeat == last_heartbeat_;
  last_heartbeat_ = stats.heartbeat;
  if (stalled == stalled_) return;
  stalled_ = stalled;
  LogWarning(stalled ? "the engine does not answer" : "the engine answers again", {});
  absl::MutexLock lock(&mu_);
  if (stops_ == 0 && !fault_) health_.SetServing(!stalled);
}

void Server::RequestStop() {
  int stops = 0;
  {
    absl::MutexLock lock(&mu_);
    stops = ++stops_;
    // Inside the lock, so that no SERVING comes after it.
    health_.SetServing(false);
    context_->state.SetPhase(Phase::kDraining);
  }
  if (stops == 1) {
    guard_->Limit(absl::Now() + options_.drain + kShutdownLimit);
    LogEvent("draining", {{"live_requests", context_->live.count()},
                          {"limit_seconds", absl::ToDoubleSeconds(options_.drain)}});
  } else if (stops == 2) {
    guard_->Limit(absl::Now() + kHurryLimit);
    LogEvent("ending at once", {{"live_requests", context_->live.count()}});
    context_->live.Hurry();
  }
}

void Server::Drain() {
  bool failed = false;
  {
    absl::MutexLock lock(&mu_);
    failed = fault_.has_value();
  }
  if (failed) {
    guard_->Limit(absl::Now() + kShutdownLimit);
    context_->live.WaitUntilIdle(absl::Now() + kFaultGrace);
    return;
  }
  if (context_->live.WaitUntilIdle(absl::Now() + options_.drain)) return;
  LogEvent("aborting", {{"live_requests", context_->live.count()}});
  engine_->AbortAll();
  context_->live.WaitUntilIdle(absl::Now() + kAbortGrace, /*patient=*/true);
}

void Server::CloseEverything() {
  health_.SetServing(false);
  health_.EndWatches();
  const auto now = std::chrono::system_clock::now();
  if (ports_->main != nullptr) ports_->main->Shutdown(now + std::chrono::milliseconds(200));
  if (ports_->probe != nullptr) ports_->probe->Shutdown(now + std::chrono::milliseconds(200));
  context_->metrics.SetEngine(nullptr);
  ports_->metrics.reset();
  ports_->main.reset();
  ports_->probe.reset();
  if (engine_ != nullptr) {
    engine_.reset();
    LogEvent("stopped", {});
  }
  FlushLogs();
}

}  // namespace qwend
