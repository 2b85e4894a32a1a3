// The threads that turn tokens into messages, so that neither the engine's thread nor gRPC's do.
#pragma once

#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace qwend {

// Something that delivers what has come in since the last time. Never runs on two threads at once.
class DeliveryTask {
 public:
  virtual ~DeliveryTask() = default;
  virtual void Deliver() = 0;  // must not throw

 private:
  friend class DeliveryPool;
  enum class State { kIdle, kQueued, kRunning, kRunningAndQueued };
  State state_ = State::kIdle;  // under the pool's mutex
};

class DeliveryPool {
 public:
  explicit DeliveryPool(int threads);
  ~DeliveryPool();  // runs what is queued, then joins

  // Deliver() will run after this call, once for any number of calls before it starts. Any thread,
  // never waits.
  void Schedule(std::shared_ptr<DeliveryTask> task);

 private:
  void Work();

  absl::Mutex mu_;
  std::deque<std::shared_ptr<DeliveryTask>> queue_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace qwend
