// What a block of the persistent step has in shared memory, and the small things that its phases
// have in common.
#pragma once

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/persistent_step.h"

namespace qwend::cuda {

constexpr int kCachedPages = 64;  // of a rank's share of a sequence
constexpr int kConsumerBarrier = 1;
constexpr int kHalfWarps = kStepThreads / kRanks;
constexpr int kStreamSpan = kMaxStepHidden / kRanks / (kStepThreads / 8);  // rows of eight lanes
constexpr int kBlocksOfWarp = kMaxStepHidden / kBoxK / kStepWarps;         // of 64 elements of K

// Tiles between two barriers.
template <int B>
constexpr int kTilesAtOnce = B == 1 ? 8 : 4;

// Slots of the ring: what the activations of B rows leave room for.
template <int B>
constexpr int kRingSlots = B == 1   ? 5
                           : B == 2 ? 4
                                    : 3;

template <int B>
struct StepShared {
  static constexpr int kPartStride = kTilesAtOnce<B> * kTile * B + 1;
  static constexpr int kAttentionStride = kMaxPassHeads * (256 + 4);
  static constexpr int kHalfParts = kStepWarps * kPartStride;
  static constexpr int kPartFloats =
      2 * kHalfParts > kStepWarps* kAttentionStride ? 2 * kHalfParts : kStepWarps* kAttentionStride;

  // Activations as columns of a product: the high and the low bf16 half of each row.
  alignas(16) bf16 stream[2 * B][kMaxStepHidden + 8];  // normed but for the norm's own factor
  bf16 slice[2 * B][kMaxSliceK + 8];                   // what the mixer or the MLP made
  alignas(16) float mixer[B][kMixerFloats];
  float squares[B][kRanks];                                // each rank's part of the norm's sum
  alignas(16) float gates[B][kRanks][2 * kMaxValueHeads];  // linear: b and a, each rank's part
  float2 softmax[B][kMaxPassHeads][kRanks];                // each rank's largest score and sum
  float attended[B][kMaxPassHeads][16][kRanks];            // this rank's dimensions, from each rank
  alignas(16) float own[B][64];                       // this rank's values, and what gates them
  float head_squares[B][kMaxValueHeads][2 * kRanks];  // four columns each
  alignas(16) float head_norms[2][256];               // queries', keys'
  uint32_t token[kRanks];
  float cos[B][kMaxRotaryHalf], sin[B][kMaxRotaryHalf];
  int page_rows[B][kCachedPages];  // where this rank's part of the sequence begins in the pages
  int position[B], slot[B];
  float parts[kPartFloats];  // of products, in two halves by turns; of attention
  alignas(16) bf16 outgoing[2 * B][kMaxStepHidden / kRanks];  // this rank's part of the stream
  alignas(16) float own_squares[B][kStepWarps];
  unsigned long long keys[B][kStepWarps];
  uint64_t full[kRingSlots<B>], empty[kRingSlots<B>];
  uint64_t stream_ready, slice_ready, mixer_ready, merge_ready;
};

// The high and the low halves of two neighbours, each pair as one word.
struct SplitPair {
  uint32_t high, low;
};
__device__ __forceinline__ SplitPair SplitTwo(float a, float b) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
  const __nv_bfloat162 l = __floats2bfloat162_rn(a - __low2float(h), b - __high2float(h));
  return {*reinterpret_cast<const uint32_t*>(&h), *reinterpret_cast<const uint32_t*>(&l)};
}

// The logistic function and SiLU by the hardware's exponential and quotient, some 1e-6 exact.
__device__ __forceinline__ float QuickSigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}
__device__ __forceinline__ float QuickSilu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// The first row of a page of row b's sequence in the pages of a layer, seen as rows of a head.
__device__ __forceinline__ int PageRow(const StepArguments& a, int b, int kv_head, int page) {
  return (a.block_table[b * a.block_table_stride + page] * a.shape.kv_heads + kv_head) *
         kPageTokens;
}

// Two half warps have a pair each: the lower gets both high words, the upper both low ones.
__device__ __forceinline__ uint2 JoinPairs(const SplitPair& mine, bool upper) {
  const uint32_t other = __shfl_xor_sync(kFullMask, upper ? mine.high : mine.low, kRanks);
  return upper ? make_uint2(other, mine.low) : make_uint2(mine.high, other);
}

// Over the 16 lanes of a half warp; every lane gets the sum.
__device__ __forceinline__ float HalfSum(float v, unsigned mask) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) v += __shfl_xor_sync(mask, v, offset);
  return v;
}
__device__ __forceinline__ float HalfMax(float v, unsigned mask) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(mask, v, offset));
  return v;
}

}  // namespace qwend::cuda
