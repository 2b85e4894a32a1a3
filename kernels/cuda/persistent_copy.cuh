// The persistent step's copying warp: everything that the block reads of weights, caches and
// states, in the order in which it is used, into the ring.
#pragma once

#include <climits>

#include "kernels/cuda/persistent_shared.cuh"

namespace qwend::cuda {

// The copying warp: requests in their order, each slot's first when the slot has been given back.
// All lanes go along; the first one does it.
template <int B, int D, int DK>
struct Copier {
  const StepArguments& a;
  StepShared<B>& shared;
  char* ring;
  const StepLayer* layers;
  const int lane = threadIdx.x % kWarp;
  // This warp alone feeds the block, and is one chain of instructions: addresses are worked out
  // once and kept from the compiler, which would do it again for every request.
  const uint32_t ring_at = Opaque(SharedAddress(ring));
  const uint32_t full_at = Opaque(SharedAddress(shared.full));
  const uint32_t empty_at = Opaque(SharedAddress(shared.empty));
  // Slots on their way at once; see kRingSlots.
  int in_flight = min(a.in_flight[blockIdx.x / kRanks], kMostInFlight<B>);
  int slot = -1, copied = -in_flight - 1;
  uint32_t parity = 1, copied_parity = 1;  // an untouched barrier passes for the phase before its
                                           // first
  uint32_t gates_parity = 1;
  bool has_inputs = false;

  __device__ __forceinline__ static uint32_t Opaque(uint32_t v) {
    asm volatile("" : "+r"(v));
    return v;
  }
  __device__ __forceinline__ static void Wait(uint32_t barrier, uint32_t phase) {
    Patience patience;
    while (!TryBarrier(barrier, phase)) patience.Try();
  }

  __device__ __forceinline__ void NextSlot(int bytes) {
    if (++slot == kRingSlots<B>) slot = 0;
    if (slot == 0) parity ^= 1;
    NextCopied();
    if (lane != 0) return;
    Wait(empty_at + slot * 8, parity ^ 1);
    if (copied >= 0) Wait(full_at + copied * 8, copied_parity);
    ArriveExpecting(full_at + slot * 8, bytes);
  }
  // The oldest slot on its way.
  __device__ __forceinline__ void NextCopied() {
    if (++copied == kRingSlots<B>) copied = 0;
    if (copied == 0) copied_parity ^= 1;
  }

  // A slot of keys in its first half and of values in its second: `count` positions of one row,
  // from `offset` on in the first of their pages.
  static constexpr int kPositions = kSlotPositions<B, D>;
  static constexpr int kPages = CeilDiv(kPositions, kPageTokens) + 1;
  static_assert(2 * kPages <= kWarp);
  struct CacheSlot {
    int count = 0, offset = 0;
    int page_row[kPages] = {};
  };
  // Where the slots of this step are, each lane one: the same in all layers. Worked out side by
  // side for as many as there are lanes, for the warp has no time for it between two requests.
  CacheSlot cache;
  int cache_slots = -1, first_located = -1;

  // Slot `which` of a layer as its row and its place among the row's.
  struct RowSlot {
    int row, place;
  };
  __device__ __forceinline__ RowSlot RowOf(int which) const {
#pragma unroll 1
    for (int first = 0; first < B; first += kTeams<B, D>) {
      const int rows = min(kTeams<B, D>, B - first);
      int least = INT_MAX, all = 0;
#pragma unroll 1
      for (int i = 0; i < rows; ++i) {
        const int slots = CachedSlots<B, D>(shared, first + i);
        least = min(least, slots);
        all += slots;
      }
      if (which >= all) {
        which -= all;
        continue;
      }
      if (which < least * rows) return {first + which % rows, which / rows};
      which -= least * rows;
#pragma unroll 1
      for (int place = least;; ++place) {
#pragma unroll 1
        for (int i = 0; i < rows; ++i) {
          if (CachedSlots<B, D>(shared, first + i) > place && which-- == 0)
            return {first + i, place};
        }
      }
    }
    return {0, 0};  // past the last one
  }
  __device__ __forceinline__ CacheSlot LocateSlot(int which) const {
    CacheSlot located;
    if (which >= cache_slots) return located;
    const int cluster = blockIdx.x / kRanks;
    const int kv_head = a.shares[0][cluster].first_head / a.shape.group;
    const RowSlot at = RowOf(which);
    const int begin = at.place * kPositions, first = shared.part[at.row].begin + begin;
    located.count = min(CachedPositions(shared, at.row) - begin, kPositions);
    located.offset = first % kPageTokens;
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int page = first / kPageTokens + i;
      if (page * kPageTokens < first + located.count)
        located.page_row[i] = PageRow(a, shared, at.row, kv_head, page);
    }
    return located;
  }

  // What the block attends to in a layer. Lanes copy a page's keys, or values, each.
  __device__ __forceinline__ void CopyCache(const StepLayer& layer) {
    if (cache_slots < 0) {
      cache_slots = 0;
#pragma unroll 1
      for (int b = 0; b < B; ++b) cache_slots += CachedSlots<B, D>(shared, b);
    }
    const bf16* const pages = lane % 2 == 0 ? layer.k_pages : layer.v_pages;
    const uint32_t to = ring_at + lane % 2 * (SlotBytes(B) / 2);
#pragma unroll 1
    for (int i = 0; i < cache_slots; ++i) {
      if (i / kWarp != first_located) {
        first_located = i / kWarp;
        cache = LocateSlot(first_located * kWarp + lane);
      }
      const int count = __shfl_sync(kFullMask, cache.count, i % kWarp);
      const int offset = __shfl_sync(kFullMask, cache.offset, i % kWarp);
      int row = 0;
#pragma unroll
      for (int page = 0; page < kPages; ++page) {
        const int page_row = __shfl_sync(kFullMask, cache.page_row[page], i % kWarp);
        if (lane / 2 == page) row = page_row;
      }
      NextSlot(count * D * 4);
      __syncwarp();
      const int page_begin = lane / 2 * kPageTokens - offset;  // from the slot's first position
      const int from = max(page_begin, 0), positions = min(count, page_begin + kPageTokens) - from;
      if (lane < 2 * kPages && positions > 0)
        BulkCopy(to + slot * SlotStride(B) + from * D * 2,
                 pages + static_cast<int64_t>(row + from - page_begin) * D, positions * D * 2,
                 full_at + slot * 8);
      if (B > 1 && lane == 0) CountUp(&shared.slots_asked);
      __syncwarp();
    }
  }

  // The states that the block works on in a layer, head by head, row by row.
  __device__ __forceinline__ void CopyState(const StepLayer& layer) {
    constexpr int kDim = DK == 0 ? 64 : DK, kBytes = kStateBytes<kDim, kDim>;
    const ClusterShare& share = a.shares[1][blockIdx.x / kRanks];
    const int heads = share.heads * a.shape.heads_per_key;
    const int rows_at_once = RowsOfStates<B>(heads, kBytes);
#pragma unroll 1
    for (int first = 0; first < B; first += rows_at_once) {
      const int items = min(rows_at_once, B - first) * heads;
      NextSlot(items * kBytes);
      if (lane != 0) continue;
#pragma unroll 1
      for (int i = 0; i < items; ++i)
        CopyTile(SharedAddress(ring + slot * SlotStride(B) + i * kBytes), a.maps + layer.state_map,
                 static_cast<int>(ClusterRank()) * kDim / kRanks,
                 StateRow(a, shared.slot[first + i / heads], share, i % heads) * kDim,
                 shared.full + slot);
    }
  }

  // What a layer needs besides weights, as soon as the step's inputs are there.
  __device__ __forceinline__ void CopyMarked(int map, const StepLayer& layer) {
    if (!has_inputs) NamedBarrier(kInputsBarrier, kStepBlock);
    has_inputs = true;
    if (DK != 0 && map == kCopyState) {
      CopyState(layer);
    } else if (map == kCopyCache) {
      CopyCache(layer);
    } else {  // kCopyHead
#pragma unroll 1
      for (; in_flight > SlotsInFlight(B); --in_flight) {
        NextCopied();
        if (lane == 0 && copied >= 0) Wait(full_at + copied * 8, copied_parity);
      }
    }
    __syncwarp();
  }

  // Each lane has one of 32 commands, and one of the 32 after them, whose maps are asked for one by
  // one.
  __device__ __forceinline__ void Run() {
    const uint64_t policy = EvictFirstPolicy();
    const int end = a.first_command[blockIdx.x + 1];
    int at = a.first_command[blockIdx.x], last_map = -1;
    const auto load = [&](int i) {
      return i < end ? reinterpret_cast<const int4*>(a.commands)[i] : make_int4(0, -1, 0, 0);
    };
    const auto prefetch = [&](int map) {
      if (lane == 0 && map >= 0 && map != last_map) PrefetchMap(a.maps + map);
      last_map = map;
    };
    int4 next = load(at + lane);
#pragma unroll 1
    for (int i = 0; i < kWarp; ++i) prefetch(__shfl_sync(kFullMask, next.y, i) >> 16);
#pragma unroll 1
    for (; at < end; at += kWarp) {
      const int4 mine = next;
      next = load(at + kWarp + lane);
#pragma unroll 1
      for (int i = 0; i < min(kWarp, end - at); ++i) {
        const int row = __shfl_sync(kFullMask, mine.x, i);
        const int place = __shfl_sync(kFullMask, mine.y, i), map = place >> 16;
        const int offset = __shfl_sync(kFullMask, mine.z, i);
        const int bytes = __shfl_sync(kFullMask, mine.w, i);
        if (map < 0) {
          CopyMarked(map, layers[row]);
        } else if (offset < kToGates) {
          if (bytes > 0) NextSlot(bytes);
          if (lane == 0)
            CopyBox(ring_at + slot * SlotStride(B) + offset, a.maps + map, row, place & 0xffff,
                    full_at + slot * 8, policy);
        } else if (lane == 0) {
          const uint32_t gates_full = SharedAddress(&shared.gates_full);
          if (bytes > 0) {
            Wait(SharedAddress(&shared.gates_empty), gates_parity);
            ArriveExpecting(gates_full, bytes);
          }
          CopyBox(SharedAddress(shared.gate_weights) + offset - kToGates, a.maps + map, row,
                  place & 0xffff, gates_full, policy);
        }
        if (offset >= kToGates && bytes > 0) gates_parity ^= 1;
        __syncwarp();
        // The first of the commands after these only when they have long been loaded.
        if (i >= kWarp / 2) {
          prefetch(__shfl_sync(kFullMask, next.y, 2 * i - kWarp) >> 16);
          prefetch(__shfl_sync(kFullMask, next.y, 2 * i - kWarp + 1) >> 16);
        }
      }
    }
  }
};

}  // namespace qwend::cuda
