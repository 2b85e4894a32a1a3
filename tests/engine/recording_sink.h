// A TokenSink that keeps what it hears, checks the order of the calls, and lets a test wait.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/token_sink.h"

namespace qwend {

class RecordingSink final : public TokenSink {
 public:
  // Set before Submit; called on the engine thread, outside the sink's lock.
  std::function<void(int32_t)> on_token;
  std::function<void(CloseReason)> on_close;

  void OnAdmitted(absl::Time, int cached_tokens) override {
    std::lock_guard lock(mu_);
    if (admitted_ || closed_ || cached_tokens != 0) ++misuses_;
    admitted_ = true;
    changed_.notify_all();
  }
  void OnPrefilled(absl::Time, absl::Duration prefill) override {
    std::lock_guard lock(mu_);
    if (!admitted_ || prefilled_ || closed_ || prefill < absl::ZeroDuration()) ++misuses_;
    prefilled_ = true;
    changed_.notify_all();
  }
  void OnToken(int32_t token) override {
    {
      std::lock_guard lock(mu_);
      if (!prefilled_ || closed_) ++misuses_;
      tokens_.push_back(token);
      changed_.notify_all();
    }
    if (on_token) on_token(token);
  }
  void OnClose(CloseReason reason) override {
    if (on_close) on_close(reason);
    std::lock_guard lock(mu_);
    if (closed_) ++misuses_;
    closed_ = reason;
    changed_.notify_all();
  }

  std::vector<int32_t> tokens() const { return Copy(tokens_); }
  bool admitted() const { return Copy(admitted_); }
  bool prefilled() const { return Copy(prefilled_); }
  std::optional<CloseReason> closed() const { return Copy(closed_); }
  int misuses() const { return Copy(misuses_); }  // calls out of order

  // The reason, or nothing when no close came within 30 s.
  std::optional<CloseReason> WaitClosed() {
    return WaitFor([&] { return closed_.has_value(); }) ? closed() : std::nullopt;
  }
  bool WaitAdmitted() {
    return WaitFor([&] { return admitted_; });
  }
  bool WaitTokens(size_t count) {
    return WaitFor([&] { return tokens_.size() >= count; });
  }

 private:
  template <typename T>
  T Copy(const T& value) const {
    std::lock_guard lock(mu_);
    return value;
  }
  template <typename F>
  bool WaitFor(F condition) {
    std::unique_lock lock(mu_);
    return changed_.wait_for(lock, std::chrono::seconds(150), condition);
  }

  mutable std::mutex mu_;
  std::condition_variable changed_;
  bool admitted_ = false;
  bool prefilled_ = false;
  std::vector<int32_t> tokens_;
  std::optional<CloseReason> closed_;
  int misuses_ = 0;
};

}  // namespace qwend
