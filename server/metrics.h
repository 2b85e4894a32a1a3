// Everything under /metrics. Names, labels and bucket edges are a contract with dashboards: add,
// never rename.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/engine.h"

namespace prometheus {
class Collectable;
class Exposer;
}  // namespace prometheus

namespace qwend {

// How a request ended, as counted in qwend_requests_total.
enum class Outcome {
  kEos,
  kStopString,
  kStopToken,
  kLength,
  kAborted,
  kCancelled,
  kDeadline,
  kRejected,
  kError,
};
std::string_view OutcomeName(Outcome outcome);

// Every method may be called from any thread.
class Metrics {
 public:
  // `model` is the value of the label "model" on every metric.
  Metrics(std::string model, bool vllm_aliases);
  ~Metrics();

  void CountRequest(Outcome outcome);
  void ObserveTimeToFirstToken(absl::Duration d);
  void ObserveInterTokenLatency(absl::Duration d);
  void ObserveRequestDuration(absl::Duration d);
  void ObserveQueueTime(absl::Duration d);
  void ObservePrefillTime(absl::Duration d);
  void ObserveDecodeStep(int batch, absl::Duration d);

  // The engine whose Stats() are read at every scrape; null before it is loaded and before it is
  // destroyed.
  void SetEngine(const Engine* engine);

  std::shared_ptr<prometheus::Collectable> collectable() const;
  std::string Text() const;  // as served

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// The HTTP server of /metrics.
class MetricsEndpoint {
 public:
  // UNAVAILABLE names the address and why it cannot be listened on.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Open(const std::string& address,
                                                               const Metrics& metrics);
  ~MetricsEndpoint();
  int port() const { return port_; }

 private:
  MetricsEndpoint() = default;
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::shared_ptr<prometheus::Collectable> collectable_;
  int port_ = 0;
};

}  // namespace qwend
