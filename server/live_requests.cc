#include "server/live_requests.h"

#include <cstdint>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/violations.h"

namespace qwend {

absl::Status LiveRequests::Register(const std::string& id, std::string* engine_id) {
  absl::MutexLock lock(&mu_);
  *engine_id = absl::StrCat(id, "#", ++next_);
  if (engine_ids_.emplace(id, *engine_id).second) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat("request_id: another live request has the id ",
                                               Quoted(id), "; choose another, or leave it unset"));
}

void LiveRequests::Unregister(const std::string& id) {
  absl::MutexLock lock(&mu_);
  engine_ids_.erase(id);
}

absl::Status LiveRequests::Abort(const std::string& id, Engine* engine) {
  std::string engine_id;
  {
    absl::MutexLock lock(&mu_);
    const auto it = engine_ids_.find(id);
    if (it != engine_ids_.end()) engine_id = it->second;
  }
  if (!engine_id.empty() && engine->End(engine_id, CloseReason::kAborted).ok()) {
    return absl::OkStatus();
  }
  return absl::NotFoundError(absl::StrCat("request_id: no live request has the id ", Quoted(id)));
}

bool LiveRequests::WaitUntilIdle(absl::Time until, bool patient) {
  absl::MutexLock lock(&mu_);
  const auto ready = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    return count_ == 0 || (hurry_ && !patient);
  };
  mu_.AwaitWithDeadline(absl::Condition(&ready), until);
  return count_ == 0;
}

void LiveRequests::Hurry() {
  absl::MutexLock lock(&mu_);
  hurry_ = true;
}

int LiveRequests::count() const {
  absl::MutexLock lock(&mu_);
  return count_;
}

void LiveRequests::Count(int change) {
  absl::MutexLock lock(&mu_);
  count_ += change;
}

std::string LiveRequests::MakeId() {
  std::random_device device;
  const auto word = [&] { return static_cast<uint32_t>(device()); };
  const uint32_t b = word();
  return absl::StrFormat("%08x-%04x-4%03x-%04x-%04x%08x", word(), b >> 16, b & 0xfff,
                         0x8000 | (word() & 0x3fff), word() & 0xffff, word());
}

}  // namespace qwend
