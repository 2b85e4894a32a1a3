// Whether this server takes calls now.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "engine/engine.h"
#include "server/status_mapping.h"

namespace qwend {

enum class Phase { kLoading, kServing, kDraining, kFailed };

// Thread-safe. The engine outlives every call.
class ServingState {
 public:
  void SetEngine(Engine* engine) {
    absl::MutexLock lock(&mu_);
    engine_ = engine;
    if (phase_ == Phase::kLoading && engine != nullptr) phase_ = Phase::kServing;
  }
  // A failed device stays failed.
  void SetPhase(Phase phase) {
    absl::MutexLock lock(&mu_);
    if (phase_ != Phase::kFailed) phase_ = phase;
  }
  Phase phase() const {
    absl::MutexLock lock(&mu_);
    return phase_;
  }

  // For a request that makes tokens: only while serving.
  absl::StatusOr<Engine*> ForGeneration() const {
    absl::MutexLock lock(&mu_);
    if (phase_ == Phase::kDraining) return DrainingError();
    if (phase_ == Phase::kFailed) return FailedError();
    if (engine_ == nullptr) return LoadingError();
    return engine_;
  }
  // For a question about the model or the server: also while draining.
  absl::StatusOr<Engine*> ForQuestion() const {
    absl::MutexLock lock(&mu_);
    if (engine_ != nullptr) return engine_;
    return phase_ == Phase::kDraining ? DrainingError() : LoadingError();
  }

 private:
  mutable absl::Mutex mu_;
  Phase phase_ ABSL_GUARDED_BY(mu_) = Phase::kLoading;
  Engine* engine_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace qwend
