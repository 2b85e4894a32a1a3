// What the blocks of a cluster say to each other: stores into a neighbour's shared memory that
// count as bytes of a barrier there, and boxes of a matrix copied by the tensor engine (compute
// capability 9.0 on).
#pragma once

#include <cuda.h>

#include "kernels/cuda/bulk_copy.cuh"
#include "kernels/cuda/sum_word.cuh"

namespace qwend::cuda {

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Where block `rank` of the cluster has what this block has at `p`.
__device__ __forceinline__ uint32_t Mapped(const void* p, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(SharedAddress(p)), "r"(rank));
  return address;
}

// Stores into another block's shared memory; the barrier there hears of the bytes.
__device__ __forceinline__ void Send(uint32_t to, uint32_t barrier, uint32_t a) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(a),
      "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void Send(uint32_t to, uint32_t barrier, uint32_t a, uint32_t b) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "r"(a), "r"(b), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void Send(uint32_t to, uint32_t barrier, uint4 v) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

// Every thread of every block of the cluster arrives, and waits before it arrives again.
__device__ __forceinline__ void ArriveAtCluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void AwaitCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// One box of a matrix seen as [K / 64, rows, 64] into shared memory.
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, int row, int k_block,
                                        uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_"
      "hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(row), "r"(k_block), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of a matrix of floats, and back. What has been written there before a store needs
// FenceForCopies by its writers; the shared memory is free again after AwaitStoresRead by the
// thread that stored.
__device__ __forceinline__ void CopyTile(uint32_t to, const CUtensorMap* map, int column, int row,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(SharedAddress(barrier))
      : "memory");
}
__device__ __forceinline__ void StoreTile(const CUtensorMap* map, int column, int row,
                                          uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(column), "r"(row), "r"(from)
      : "memory");
}
__device__ __forceinline__ void AwaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void FenceForCopies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Adds to a sum_word.cuh's word. `v`: contributions, less those withdrawn, plus one for having
// added.
__device__ __forceinline__ void AddToWord(unsigned long long* to, unsigned long long v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(v) : "memory");
}
// Two neighbours, each read as one.
__device__ __forceinline__ void ReadWords(unsigned long long& first, unsigned long long& second,
                                          const unsigned long long* from) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(from)
               : "memory");
}

__device__ __forceinline__ uint64_t NanosecondClock() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// What a wait that has lasted long asks now and then: one that never ends is a fault, so that the
// launch fails and its caller hears of it, where it would spin for ever.
[[maybe_unused]] static __device__ __noinline__ uint64_t GiveUpAfterAWhile(uint64_t since) {
#ifdef QWEND_RACECHECK
  constexpr uint64_t kNanoseconds = 600'000'000'000;
#else
  constexpr uint64_t kNanoseconds = 20'000'000'000;
#endif
  const uint64_t now = NanosecondClock();
  if (since == 0) return now;
  if (now - since > kNanoseconds) __trap();
  return since;
}

class Patience {
 public:
  __device__ __forceinline__ void Try() {
    if (++tries_ % 4096 == 0) since_ = GiveUpAfterAWhile(since_);
  }

 private:
  uint32_t tries_ = 0;
  uint64_t since_ = 0;
};

// A count in shared memory that one thread raises. Whoever reads it finds the barriers in shared
// memory as that thread had left them, for shared memory serves a warp's requests in their order; a
// release would make the warp wait for all that it has asked for.
__device__ __forceinline__ void CountUp(uint32_t* count) {
  asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], 1;" ::"r"(SharedAddress(count))
               : "memory");
}
__device__ __forceinline__ uint32_t ReadCount(uint32_t* count) {
  uint32_t v;
#ifdef QWEND_RACECHECK  // which knows only atomics
  asm volatile("atom.relaxed.cta.shared::cta.or.b32 %0, [%1], 0;"
#else
  asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];"
#endif
               : "=r"(v)
               : "r"(SharedAddress(count))
               : "memory");
  return v;
}

// Copies a few bytes to shared memory, for this thread to read once they have been awaited:
// AwaitFetches leaves out those asked for between the last two CommitFetches.
template <int Bytes>
__device__ __forceinline__ void FetchAsync(void* to, const void* from) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(SharedAddress(to)), "l"(from),
               "n"(Bytes)
               : "memory");
}
__device__ __forceinline__ void CommitFetches() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
__device__ __forceinline__ void AwaitFetches() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// Waits for bytes from the cluster. They land in this block's shared memory, which no cache holds,
// so the wait acquires in the block's scope. (By the letter of PTX the sender's release in the
// cluster's scope asks for the same here; that would also empty the L1 cache at every exchange.)
__device__ __forceinline__ void WaitForCluster(uint64_t* barrier, uint32_t parity) {
  Patience patience;
  while (!TryBarrier(barrier, parity)) patience.Try();
  __syncwarp();
}

}  // namespace qwend::cuda
