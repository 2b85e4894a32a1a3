// The ring of slots in shared memory that everything which a block reads comes through
// (persistent_copy.cuh), as its computing warps see it.
#pragma once

#include "kernels/cuda/persistent_shared.cuh"

namespace qwend::cuda {

template <int B>
struct StepRing {
  StepShared<B>& shared;
  char* ring;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = warp / kGroupWarps, quarter = warp % kGroupWarps;
  int slot = 0;  // the next
  uint32_t slot_parity = 0;

  // Goes `count` slots on, at most the ring's.
  __device__ __forceinline__ void SkipSlots(int count) {
    slot += count;
    if (slot < kRingSlots<B>) return;
    slot -= kRingSlots<B>;
    slot_parity ^= 1;
  }
  // Any number of slots on.
  __device__ __forceinline__ void PassSlots(int count) {
    slot += count;
    slot_parity ^= slot / kRingSlots<B> % 2;
    slot %= kRingSlots<B>;
  }
  __device__ __forceinline__ char* AwaitSlot() {
    Patience patience;
    while (!TryBarrier(shared.full + slot, slot_parity)) patience.Try();
    __syncwarp();
    return ring + slot * SlotStride(B);
  }
  // By all warps that share a slot, so many times that all of the block's could have: a slot that
  // one group has for itself counts twice.
  __device__ __forceinline__ void ReleaseSlot(int which, int times) {
    __syncwarp();
    if (lane < kArrivers) Arrive(shared.empty + which, times);
  }
  __device__ __forceinline__ void StepBack() {
    if (slot == 0) slot_parity ^= 1;
    slot = (slot == 0 ? kRingSlots<B> : slot) - 1;
  }
};

}  // namespace qwend::cuda
