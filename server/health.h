// grpc.health.v1, for "" and "qwend.v1.Inference". Starts as NOT_SERVING, before any port opens.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "grpc/health/v1/health.grpc.pb.h"

namespace qwend {

// One truth, which the services of all ports tell. Outlives them.
class HealthState {
 public:
  class Watcher;

  void SetServing(bool serving);  // tells every watcher
  void EndWatches();              // so that no watcher holds up a shutdown
  bool serving() const;

  static bool KnowsService(const std::string& name);

 private:
  friend class Watcher;
  friend class HealthService;

  void Advance(Watcher* watcher) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  bool serving_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::set<Watcher*> watchers_ ABSL_GUARDED_BY(mu_);
};

class HealthService final : public grpc::health::v1::Health::CallbackService {
 public:
  explicit HealthService(HealthState* state) : state_(state) {}

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* call,
                                  const grpc::health::v1::HealthCheckRequest* request,
                                  grpc::health::v1::HealthCheckResponse* response) override;
  grpc::ServerWriteReactor<grpc::health::v1::HealthCheckResponse>* Watch(
      grpc::CallbackServerContext* call,
      const grpc::health::v1::HealthCheckRequest* request) override;

 private:
  HealthState* const state_;
};

}  // namespace qwend
