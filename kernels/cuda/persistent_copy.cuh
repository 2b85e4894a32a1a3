// The persistent step's copying warp: everything that the block reads of weights, caches and
// states, in the order in which it is used, into the ring.
#pragma once

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
  // Slots on their way at once; see kRingSlots.
  int in_flight = min(a.in_flight[blockIdx.x / kRanks], kRingSlots<B> - kGroups);
  int slot = -1, copied = -in_flight - 1;
  uint32_t parity = 1, copied_parity = 1;  // an untouched barrier passes for the phase before its
                                           // first
  uint32_t gates_parity = 1;
  bool has_inputs = false;

  __device__ __forceinline__ void NextSlot(int bytes) {
    if (++slot == kRingSlots<B>) slot = 0;
    if (slot == 0) parity ^= 1;
    if (lane == 0) {
      Patience patience;
      while (!TryBarrier(shared.empty + slot, parity ^ 1)) patience.Try();
    }
    AwaitCopied();
    if (lane == 0) ArriveExpecting(shared.full + slot, bytes);
  }
  // The oldest slot on its way has arrived.
  __device__ __forceinline__ void AwaitCopied() {
    if (++copied == kRingSlots<B>) copied = 0;
    if (copied == 0) copied_parity ^= 1;
    if (lane != 0) return;
    Patience patience;
    while (copied >= 0 && !TryBarrier(shared.full + copied, copied_parity)) patience.Try();
  }

  // `count` positions of one row's keys or values, page by page.
  __device__ __forceinline__ void CopyPositions(const bf16* pages, int b, int kv_head, int begin,
                                                int first, int count, char* to) {
#pragma unroll 1
    for (int end = first + count; first < end;) {
      const int next = min(end, (first / kPageTokens + 1) * kPageTokens);
      BulkCopy(to, pages + CacheRow(a, shared, b, kv_head, begin, first) * D,
               (next - first) * D * 2, shared.full + slot);
      to += (next - first) * D * 2;
      first = next;
    }
  }

  // What the block attends to in a layer: slots of keys in the first half and values in the second.
  __device__ __forceinline__ void CopyCache(const StepLayer& layer) {
    const int cluster = blockIdx.x / kRanks;
    const int kv_head = a.shares[0][cluster].first_head / a.shape.group;
#pragma unroll 1
    for (int b = 0; b < B; ++b) {
      const SequencePart part = shared.part[b];
      const int end = min(part.end, shared.position[b]);
#pragma unroll 1
      for (int first = part.begin; first < end; first += kSlotPositions<D>) {
        const int count = min(end - first, kSlotPositions<D>);
        NextSlot(count * D * 4);
        if (lane != 0) continue;
        char* to = ring + slot * kSlotStride;
        CopyPositions(layer.k_pages, b, kv_head, part.begin, first, count, to);
        CopyPositions(layer.v_pages, b, kv_head, part.begin, first, count, to + kSlotBytes / 2);
      }
    }
  }

  // The states that the block works on in a layer, head by head, row by row.
  __device__ __forceinline__ void CopyState(const StepLayer& layer) {
    constexpr int kDim = DK == 0 ? 64 : DK, kBytes = kStateBytes<kDim, kDim>;
    const ClusterShare& share = a.shares[1][blockIdx.x / kRanks];
    const int heads = share.heads * a.shape.heads_per_key;
    const int rows_at_once = RowsOfStates(heads, kBytes);
#pragma unroll 1
    for (int first = 0; first < B; first += rows_at_once) {
      const int items = min(rows_at_once, B - first) * heads;
      NextSlot(items * kBytes);
      if (lane != 0) continue;
#pragma unroll 1
      for (int i = 0; i < items; ++i)
        CopyTile(SharedAddress(ring + slot * kSlotStride + i * kBytes), a.maps + layer.state_map,
                 static_cast<int>(ClusterRank()) * kDim / kRanks,
                 StateRow(a, shared.slot[first + i / heads], share, i % heads) * kDim,
                 shared.full + slot);
    }
  }

  __device__ __forceinline__ void Run() {
    const uint64_t policy = EvictFirstPolicy();
    const int end = a.first_command[blockIdx.x + 1];
    int at = a.first_command[blockIdx.x];
    const auto load = [&](int i) {
      int4 c = make_int4(0, 0, 0, 0);
      if (i < end) {
        c = reinterpret_cast<const int4*>(a.commands)[i];
        if (c.y >> 16 >= 0) PrefetchMap(a.maps + (c.y >> 16));
      }
      return c;
    };
#pragma unroll 1
    for (int4 next = load(at + lane); at < end; at += kWarp) {
      const int4 mine = next;
      next = load(at + kWarp + lane);
#pragma unroll 1
      for (int i = 0; i < min(kWarp, end - at); ++i) {
        const int row = __shfl_sync(kFullMask, mine.x, i);
        const int place = __shfl_sync(kFullMask, mine.y, i), map = place >> 16;
        const int offset = __shfl_sync(kFullMask, mine.z, i);
        const int bytes = __shfl_sync(kFullMask, mine.w, i);
        if (map == kCopyHead) {
#pragma unroll 1
          for (; in_flight > kSlotsInFlight; --in_flight) AwaitCopied();
          continue;
        }
        if (map < 0) {
          Patience patience;
          while (!has_inputs && !TryBarrier(&shared.inputs_ready, 0)) patience.Try();
          has_inputs = true;
          if (DK != 0 && map == kCopyState) {
            CopyState(layers[row]);
          } else {
            CopyCache(layers[row]);
          }
          __syncwarp();
          continue;
        }
        const bool gates = offset >= kToGates;
        if (gates && bytes > 0) {
          Patience patience;
          while (!TryBarrier(&shared.gates_empty, gates_parity)) patience.Try();
          gates_parity ^= 1;
          if (lane == 0) ArriveExpecting(&shared.gates_full, bytes);
        } else if (bytes > 0) {
          NextSlot(bytes);
        }
        if (lane == 0)
          CopyBox(gates ? SharedAddress(shared.gate_weights) + offset - kToGates
                        : SharedAddress(ring + slot * kSlotStride + offset),
                  a.maps + map, row, place & 0xffff,
                  gates ? &shared.gates_full : shared.full + slot, policy);
      }
    }
  }
};

}  // namespace qwend::cuda
