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
  const int rows = share.heads == 0 ? 0 : share.heads * query_rows + 2 * kRows;
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
    const SequencePart part = Part(b);
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

  // What a warp has made of a head of a row of x waits in shared memory for its merger with that of
  // the other warps: as many heads at once as there is room for.
  static constexpr int kUnits =
      std::min(B * kHeads, StepShared<B>::kWarpValues / (kStepWarps * D));  // heads of rows
  static constexpr int kRowsAtOnce = std::max(kUnits / kHeads, 1);
  static constexpr bool kCoversMixer = kUnits * kStepWarps * D * sizeof(float) >
                                       sizeof(StepShared<B>::stream);
  static_assert(B % kRowsAtOnce == 0 && (!kCoversMixer || B == 1));

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

  // This rank's part of all sequences: each warp its positions, then their merger.
  __device__ __forceinline__ void AttendAll() {
#pragma unroll 1
    for (int first = 0; first < B; first += kRowsAtOnce) {
      if constexpr (kUnits >= kHeads) {
#pragma unroll 1
        for (int b = first; b < first + kRowsAtOnce; ++b) {
          Sums sums;
          Attend(b, sums);
          // What was merged before has been read; queries are in registers.
          if (kCoversMixer || (first > 0 && b == first)) block.Sync();
          PutSums<0, kHeads>((b - first) * kHeads, sums);
        }
        block.Sync();
        Spread<kHeads>(first, 0);
      } else {
        Sums sums;
        Attend(first, sums);
        block.Sync();
        PutSums<0, 1>(0, sums);
        block.Sync();
        Spread<1>(first, 0);
        if (share.heads == 1) continue;
        block.Sync();
        PutSums<1, 1>(0, sums);
        block.Sync();
        Spread<1>(first, 1);
      }
    }
  }
  static_assert(kHeads == 2);

  // The warps' sums of `Count` heads from `head` on of kRowsAtOnce rows from `row` on, merged, to
  // the ranks that have their dimensions. A thread has as many of them as share the work out.
  template <int Count>
  __device__ __forceinline__ void Spread(int row, int head) const {
    constexpr int kAll = kRowsAtOnce * Count * D, kFair = kAll / kStepThreads;
    constexpr int kEach = kFair >= 4 ? 4 : kFair >= 2 ? 2 : 1, kThreads = D / kEach;  // of a head
    static_assert(kThreads >= kRanks && kRows % kEach == 0);
#pragma unroll 1
    for (int item = threadIdx.x; item < kAll / kEach; item += kStepThreads) {
      const int unit = item / kThreads, b = row + unit / Count, h = head + unit % Count;
      if (h >= share.heads) continue;
      const int dim = item % kThreads * kEach;
      float largest[kStepWarps], sums[kStepWarps], most = -INFINITY, values[kEach] = {};
#pragma unroll
      for (int i = 0; i < kStepWarps; i += 2) {
        const float4 two =
            *reinterpret_cast<const float4*>(&shared.attention.warp_softmax[unit][i]);
        largest[i] = two.x;
        sums[i] = two.y;
        largest[i + 1] = two.z;
        sums[i + 1] = two.w;
        most = fmaxf(most, fmaxf(two.x, two.z));
      }
#pragma unroll
      for (int i = 0; i < kStepWarps; ++i) {
        const float factor = largest[i] == -INFINITY ? 0.0f : __expf(largest[i] - most);
        sums[i] = __fmul_rn(factor, sums[i]);
        const float* from = shared.warp_values + (unit * kStepWarps + i) * D + dim;
        float v[kEach];
        if constexpr (kEach == 4) {
          LoadFloats(v, from);
        } else {
#pragma unroll
          for (int j = 0; j < kEach; ++j) v[j] = from[j];
        }
#pragma unroll
        for (int j = 0; j < kEach; ++j) values[j] = fmaf(factor, v[j], values[j]);
      }
      const uint32_t to_rank = Mapped(&shared, dim / kRows) - SharedAddress(&shared);
      const uint32_t to = SharedAddress(&shared.attended[b][h][block.rank][dim % kRows]) + to_rank,
                     ready = SharedAddress(&shared.merge_ready) + to_rank;
      if constexpr (kEach == 4) {
        Send(to, ready,
             make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                        __float_as_uint(values[2]), __float_as_uint(values[3])));
      } else if constexpr (kEach == 2) {
        Send(to, ready, __float_as_uint(values[0]), __float_as_uint(values[1]));
      } else {
        Send(to, ready, __float_as_uint(values[0]));
      }
      if (item % kThreads < kRanks) {
        const float sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
                          ((sums[4] + sums[5]) + (sums[6] + sums[7]));
        Send(block.ToLane(&shared.attention.softmax[b][h][block.rank]),
             block.ToLane(&shared.merge_ready), __float_as_uint(most), __float_as_uint(sum));
      }
    }
    __syncwarp();
  }
  static_assert(kStepWarps == 8);

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
      float x = 0.0f;
      if (head < share.heads) {
#pragma unroll
        for (int r = 0; r < kRanks; ++r)
          x = fmaf(shared.attention.softmax[b][head][r].x, shared.attended[b][head][r][i], x);
        if (shape.gated)
          x = __fmul_rn(x, QuickSigmoid(shared.kept[b][head * query_rows + kRows + i]));
      }
      __syncwarp();  // what goes out takes the gates' place
      if (head < share.heads) {
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
  __device__ __forceinline__ void TakeProducts(const StepLayer& layer, const float* parts,
                                               int count) const {
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
  }

  // This rank's part of the queries to every rank, of key and value to the rank that has the newest
  // position.
  __device__ __forceinline__ void SendHeads() const {
    constexpr int kVectors = kRows / 4;
    const uint32_t ready = block.ToRank(&shared.mixer_ready);
    const int of_row = (share.heads + 2) * kVectors;
#pragma unroll 1
    for (int i = block.half_lane; i < B * of_row; i += kRanks) {
      const int b = i % B, vector = i / B, head = vector / kVectors, at = vector % kVectors * 4;
      const int from = head < share.heads ? head * query_rows
                                          : share.heads * query_rows + (head - share.heads) * kRows;
      if (head >= share.heads && Part(b).owner != block.half_warp) continue;
      Send(block.ToRank(&shared.mixer[b][head * D + block.rank * kRows + at]), ready,
           *reinterpret_cast<const uint4*>(&shared.kept[b][from + at]));
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
    AttendAll();
    block.Await(&shared.merge_ready, block.merge_parity, B * share.heads * (D * 4 + kRanks * 8));
    block.Sync();  // nobody reads the warps' values any more, so the stream may come
    Merge();
    block.Await(&shared.slice_ready, block.slice_parity, B * share.heads * D * 4);
  }
};

}  // namespace qwend::cuda
