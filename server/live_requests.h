// Which requests are alive: by id for Abort, and how many calls a shutdown has to wait for.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "engine/engine.h"

namespace qwend {

// Callers' ids stand for engine ids here. The engine gets an id of its own for every request, so
// that a late cancel of one request never ends a later one of the same name.
class LiveRequests {
 public:
  // Counts a call from before it is looked at until its reactor is done.
  class Ticket {
   public:
    explicit Ticket(LiveRequests* live) : live_(live) { live_->Count(1); }
    ~Ticket() { live_->Count(-1); }
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;

   private:
    LiveRequests* live_;
  };

  // Gives `id` its engine id. ALREADY_EXISTS while it is alive.
  absl::Status Register(const std::string& id, std::string* engine_id);
  void Unregister(const std::string& id);
  // Ends the request with kAborted. NOT_FOUND when there is none.
  absl::Status Abort(const std::string& id, Engine* engine);

  // Waits until no call is counted, and says whether that is so. Gives up when the time is up, or
  // once Hurry() was called and `patient` is not set.
  bool WaitUntilIdle(absl::Time until, bool patient = false);
  void Hurry();
  int count() const;

  static std::string MakeId();  // as unique as 122 random bits are

 private:
  void Count(int change);

  mutable absl::Mutex mu_;
  std::unordered_map<std::string, std::string> engine_ids_ ABSL_GUARDED_BY(mu_);
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 0;
  int count_ ABSL_GUARDED_BY(mu_) = 0;
  bool hurry_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace qwend
