#include "server/delivery.h"

#include <utility>

namespace qwend {

DeliveryPool::DeliveryPool(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

DeliveryPool::~DeliveryPool() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  for (std::thread& t : threads_) t.join();
}

void DeliveryPool::Schedule(std::shared_ptr<DeliveryTask> task) {
  absl::MutexLock lock(&mu_);
  switch (task->state_) {
    case DeliveryTask::State::kIdle:
      task->state_ = DeliveryTask::State::kQueued;
      queue_.push_back(std::move(task));
      break;
    case DeliveryTask::State::kRunning:
      task->state_ = DeliveryTask::State::kRunningAndQueued;
      break;
    case DeliveryTask::State::kQueued:
    case DeliveryTask::State::kRunningAndQueued:
      break;
  }
}

void DeliveryPool::Work() {
  for (;;) {
    std::shared_ptr<DeliveryTask> task;
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
        return stopping_ || !queue_.empty();
      };
      mu_.Await(absl::Condition(&ready));
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
      task->state_ = DeliveryTask::State::kRunning;
    }
    task->Deliver();
    absl::MutexLock lock(&mu_);
    if (task->state_ == DeliveryTask::State::kRunningAndQueued) {
      task->state_ = DeliveryTask::State::kQueued;
      queue_.push_back(std::move(task));
    } else {
      task->state_ = DeliveryTask::State::kIdle;
    }
  }
}

}  // namespace qwend
