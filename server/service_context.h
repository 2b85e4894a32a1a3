// What the services share.
#pragma once

#include <exception>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/auth.h"
#include "server/delivery.h"
#include "server/live_requests.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/serving_state.h"
#include "server/status_mapping.h"

namespace qwend {

struct ServiceContext {
  ServiceContext(const ServerOptions& server_options, Authenticator auth, std::string model_id)
      : options(server_options),
        authenticator(std::move(auth)),
        metrics(std::move(model_id), server_options.vllm_metric_aliases),
        pool(kDeliveryThreads) {}

  static constexpr int kDeliveryThreads = 2;

  const ServerOptions options;
  const Authenticator authenticator;
  const absl::Time started = absl::Now();
  ServingState state;
  LiveRequests live;
  Metrics metrics;
  DeliveryPool pool;
};

// Runs a handler; an exception becomes INTERNAL, and never reaches gRPC's threads.
template <typename Fn>
absl::Status Guarded(Fn&& fn) {
  try {
    return fn();
  } catch (const std::exception& e) {
    return InternalError(e.what());
  } catch (...) {
    return InternalError("unknown exception");
  }
}

}  // namespace qwend
