// The recurrent and convolution states of hybrid models, one slot per running sequence. The slot
// also is a sequence's place among the running ones, so models without linear layers have slots
// too: their number is max_sequences.
//
// Slots 0 .. total - 1 are handed out here. The slot after them is the dummy slot of the executor's
// padded rows. A slot comes as its last owner left it: the executor zeroes it when a sequence
// starts at position 0.
#pragma once

#include <optional>
#include <utility>
#include <vector>

namespace qwend {

// Thread: the engine thread. The pool must outlive its leases.
class StateSlots {
 public:
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(slot_, other.slot_);
      return *this;
    }
    ~Lease() { Release(); }
    void Release();                     // gives the slot back now
    int slot() const { return slot_; }  // -1: none

   private:
    friend class StateSlots;
    Lease(StateSlots* pool, int slot) : pool_(pool), slot_(slot) {}
    StateSlots* pool_ = nullptr;
    int slot_ = -1;
  };

  explicit StateSlots(int total);
  StateSlots(const StateSlots&) = delete;
  StateSlots& operator=(const StateSlots&) = delete;

  std::optional<Lease> Reserve();

  int total() const { return total_; }
  int free() const { return static_cast<int>(free_.size()); }
  int used() const { return total() - free(); }

 private:
  int total_;
  std::vector<int> free_;  // the last one goes out first
};

}  // namespace qwend
