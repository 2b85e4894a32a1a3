#include "engine/state_slots.h"

#include "kernels/tensor.h"

namespace qwend {

StateSlots::StateSlots(int total) : total_(total) {
  Require(total > 0, "StateSlots: a pool of ", total, " slots");
  free_.reserve(total);
  for (int slot = total - 1; slot >= 0; --slot) free_.push_back(slot);
}

std::optional<StateSlots::Lease> StateSlots::Reserve() {
  if (free_.empty()) return std::nullopt;
  const int slot = free_.back();
  free_.pop_back();
  return Lease(this, slot);
}

void StateSlots::Lease::Release() {
  if (pool_ == nullptr) return;
  pool_->free_.push_back(slot_);
  pool_ = nullptr;
  slot_ = -1;
}

}  // namespace qwend
