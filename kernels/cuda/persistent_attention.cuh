// The persistent step's attention layers: projection, head norms, rotation, cache write and
// attention, in one cluster from its query heads' projections to their part of the output. A
// cluster's query heads share one key-value head, whose keys and values every cluster that needs
// them projects for itself. Each rank attends to its part of the sequence; then each merges its
// part of the dimensions.
#pragma once

#include "kernels/cuda/persistent_heads.cuh"

namespace qwend::cuda {

template <int B, int D>
struct AttentionMixer {
  StepBlock<B>& block;
  const ClusterShare& share;
  const StepShape& shape = block.a.shape;
  StepShared<B>& shared = block.shared;

  using Lanes = HeadLanes<D>;
  static constexpr int kPer = Lanes::kPer, kLanes = Lanes::kLanes, kSub = Lanes::kSub;
  static constexpr int kRows = D / kRanks;  // of a head, this rank's
  static constexpr int kAtOnce = 4;         // positions of a lane
  static constexpr int kHeads = kMaxPassHeads;
  const int query_rows = (shape.gated ? 2 : 1) * kRows;  // of a head: its queries, then their gates
  const int rows = share.heads * query_rows + 2 * kRows;
  const int kv_head = share.first_head / shape.group;
  const int sub = Lanes::Sub(), at = Lanes::At();

  __device__ __forceinline__ SequencePart Part(int b) const { return shared.part[b]; }

  // The bias of a row of this rank's projection.
  __device__ __forceinline__ float BiasOf(const StepLayer& layer, int row) const {
    const int mine = block.rank * kRows, head = row / query_rows;
    if (head < share.heads)
      return layer.q_bias[(share.first_head + head) * D + mine + row - head * query_rows];
    const int i = row - share.heads * query_rows;
    return (i < kRows ? layer.k_bias : layer.v_bias)[kv_head * D + mine + i % kRows];
  }

  // This lane's positions of a slot are every kSpan-th from its first. After their exchange each
  // lane has one score, of position my_position for one head, and does the exponential for the
  // warp.
  static constexpr int kSpan = kStepWarps * kSub;
  static_assert(kSlotPositions<D> == kSpan * kAtOnce);
  static constexpr int kScores = kHeads * kAtOnce, kLanesEach = kLanes / kScores;
  const int my_position = block.lane % kLanes / kLanesEach % kAtOnce;

  // From the lane, among those with the same positions, that has a score.
  __device__ __forceinline__ float FromScore(float v, int score) const {
    return __shfl_sync(kFullMask, v, sub * kLanes + score * kLanesEach);
  }
  // Over the scores of one head.
  template <typename Combine>
  __device__ __forceinline__ static float OverPositions(float v, Combine combine) {
#pragma unroll
    for (int offset = kLanesEach; offset < kAtOnce * kLanesEach; offset *= 2)
      v = combine(v, __shfl_xor_sync(kFullMask, v, offset));
    return v;
  }

  // Largest score of this lane's head and the sum of exponentials of its own scores; the values of
  // all heads.
  struct Sums {
    float largest = -INFINITY, sum = 0.0f;
    float values[kHeads][kPer] = {};
  };

  __device__ __forceinline__ void AttendTo(const char* slot, int count,
                                           const float (&q)[kHeads][kPer], Sums& sums) const {
    const int first = block.warp * kSub + sub;
    float scores[kScores], values[kAtOnce][kPer];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int position = min(first + i * kSpan, count - 1);
      const auto* key = reinterpret_cast<const bf16*>(slot) + position * D + at;
      Packed<kPer> k, v;
      k.Load(key);
      v.Load(key + kSlotBytes / 4);
      float keys[kPer];
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        keys[j] = k[j];
        values[i][j] = v[j];
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) scores[h * kAtOnce + i] = Dot(q[h], keys);
    }
    float score = SumHalves<kScores, kLanes / 2, 1>(scores, block.lane);
    if (first + my_position * kSpan >= count) score = -INFINITY;
    const float most =
        fmaxf(sums.largest, OverPositions(score, [](float a, float b) { return fmaxf(a, b); }));
    const bool none = most == -INFINITY;
    // Scores that are no numbers must not vanish.
    const float p = none ? (score == -INFINITY ? 0.0f : score) : __expf(score - most);
    const float old = none ? 0.0f : __expf(sums.largest - most);
    sums.largest = most;
    sums.sum = fmaf(sums.sum, old, p);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float rescale = FromScore(old, h * kAtOnce);
#pragma unroll
      for (float& v : sums.values[h]) v *= rescale;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float weight = FromScore(p, h * kAtOnce + i);
#pragma unroll
        for (int j = 0; j < kPer; ++j)
          sums.values[h][j] = fmaf(weight, values[i][j], sums.values[h][j]);
      }
    }
  }

  // This rank's part of row b's sequence.
  __device__ __forceinline__ void Attend(int b) {
    const SequencePart part = Part(b);
    const int positions = min(part.end, shared.position[b]) - part.begin;
    float q[kHeads][kPer];
    Sums of_lanes;
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      LoadFloats(q[h], shared.mixer[b] + min(h, share.heads - 1) * D + at);
#pragma unroll 1
    for (int first = 0; first < positions; first += kSlotPositions<D>) {
      AttendTo(block.AwaitSlot(), min(positions - first, kSlotPositions<D>), q, of_lanes);
      block.ReleaseSlot(block.slot, 1);
      block.SkipSlots(1);
    }
    Softmax<kPer> sums[kHeads];
    of_lanes.sum = OverPositions(of_lanes.sum, [](float a, float b) { return a + b; });
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      sums[h].largest = FromScore(of_lanes.largest, h * kAtOnce);
      sums[h].sum = FromScore(of_lanes.sum, h * kAtOnce);
#pragma unroll
      for (int j = 0; j < kPer; ++j) sums[h].values[j] = of_lanes.values[h][j];
    }
    if (part.owner == block.rank && block.warp == kStepWarps - 1) {
      float key[kPer], value[kPer];
      LoadFloats(key, shared.mixer[b] + share.heads * D + at);
      LoadFloats(value, shared.mixer[b] + (share.heads + 1) * D + at);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float score = Lanes::Sum(Dot(q[h], key));
        if (sub != 0) continue;
        Rescale(sums[h], fmaxf(sums[h].largest, score));
        AddPosition(sums[h], score, value);
      }
      __syncwarp();
    }
    // Each warp's sums of some heads, then their merger.
    static_assert(sizeof(shared.warp_values) <=
                  sizeof(shared.stream) + (B == 1 ? sizeof(shared.mixer) : 0));
#pragma unroll
    for (int h = 0; h < kHeads; h += kHeadsAtOnce) {
      if (h >= share.heads) continue;
      block.Sync();  // queries are in registers; what was merged before has been read
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; ++i) PutPartial(i, sums[h + i]);
      block.Sync();
      Spread(b, h);
    }
  }
  static constexpr int kHeadsAtOnce = D < 256 ? kHeads : StepShared<B>::kHeadsAtOnce;

  // A warp's sums of one head; positions side by side are added up first.
  __device__ __forceinline__ void PutPartial(int i, Softmax<kPer>& sums) {
#pragma unroll
    for (int offset = kWarp / 2; offset >= kLanes; offset /= 2) {
      const float most = fmaxf(sums.largest, __shfl_xor_sync(kFullMask, sums.largest, offset));
      if (most != -INFINITY) Rescale(sums, most);  // the same in both lanes
      __syncwarp();
      sums.sum += __shfl_xor_sync(kFullMask, sums.sum, offset);
#pragma unroll
      for (float& v : sums.values) v += __shfl_xor_sync(kFullMask, v, offset);
    }
    if (sub != 0) return;
    StoreFloats(shared.warp_values + (i * kStepWarps + block.warp) * D + at, sums.values);
    if (at == 0) shared.attention.warp_softmax[i][block.warp] = make_float2(sums.largest, sums.sum);
  }

  // The warps' sums of heads from `first` on, merged, to the ranks that have their dimensions.
  __device__ __forceinline__ void Spread(int b, int first) {
    constexpr int kWarps = D / kWarp;  // of a head
#pragma unroll 1
    for (int item = block.warp; item < kHeadsAtOnce * kWarps; item += kStepWarps) {
      const int local = item / kWarps, head = first + local;
      if (head >= share.heads) return;
      const int dim = item % kWarps * kWarp + block.lane;
      const float2 partial = shared.attention.warp_softmax[local][block.lane % kStepWarps];
      float most = partial.x;
#pragma unroll
      for (int offset = kStepWarps / 2; offset > 0; offset /= 2)
        most = fmaxf(most, __shfl_xor_sync(kFullMask, most, offset));
      const float factor = partial.x == -INFINITY ? 0.0f : __expf(partial.x - most);
      float sum = __fmul_rn(factor, partial.y), value = 0.0f;
#pragma unroll
      for (int offset = kStepWarps / 2; offset > 0; offset /= 2)
        sum += __shfl_xor_sync(kFullMask, sum, offset);
      const float* values = shared.warp_values + local * kStepWarps * D + dim;
#pragma unroll
      for (int i = 0; i < kStepWarps; ++i)
        value = fmaf(__shfl_sync(kFullMask, factor, i), values[i * D], value);
      const uint32_t to_rank = Mapped(&shared, dim / kRows) - SharedAddress(&shared);
      Send(SharedAddress(&shared.attention.attended[b][head][block.rank][dim % kRows]) + to_rank,
           SharedAddress(&shared.merge_ready) + to_rank, __float_as_uint(value));
      if (dim < kRanks)
        Send(block.ToLane(&shared.attention.softmax[b][head][block.rank]),
             block.ToLane(&shared.merge_ready), __float_as_uint(most), __float_as_uint(sum));
    }
  }

  // This rank's dimensions of every head, gated, to every rank. A warp has a row of x.
  __device__ __forceinline__ void Merge() {
    constexpr int kVector = kRows < 8 ? kRows : 8;
    const int head = block.lane / kRows, i = block.lane % kRows, column = block.lane / kRanks;
    const uint32_t ready = block.ToLane(&shared.slice_ready);
#pragma unroll 1
    for (int b = block.warp; b < B; b += kStepWarps) {
      // Each rank's weight, by the half warp of its head.
      {
        float2& part = shared.attention.softmax[b][block.lane / kRanks][block.lane % kRanks];
        float most = part.x;
#pragma unroll
        for (int offset = kRanks / 2; offset > 0; offset /= 2)
          most = fmaxf(most, __shfl_xor_sync(kFullMask, most, offset));
        const float factor = part.x == -INFINITY ? 0.0f : __expf(part.x - most);
        float sum = __fmul_rn(factor, part.y);
#pragma unroll
        for (int offset = kRanks / 2; offset > 0; offset /= 2)
          sum += __shfl_xor_sync(kFullMask, sum, offset);
        part.x = __fdividef(factor, sum);
      }
      __syncwarp();
      if (head < share.heads) {
        float x = 0.0f;
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
          x = fmaf(shared.attention.softmax[b][head][r].x, shared.attention.attended[b][head][r][i],
                   x);
        if (shape.gated)
          x = __fmul_rn(x, QuickSigmoid(shared.kept[b][head * query_rows + kRows + i]));
        const Halves v(x);
        shared.outgoing[2 * b][block.lane] = v.high;
        shared.outgoing[2 * b + 1][block.lane] = v.low;
      }
      __syncwarp();
#pragma unroll 1
      for (int j = 0; j < share.heads * kRows; j += kVector) {
        const bf16* from = &shared.outgoing[2 * b + column][j];
        const uint32_t to = block.ToLane(
            &shared.slice[2 * b + column][j / kRows * D + block.rank * kRows + j % kRows]);
        if constexpr (kVector == 8) {
          Send(to, ready, *reinterpret_cast<const uint4*>(from));
        } else {
          const uint2 v = *reinterpret_cast<const uint2*>(from);
          Send(to, ready, v.x, v.y);
        }
      }
    }
  }

  // Asks for the heads' norms.
  __device__ __forceinline__ void Fetch(const StepLayer& layer) const {
    if (share.heads == 0 || !shape.head_norms || threadIdx.x >= 2 * D / 4) return;
    const int norm = threadIdx.x / (D / 4), at = threadIdx.x % (D / 4) * 4;
    FetchAsync<16>(&shared.attention.norms[norm][at],
                   (norm == 0 ? layer.q_norm : layer.k_norm) + at);
  }

  // Queries to every rank, keys and values to the rank that has the newest position; gates stay.
  __device__ __forceinline__ void Project(const StepLayer& layer) {
    block.AwaitStream();
    if (share.heads == 0) return;
    block.template MultiplyStream<kTilesAtOnce>(
        rows, BoxShift(BoxRows(D)), [] {},
        [&](const float* parts, int, int count) {
          const int b = threadIdx.x % B;
          const float factor = shared.norm_factor[b];
#pragma unroll 1
          for (int i = threadIdx.x; i < count * B; i += kStepThreads) {
            float v = __fmul_rn(block.SumParts(parts, i), factor);
            if (layer.q_bias != nullptr) v += BiasOf(layer, i / B);
            shared.kept[b][i / B] = v;
          }
          AwaitFetches();
          block.Sync();
          SendHeads();
        });
  }

  // This rank's part of the queries to every rank, of key and value to the rank that has the newest
  // position.
  __device__ __forceinline__ void SendHeads() const {
    constexpr int kVectors = kRows / 4;
    const uint32_t ready = block.ToRank(&shared.mixer_ready);
#pragma unroll 1
    for (int b = 0; b < B; ++b) {
      const int heads = share.heads + (Part(b).owner == block.half_warp ? 2 : 0);
#pragma unroll 1
      for (int i = block.half_lane; i < heads * kVectors; i += kRanks) {
        const int head = i / kVectors, at = i % kVectors * 4;
        const int from = head < share.heads
                             ? head * query_rows
                             : share.heads * query_rows + (head - share.heads) * kRows;
        Send(block.ToRank(&shared.mixer[b][head * D + block.rank * kRows + at]), ready,
             *reinterpret_cast<const uint4*>(&shared.kept[b][from + at]));
      }
    }
  }

  __device__ __forceinline__ void Mix(const StepLayer& layer) {
    if (share.heads == 0) return;
    int bytes = B * share.heads * D * 4;
#pragma unroll
    for (int b = 0; b < B; ++b) bytes += Part(b).owner == block.rank ? 2 * D * 4 : 0;
    block.Await(&shared.mixer_ready, block.mixer_parity, bytes);
    HeadPreparer<B, D>{block, share}.Prepare(layer);
    block.Sync();
#pragma unroll 1
    for (int b = 0; b < B; ++b) Attend(b);
    block.Await(&shared.merge_ready, block.merge_parity, B * share.heads * (D * 4 + kRanks * 8));
    block.Sync();  // nobody reads the warps' values any more, so the stream may come
    Merge();
    block.Await(&shared.slice_ready, block.slice_parity, B * share.heads * D * 4);
  }

  __device__ __forceinline__ void Finish() const {}

  __device__ __forceinline__ void Output() {
    if (share.heads == 0) return block.PublishNothing();
    block.template MultiplySlice<2>(share.heads * D / kBoxK, [](int, int) { return 1.0f; });
  }
};

}  // namespace qwend::cuda
