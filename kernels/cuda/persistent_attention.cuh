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

  // What a warp has of its tile: rows of the products are the queries' high and low halves by
  // turns, so lane (g, t) has scores of head g / 2 % 2 (lanes from 16 on the same again), and of
  // its values two dimensions in each eight of the warp's 64. The largest score and the sum are of
  // the head, the sum over this lane's positions alone.
  static constexpr int kDimWarps = D / 64;  // that share a tile
  static_assert(kSlotPositions<D> == kCacheTiles<D> * kCacheTile);
  const int tile = block.warp / kDimWarps, dims = block.warp % kDimWarps * 64;
  const int g = block.lane / 4, t = block.lane % 4;
  const bool low = g % 2 != 0;
  struct Sums {
    float largest = -INFINITY, sum = 0.0f;
    float values[8][4] = {};
  };
  using Queries = uint32_t[D / 16][2];

  __device__ __forceinline__ void LoadQueries(Queries& q, int b) const {
    const float* from = shared.mixer[b] + min(g / 2 % 2, share.heads - 1) * D + 2 * t;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float2 v = *reinterpret_cast<const float2*>(from + k * 16 + j * 8);
        const SplitPair s = SplitTwo(v.x, v.y);
        q[k][j] = low ? s.low : s.high;
      }
    }
  }

  // Eight rows of a tile for each of four matrices, where this lane's begins.
  __device__ __forceinline__ static const char* TileRow(const char* block64, int row, int chunk) {
    return block64 + row * 128 + (chunk ^ row % 8) * 16;
  }

  // The warp's tile of a slot with `count` positions.
  __device__ __forceinline__ void AttendTo(const char* slot, int count, const Queries& q,
                                           Sums& sums) const {
    constexpr int kTileBytes = kCacheTile * D * 2, kBlockBytes = kCacheTile * 128;
    const int valid = count - tile * kCacheTile;
    if (valid <= 0) return;
    const char* keys = slot + tile * kTileBytes;
    const int matrix = block.lane / 8, row = block.lane % 8;
    // Scores of eight positions each, in two chains.
    float c[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t r[4];
      LoadMatrix4(
          r, TileRow(keys + k / 4 * kBlockBytes, row + matrix / 2 * 8, k % 4 * 2 + matrix % 2));
      const uint32_t query[4] = {q[k][0], 0, q[k][1], 0};
      MmaBf16(c[0][k % 2], query, r[0], r[1]);
      MmaBf16(c[1][k % 2], query, r[2], r[3]);
    }
    float p[2][2], most = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float score = c[i][0][j] + c[i][1][j];
        score += __shfl_xor_sync(kFullMask, score, 4);  // high and low
        p[i][j] = i * 8 + 2 * t + j < valid ? score : -INFINITY;
        most = fmaxf(most, p[i][j]);
      }
    }
    most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 2));
    most = fmaxf(most, sums.largest);
    const bool none = most == -INFINITY;
    const float old = none ? 0.0f : __expf(sums.largest - most);
    // Scores that are no numbers must not vanish.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
        p[i][j] = none ? (p[i][j] == -INFINITY ? 0.0f : p[i][j]) : __expf(p[i][j] - most);
    }
    sums.largest = most;
    sums.sum = fmaf(sums.sum, old, (p[0][0] + p[0][1]) + (p[1][0] + p[1][1]));
    const SplitPair first = SplitTwo(p[0][0], p[0][1]), second = SplitTwo(p[1][0], p[1][1]);
    const uint32_t weights[4] = {low ? first.low : first.high, 0, low ? second.low : second.high,
                                 0};
    // Of positions that are not there the values are anything, so their weight of zero is not
    // enough.
    const auto there = [&](int position) {
      return (position < valid ? 0xffffu : 0u) | (position + 1 < valid ? 0xffff0000u : 0u);
    };
    const uint32_t first_there = there(2 * t), second_there = there(8 + 2 * t);
    const char* values = keys + kSlotBytes / 2 + dims / 64 * kBlockBytes;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t r[4];
      LoadMatrix4Transposed(r, TileRow(values, row + matrix % 2 * 8, n + matrix / 2));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums.values[n + i][0] *= old;
        sums.values[n + i][1] *= old;
        MmaBf16(sums.values[n + i], weights, r[2 * i] & first_there, r[2 * i + 1] & second_there);
      }
    }
  }

  // This rank's part of row b's sequence.
  __device__ __forceinline__ void Attend(int b) {
    const SequencePart part = Part(b);
    const int positions = min(part.end, shared.position[b]) - part.begin;
    Sums sums;
    {
      Queries q;
      LoadQueries(q, b);
#pragma unroll 1
      for (int first = 0; first < positions; first += kSlotPositions<D>) {
        AttendTo(block.AwaitSlot(), min(positions - first, kSlotPositions<D>), q, sums);
        block.ReleaseSlot(block.slot, 1);
        block.SkipSlots(1);
      }
    }
    // The newest position, by one warp.
    const bool newest = part.owner == block.rank && block.warp == kStepWarps - 1;
    float value[kPer], score[kHeads];
    if (newest) {
      float key[kPer], query[kPer];
      LoadFloats(key, shared.mixer[b] + share.heads * D + at);
      LoadFloats(value, shared.mixer[b] + (share.heads + 1) * D + at);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        LoadFloats(query, shared.mixer[b] + min(h, share.heads - 1) * D + at);
        score[h] = Lanes::Sum(Dot(query, key));
      }
    }
    static_assert(sizeof(shared.part_values) <=
                  sizeof(shared.stream) + (B == 1 ? sizeof(shared.mixer) : 0));
    block.Sync();  // queries have been read, and the parts of the row before
    PutPart(sums);
    if (newest && sub == 0) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        StoreFloats(PartValues(h, kCacheTiles<D>) + at, value);
        shared.attention.part_softmax[h][kCacheTiles<D>] = make_float2(score[h], 1.0f);
      }
    }
    block.Sync();
    Spread(b, part.owner == block.rank ? kCacheParts<D> : kCacheTiles<D>);
  }

  __device__ __forceinline__ float* PartValues(int head, int part) const {
    return shared.part_values + (head * kCacheParts<D> + part) * D;
  }

  // A warp's sums. Of a head's two rows one keeps half of the values and gives the other half away.
  __device__ __forceinline__ void PutPart(Sums& sums) {
    float* to = PartValues(g / 2 % 2, tile) + dims + (low ? 32 : 0) + 2 * t;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float v[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float upper = sums.values[n + 4][j], lower = sums.values[n][j];
        v[j] = (low ? upper : lower) + __shfl_xor_sync(kFullMask, low ? lower : upper, 4);
      }
      if (g < 4) *reinterpret_cast<float2*>(to + n * 8) = make_float2(v[0], v[1]);
    }
    sums.sum += __shfl_xor_sync(kFullMask, sums.sum, 1);
    sums.sum += __shfl_xor_sync(kFullMask, sums.sum, 2);
    if (g < 4 && !low && t == 0 && dims == 0)
      shared.attention.part_softmax[g / 2][tile] = make_float2(sums.largest, sums.sum);
  }

  // The parts of every head merged, to the ranks that have their dimensions.
  __device__ __forceinline__ void Spread(int b, int parts) {
    constexpr int kWarps = D / kWarp;  // of a head
#pragma unroll 1
    for (int item = block.warp; item < share.heads * kWarps; item += kStepWarps) {
      const int head = item / kWarps, dim = item % kWarps * kWarp + block.lane;
      float largest[kCacheParts<D>], sum = 0.0f, value = 0.0f, most = -INFINITY;
#pragma unroll
      for (int i = 0; i < kCacheParts<D>; ++i) {
        largest[i] = i < parts ? shared.attention.part_softmax[head][i].x : -INFINITY;
        most = fmaxf(most, largest[i]);
      }
      const float* values = PartValues(head, 0) + dim;
#pragma unroll
      for (int i = 0; i < kCacheParts<D>; ++i) {
        if (i >= parts) continue;
        const float factor = largest[i] == -INFINITY ? 0.0f : __expf(largest[i] - most);
        sum = fmaf(factor, shared.attention.part_softmax[head][i].y, sum);
        value = fmaf(factor, values[i * D], value);
      }
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
    if (!shape.head_norms || threadIdx.x >= 2 * D / 4) return;
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
    block.Sync();  // nobody reads the parts any more, so the stream may come
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
