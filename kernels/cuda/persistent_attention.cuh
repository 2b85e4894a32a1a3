// The persistent step's attention layers: projection, head norms, rotation, cache write and
// attention, in one cluster from its query heads' projections to their part of the output. A
// cluster's query heads share one key-value head, whose keys and values every cluster that needs
// them projects for itself. Each rank attends to its part of the sequence (persistent_scores.cuh);
// then each merges its part of the dimensions.
#pragma once

#include "kernels/cuda/persistent_scores.cuh"

namespace qwend::cuda {

template <int B, int D>
struct AttentionMixer {
  StepBlock<B>& block;
  const ClusterShare& share;
  const StepShape& shape = block.a.shape;
  StepShared<B>& shared = block.shared;

  static constexpr int kRows = D / kRanks;  // of a head, this rank's
  static constexpr int kHeads = kMaxPassHeads;
  const int query_rows = (shape.gated ? 2 : 1) * kRows;  // of a head: its queries, then their gates
  const int rows = share.heads == 0 ? 0 : share.heads * query_rows + 2 * kRows;
  const int kv_head = share.first_head / shape.group;
  WarpAttention<B, D> warp{block, share};

  __device__ __forceinline__ SequencePart Part(int b) const { return shared.part[b]; }

  // The bias of a row of this rank's projection.
  __device__ __forceinline__ float BiasOf(const StepLayer& layer, int row) const {
    const int mine = block.rank * kRows, head = row / query_rows;
    if (head < share.heads)
      return layer.q_bias[(share.first_head + head) * D + mine + row - head * query_rows];
    const int i = row - share.heads * query_rows;
    return (i < kRows ? layer.k_bias : layer.v_bias)[kv_head * D + mine + i % kRows];
  }

  // What a warp has made of a head of a row of x waits in shared memory for its merger with that of
  // the other warps: as many heads at once as there is room for.
  static constexpr int kUnits =
      std::min(B * kHeads, StepShared<B>::kWarpValues / (kStepWarps * D));  // heads of rows
  static constexpr int kRowsAtOnce = std::max(kUnits / kHeads, 1);
  static constexpr bool kCoversMixer = kUnits * kStepWarps * D * sizeof(float) >
                                       sizeof(StepShared<B>::stream);
  static_assert(B % kRowsAtOnce == 0 && (!kCoversMixer || B == 1));

  // This rank's part of all sequences: each warp its positions, then their merger.
  __device__ __forceinline__ void AttendAll() {
    using Sums = typename WarpAttention<B, D>::Sums;
#pragma unroll 1
    for (int first = 0; first < B; first += kRowsAtOnce) {
      if constexpr (kUnits >= kHeads) {
#pragma unroll 1
        for (int b = first; b < first + kRowsAtOnce; ++b) {
          Sums sums;
          warp.Attend(b, sums);
          // What was merged before has been read; queries are in registers.
          if (kCoversMixer || (first > 0 && b == first)) block.Sync();
          warp.template PutSums<0, kHeads>((b - first) * kHeads, sums);
        }
        block.Sync();
        Spread<kHeads>(first, 0);
      } else {
        Sums sums;
        warp.Attend(first, sums);
        block.Sync();
        warp.template PutSums<0, 1>(0, sums);
        block.Sync();
        Spread<1>(first, 0);
        if (share.heads == 1) continue;
        block.Sync();
        warp.template PutSums<1, 1>(0, sums);
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
