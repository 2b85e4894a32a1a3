// What one warp of the persistent step makes of its positions of a sequence: scores of the
// cluster's query heads, their exponentials, and the values weighed by them.
#pragma once

#include "kernels/cuda/persistent_heads.cuh"

namespace qwend::cuda {

template <int B, int D>
struct WarpAttention {
  StepBlock<B>& block;
  const ClusterShare& share;
  StepShared<B>& shared = block.shared;

  using Lanes = HeadLanes<D>;
  static constexpr int kPer = Lanes::kPer, kLanes = Lanes::kLanes, kSub = Lanes::kSub;
  static constexpr int kAtOnce = 4;  // positions of a lane
  static constexpr int kHeads = kMaxPassHeads;
  const int sub = Lanes::Sub(), at = Lanes::At();

  // A lane's positions of a chunk are every kSpan-th from its first; where a warp has lanes for it,
  // two chunks are attended to at once. After their exchange each lane has one score, for head
  // my_head, and does the exponential for the warp.
  static constexpr int kSpan = kStepWarps * kSub, kChunk = kSpan * kAtOnce;
  static_assert(kChunk == kSlotPositions<B, D> * kSlotsOfChunk<B>);
  static_assert(kHeads * kAtOnce * kChunksAtOnce<D> <= kLanes);
  const int my_head = block.lane % kLanes / (kLanes / kHeads);
  template <int Chunks>
  static constexpr int kLanesEach = kLanes / (kHeads * kAtOnce * Chunks);  // with the same score

  // From the lane, among those with the same positions, that has position `i` of a head.
  template <int Chunks>
  __device__ __forceinline__ float FromScore(float v, int head, int i) const {
    return __shfl_sync(kFullMask, v,
                       sub * kLanes + (head * kAtOnce * Chunks + i) * kLanesEach<Chunks>);
  }
  // Over the warp's lanes of one head whose numbers differ in the bits from First on.
  template <int First, typename Combine>
  __device__ __forceinline__ static float OverHead(float v, Combine combine) {
#pragma unroll
    for (int offset = First; offset < kLanes / kHeads; offset *= 2)
      v = combine(v, __shfl_xor_sync(kFullMask, v, offset));
#pragma unroll
    for (int offset = kLanes; offset < kWarp; offset *= 2)
      v = combine(v, __shfl_xor_sync(kFullMask, v, offset));
    return v;
  }

  // The warp's largest score of this lane's head and the sum of exponentials of the lane's own
  // scores; the values of all heads.
  struct Sums {
    float largest = -INFINITY, sum = 0.0f;
    float values[kHeads][kPer] = {};
  };

  // The next `count` positions. A chunk's slots are there when the first of them is.
  template <int Chunks>
  __device__ __forceinline__ void AttendTo(int count, const float (&q)[kHeads][kPer],
                                           Sums& sums) const {
    constexpr int kPositions = kAtOnce * Chunks, kSlots = kSlotsOfChunk<B> * Chunks;
    constexpr int kOfSlot = kPositions / kSlots;
    int slots[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (i > 0 && i * kSlotPositions<B, D> >= count) {
        slots[i] = slots[i - 1];
        continue;
      }
      if (i % kSlotsOfChunk<B> == 0) block.AwaitSlot();
      slots[i] = block.slot;
      block.SkipSlots(1);
    }
    const int first = block.warp * kSub + sub;
    float scores[kHeads * kPositions];
    Packed<kPer> values[kPositions];
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int last = count - 1 - i / kOfSlot * kSlotPositions<B, D>;  // of the slot
      const int position = max(min(first + i % kOfSlot * kSpan, last), 0);
      const bf16* key =
          reinterpret_cast<const bf16*>(block.ring + slots[i / kOfSlot] * SlotStride(B)) +
          position * D + at;
      Packed<kPer> k;
      k.Load(key);
      values[i].Load(key + SlotBytes(B) / 4);
      float keys[kPer];
#pragma unroll
      for (int j = 0; j < kPer; ++j) keys[j] = k[j];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) scores[h * kPositions + i] = Dot(q[h], keys);
    }
    // All is in registers.
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (i == 0 || i * kSlotPositions<B, D> < count) block.ReleaseSlot(slots[i], 1);
    }
    float score = SumHalves<kHeads * kPositions, kLanes / 2, 1>(scores, block.lane);
    const int mine = block.lane % kLanes / kLanesEach<Chunks> % kPositions;
    if (first + mine * kSpan >= count) score = -INFINITY;
    const float most =
        fmaxf(sums.largest,
              OverHead<kLanesEach<Chunks>>(score, [](float a, float b) { return fmaxf(a, b); }));
    const bool none = most == -INFINITY;
    // Scores that are no numbers must not vanish.
    const float p = none ? (score == -INFINITY ? 0.0f : score) : __expf(score - most);
    const float old = none ? 0.0f : __expf(sums.largest - most);
    sums.largest = most;
    sums.sum = fmaf(sums.sum, old, block.lane % kLanesEach<Chunks> == 0 ? p : 0.0f);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float rescale = FromScore<Chunks>(old, h, 0);
#pragma unroll
      for (float& v : sums.values[h]) v *= rescale;
    }
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      float weights[kHeads];
#pragma unroll
      for (int h = 0; h < kHeads; ++h) weights[h] = FromScore<Chunks>(p, h, i);
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const float value = values[i][j];
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
          sums.values[h][j] = fmaf(weights[h], value, sums.values[h][j]);
      }
    }
  }

  // The newest position, which is not in the pages yet.
  __device__ __forceinline__ void AttendToNewest(int b, const float (&q)[kHeads][kPer],
                                                 Sums& sums) const {
    float key[kPer], value[kPer], mine = 0.0f;
    LoadFloats(key, shared.mixer[b] + share.heads * D + at);
    LoadFloats(value, shared.mixer[b] + (share.heads + 1) * D + at);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float score = Lanes::Sum(Dot(q[h], key));
      if (my_head == h) mine = score;
    }
    const float most = fmaxf(sums.largest, mine), p = __expf(mine - most),
                old = __expf(sums.largest - most);
    const bool first = sub == 0;
    sums.largest = most;
    sums.sum = fmaf(sums.sum, old, block.lane % (kLanes / kHeads) == 0 && first ? p : 0.0f);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float rescale = FromScore<1>(old, h, 0), weight = FromScore<1>(p, h, 0);
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const float before = __fmul_rn(sums.values[h][j], rescale);
        sums.values[h][j] = first ? fmaf(weight, value[j], before) : before;
      }
    }
  }

  // This warp's positions of this rank's part of row b's sequence.
  __device__ __forceinline__ void Attend(int b, Sums& sums) {
    const SequencePart part = shared.part[b];
    const int positions = min(part.end, shared.position[b]) - part.begin;
    float q[kHeads][kPer];
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      LoadFloats(q[h], shared.mixer[b] + min(h, share.heads - 1) * D + at);
    int left = positions;
    if constexpr (kChunksAtOnce<D> == 2) {
#pragma unroll 1
      for (; left > kChunk; left -= 2 * kChunk) AttendTo<2>(min(left, 2 * kChunk), q, sums);
    }
#pragma unroll 1
    for (; left > 0; left -= kChunk) AttendTo<1>(min(left, kChunk), q, sums);
    if (part.owner == block.rank && block.warp == kStepWarps - 1) AttendToNewest(b, q, sums);
    __syncwarp();
  }

  // The warp's sums of `Count` heads from `First` on, to places from `unit` on.
  template <int First, int Count>
  __device__ __forceinline__ void PutSums(int unit, Sums& sums) const {
    constexpr int kValues = Count * kPer, kLeft = kValues / kSub;  // a lane's, of all; at the end
    static_assert(kLeft % 4 == 0);
    float values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = sums.values[First + i / kPer][i % kPer];
    SumHalves<kValues, kWarp / 2, kLanes>(values, block.lane);
#pragma unroll
    for (int i = 0; i < kLeft; i += 4) {
      const int value = sub * kLeft + i, head = unit + value / kPer;
      float* to = shared.warp_values + (head * kStepWarps + block.warp) * D + at + value % kPer;
      *reinterpret_cast<float4*>(to) =
          make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
    const float sum = OverHead<1>(sums.sum, [](float a, float b) { return a + b; });
    const int head = my_head - First;
    if (block.lane % (kLanes / kHeads) == 0 && sub == 0 && head >= 0 && head < Count)
      shared.attention.warp_softmax[unit + head][block.warp] = make_float2(sums.largest, sum);
    __syncwarp();
  }
};

}  // namespace qwend::cuda
