// From opening the ports to closing them: load, serve, drain.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "engine/engine.h"
#include "server/health.h"
#include "server/options.h"

namespace grpc {
class Server;
}  // namespace grpc

namespace qwend {

struct ServiceContext;
class MetricsEndpoint;

class Server {
 public:
  using EngineFactory =
      std::function<absl::StatusOr<std::unique_ptr<Engine>>(const EngineOptions&)>;

  struct Result {
    int exit_code = 0;  // 0: stopped when asked to; 1: could not load, or the device failed
    std::string error;  // one line for standard error; empty with 0
    // A thread still loads a model and cannot be stopped: end the process without unwinding.
    bool loader_left_behind = false;
  };

  // Opens all ports. Health is NOT_SERVING and calls get UNAVAILABLE until Run() has loaded the
  // model. Errors name the flag and the remedy.
  static absl::StatusOr<std::unique_ptr<Server>> Open(const ServerOptions& options);
  ~Server();

  int port() const { return port_; }
  int metrics_port() const { return metrics_port_; }  // 0: none
  int health_port() const { return health_port_; }    // 0: none
  std::string MetricsText() const;                    // as served on /metrics

  // Loads the model, serves until RequestStop() or a device fault, drains, and closes everything.
  // Once.
  Result Run(const EngineFactory& factory);

  // The first call drains: health NOT_SERVING, no new requests, running ones may end until
  // --drain_seconds and are aborted then. The second ends them at once. Any thread.
  void RequestStop();

 private:
  struct Ports;

  explicit Server(const ServerOptions& options);
  absl::Status OpenPorts();
  void Serve(std::unique_ptr<Engine> engine);
  void WaitForEnd();
  void CheckHeartbeat();
  void Drain();
  void CloseEverything();

  const ServerOptions options_;
  HealthState health_;
  std::unique_ptr<ServiceContext> context_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Ports> ports_;
  int port_ = 0;
  int metrics_port_ = 0;
  int health_port_ = 0;

  // Of WaitForEnd().
  absl::Time last_heartbeat_ = absl::InfinitePast();
  bool stalled_ = false;

  absl::Mutex mu_;
  int stops_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<absl::Status> fault_ ABSL_GUARDED_BY(mu_);
  class Guard;
  std::unique_ptr<Guard> guard_;
};

}  // namespace qwend
