// Bulk copies from global into shared memory, and the barriers in shared memory that count their
// bytes (compute capability 9.0 on).
#pragma once

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

// A phase ends when `arrivals` threads have arrived and the bytes expected of it have landed.
__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}

// After the last InitBarrier, by the thread that made them: copies and other threads see them.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives, and adds `bytes` to what the phase waits for.
__device__ __forceinline__ void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier, uint32_t bytes) {
  ArriveExpecting(SharedAddress(barrier), bytes);
}

__device__ __forceinline__ void Arrive(uint64_t* barrier, int times = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(times)
               : "memory");
}

// Whether the phase with this parity has ended, after waiting a little for it.
__device__ __forceinline__ bool TryBarrier(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ bool TryBarrier(uint64_t* barrier, uint32_t parity) {
  return TryBarrier(SharedAddress(barrier), parity);
}

// Waits for the end of the phase with this parity. A thread must never be two phases behind.
__device__ __forceinline__ void WaitBarrier(uint64_t* barrier, uint32_t parity) {
  while (!TryBarrier(barrier, parity)) {
  }
}

// 16-byte aligned, a multiple of 16 bytes; lines are the first to leave L2: weights are read once.
__device__ __forceinline__ void BulkCopy(void* to, const void* from, uint32_t bytes,
                                         uint64_t* barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier)), "l"(policy)
      : "memory");
}

// The same for what is read again.
__device__ __forceinline__ void BulkCopy(uint32_t to, const void* from, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ uint64_t EvictFirstPolicy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// A barrier of `threads` threads of the block; ids 1 to 15.
__device__ __forceinline__ void NamedBarrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same without waiting.
__device__ __forceinline__ void ArriveAtBarrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace qwend::cuda
