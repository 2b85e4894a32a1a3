#pragma once

#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace qwend {

// Runs `bark` once when the time it was given is up. Nothing happens before the first Limit(), nor
// after destruction.
class Watchdog {
 public:
  explicit Watchdog(std::function<void()> bark)
      : bark_(std::move(bark)), thread_([this] { Run(); }) {}
  ~Watchdog() {
    {
      absl::MutexLock lock(&mu_);
      ended_ = true;
    }
    thread_.join();
  }

  // An earlier time wins over one set before; a later one changes nothing.
  void Limit(absl::Time until) {
    absl::MutexLock lock(&mu_);
    if (until >= limit_) return;
    limit_ = until;
    changed_ = true;
  }

 private:
  void Run() {
    absl::MutexLock lock(&mu_);
    const auto woken = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return changed_ || ended_; };
    while (!ended_) {
      if (absl::Now() >= limit_) {
        bark_();
        return;
      }
      changed_ = false;
      mu_.AwaitWithDeadline(absl::Condition(&woken), limit_);
    }
  }

  absl::Mutex mu_;
  absl::Time limit_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  bool changed_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  const std::function<void()> bark_;
  std::thread thread_;
};

}  // namespace qwend
