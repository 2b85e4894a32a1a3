// The persistent step's attention layers: projection, head norms, rotation, cache write and
// attention, in one cluster from its query heads' projections to their part of the output. A
// cluster's query heads share one key-value head, whose keys and values every cluster that needs
// them projects for itself. Each rank attends to its part of the sequence; then each merges its
// part of the dimensions.
#pragma once

#include "kernels/cuda/attention_head.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/persistent_block.cuh"

namespace qwend::cuda {

template <int B, int D>
struct AttentionMixer {
  StepBlock<B>& block;
  const ClusterShare& share;
  const StepShape& shape = block.a.shape;
  StepShared<B>& shared = block.shared;

  static constexpr int kRows = D / kRanks;               // of a head, this rank's
  static constexpr int kPer = D / kWarp;                 // elements of a head, a lane's
  static constexpr int kAtOnce = 4;                      // positions of a warp
  const int query_rows = (shape.gated ? 2 : 1) * kRows;  // of a head: its queries, then their gates
  const int rows = share.heads * query_rows + 2 * kRows;
  const int kv_head = share.first_head / shape.group;
  const int kv_at = share.heads * D;  // where keys, then values lie behind the queries

  // A rank's part of a sequence of `length` positions, and who has the last of them.
  struct Part {
    int begin, end, owner;
  };
  __device__ __forceinline__ Part PartOf(int b) const {
    const int last = shared.position[b], each = CeilDiv(last + 1, kRanks);
    return {block.rank * each, min((block.rank + 1) * each, last + 1), last / each};
  }

  // What two neighbouring rows of this rank's projection are. The same in all layers.
  enum class Role { kNone, kQuery, kGate, kKey, kValue };
  struct Place {
    Role role = Role::kNone;
    int to = 0;    // in a row's part of `mixer`, of `own` for gates
    int bias = 0;  // where the bias begins
  };
  __device__ __forceinline__ Place Locate(int row) const {
    Place p;
    if (row >= rows) return p;
    const int head = row / query_rows, mine = block.rank * kRows;
    if (head < share.heads) {
      const int i = row - head * query_rows;
      p.role = i < kRows ? Role::kQuery : Role::kGate;
      p.to = i < kRows ? head * D + mine + i : head * kRows + i - kRows;
      p.bias = (share.first_head + head) * D + mine + i;
    } else {
      const int i = row - share.heads * query_rows;
      p.role = i < kRows ? Role::kKey : Role::kValue;
      p.to = kv_at + (i < kRows ? 0 : D) + mine + i % kRows;
      p.bias = kv_head * D + mine + i % kRows;
    }
    return p;
  }

  // One pair of sums: queries to every rank, keys and values to the rank that has the newest
  // position, gates kept.
  __device__ __forceinline__ void Finish(const StepLayer& layer, const float* parts, int local,
                                         int b, const Place& p) {
    const float factor = block.Inverse(b);
    const float2 sums = block.SumPair(parts, local, b);
    const float* bias = p.role == Role::kQuery   ? layer.q_bias
                        : p.role == Role::kKey   ? layer.k_bias
                        : p.role == Role::kValue ? layer.v_bias
                                                 : nullptr;
    const float x = fmaf(sums.x, factor, bias != nullptr ? bias[p.bias] : 0.0f);
    const float y = fmaf(sums.y, factor, bias != nullptr ? bias[p.bias + 1] : 0.0f);
    const int only = p.role == Role::kGate ? block.rank : PartOf(b).owner;
    if (p.role != Role::kQuery && block.half_lane != only) return;
    const float* to = p.role == Role::kGate ? &shared.own[b][p.to] : &shared.mixer[b][p.to];
    Send(block.Peer(to), block.Peer(&shared.mixer_ready), __float_as_uint(x), __float_as_uint(y));
  }

  // Which row of the pages, seen as [pages * kv_heads * 64, D], a position of this rank's part is.
  __device__ __forceinline__ int64_t CacheRow(int b, int begin, int position) const {
    const int index = position / kPageTokens - begin / kPageTokens;
    const int first = index < kCachedPages ? shared.page_rows[b][index]
                                           : PageRow(block.a, b, kv_head, position / kPageTokens);
    return first + position % kPageTokens;
  }

  // Keys and values of up to kAtOnce cached positions, every kStepWarps-th from `first`.
  struct Cached {
    Packed<kPer> k[kAtOnce], v[kAtOnce];
  };
  __device__ __forceinline__ void Load(const StepLayer& layer, int b, int begin, int end, int first,
                                       Cached& c) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int position = first + i * kStepWarps;
      if (position >= end) continue;
      const int64_t at = CacheRow(b, begin, position) * D + block.lane * kPer;
      c.k[i].Load(layer.k_pages + at);
      c.v[i].Load(layer.v_pages + at);
    }
  }

  // Norm and rotation of a head whose elements lane * kPer and on are this lane's.
  __device__ __forceinline__ void Prepare(float (&x)[kPer], const float* weights, int b) const {
    if (shape.head_norms) {
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < kPer; ++i) square = fmaf(x[i], x[i], square);
      const float inverse = rsqrtf(WarpSum(square) / D + shape.head_norm_eps);
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[i] *= inverse * weights[block.lane * kPer + i];
    }
    const int half_lanes = shape.rotary_half / kPer;  // a power of two
    const int angle = (block.lane & (half_lanes - 1)) * kPer;
    const bool rotates = block.lane < 2 * half_lanes, lower = block.lane < half_lanes;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float other = __shfl_xor_sync(kFullMask, x[i], half_lanes);
      const float sin = shared.sin[b][angle + i];
      if (rotates) x[i] = fmaf(x[i], shared.cos[b][angle + i], other * (lower ? -sin : sin));
    }
  }

  // Each head once for the block, in place: queries normed, rotated and scaled; the newest key and
  // value as the cache keeps them, by the rank that has their position. The first cluster of a
  // group writes the cache.
  __device__ __forceinline__ void PrepareHeads(const StepLayer& layer) const {
#pragma unroll 1
    for (int item = block.warp; item < B * (share.heads + 1); item += kStepWarps) {
      const int b = item % B, head = item / B;
      const bool query = head < share.heads;
      const Part part = PartOf(b);
      if (!query && part.owner != block.rank) continue;
      float* head_at = shared.mixer[b] + (query ? head * D : kv_at) + block.lane * kPer;
      float x[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[i] = head_at[i];
      Prepare(x, shared.head_norms[query ? 0 : 1], b);
      if (query) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) head_at[i] = x[i] * shape.attention_scale;
        continue;
      }
      Packed<kPer> k, v;
#pragma unroll
      for (int i = 0; i < kPer; i += 2) {
        const __nv_bfloat162 key = __floats2bfloat162_rn(x[i], x[i + 1]);
        const __nv_bfloat162 value = __floats2bfloat162_rn(head_at[D + i], head_at[D + i + 1]);
        k.pairs[i / 2] = *reinterpret_cast<const uint32_t*>(&key);
        v.pairs[i / 2] = *reinterpret_cast<const uint32_t*>(&value);
      }
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        head_at[i] = k[i];
        head_at[D + i] = v[i];
      }
      if (share.first_head % shape.group != 0) continue;
      const int64_t at = CacheRow(b, part.begin, shared.position[b]) * D + block.lane * kPer;
#pragma unroll
      for (int i = 0; i < kPer / 2; ++i) {
        reinterpret_cast<uint32_t*>(layer.k_pages + at)[i] = k.pairs[i];
        reinterpret_cast<uint32_t*>(layer.v_pages + at)[i] = v.pairs[i];
      }
    }
  }

  // This warp's positions of row b, for H of the cluster's heads; `cached` has the first of them.
  // While some are worked on, the next are on their way.
  template <int H>
  __device__ __forceinline__ void Attend(const StepLayer& layer, int b, int first_head,
                                         Softmax<kPer> (&sums)[H]) {
    float q[H][kPer];
#pragma unroll
    for (int h = 0; h < H; ++h) {
#pragma unroll
      for (int i = 0; i < kPer; ++i)
        q[h][i] = shared.mixer[b][(first_head + h) * D + block.lane * kPer + i];
    }
    const Part part = PartOf(b);
    const int newest = shared.position[b], end = min(part.end, newest);
    constexpr int kStride = kAtOnce * kStepWarps;
#pragma unroll 1
    for (int first = part.begin + block.warp; first < end; first += kStride) {
      Cached next;
      Load(layer, b, part.begin, end, first + kStride, next);
      float scores[H * kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float k[kPer];
#pragma unroll
        for (int j = 0; j < kPer; ++j) k[j] = cached.k[i][j];
#pragma unroll
        for (int h = 0; h < H; ++h) scores[h * kAtOnce + i] = Dot(q[h], k);
      }
#pragma unroll 1
      for (int offset = kWarp / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (float& score : scores) score += __shfl_xor_sync(kFullMask, score, offset);
      }
#pragma unroll
      for (int h = 0; h < H; ++h) {
        float most = sums[h].largest;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i * kStepWarps < end) most = fmaxf(most, scores[h * kAtOnce + i]);
        }
        Rescale(sums[h], most);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kStepWarps >= end) continue;
        float v[kPer];
#pragma unroll
        for (int j = 0; j < kPer; ++j) v[j] = cached.v[i][j];
#pragma unroll
        for (int h = 0; h < H; ++h) AddPosition(sums[h], scores[h * kAtOnce + i], v);
      }
      cached = next;
    }
    if (newest >= part.end || newest < part.begin ||
        (newest - part.begin) % kStepWarps != block.warp)
      return;
    const float* newest_key = shared.mixer[b] + kv_at + block.lane * kPer;
    float k[kPer], v[kPer];
#pragma unroll
    for (int j = 0; j < kPer; ++j) {
      k[j] = newest_key[j];
      v[j] = newest_key[D + j];
    }
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const float score = WarpSum(Dot(q[h], k));
      Rescale(sums[h], fmaxf(sums[h].largest, score));
      AddPosition(sums[h], score, v);
    }
  }

  // Merges the warps' sums of each head and sends each rank its dimensions of the result.
  template <int H>
  __device__ __forceinline__ void Spread(int b, int first_head, const Softmax<kPer> (&sums)[H]) {
    constexpr int kStride = D + 4;
    block.Sync();  // both halves of the parts have been read
#pragma unroll
    for (int h = 0; h < H; ++h) {
      float* mine = shared.parts + (h * kStepWarps + block.warp) * kStride;
      if (block.lane == 0) {
        mine[0] = sums[h].largest;
        mine[1] = sums[h].sum;
      }
#pragma unroll
      for (int i = 0; i < kPer; ++i) mine[4 + block.lane * kPer + i] = sums[h].values[i];
    }
    block.Sync();
    const int at = threadIdx.x;
    if (at >= D) return;
    const uint32_t peer = Mapped(&shared, at / kRows) - SharedAddress(&shared);
#pragma unroll 1
    for (int h = 0; h < H; ++h) {
      const float* parts = shared.parts + h * kStepWarps * kStride;
      float most = -INFINITY;
#pragma unroll
      for (int w = 0; w < kStepWarps; ++w) most = fmaxf(most, parts[w * kStride]);
      float sum = 0.0f, value = 0.0f;
#pragma unroll
      for (int w = 0; w < kStepWarps; ++w) {
        const float largest = parts[w * kStride];
        const float factor = largest == -INFINITY ? 0.0f : __expf(largest - most);
        sum = fmaf(factor, parts[w * kStride + 1], sum);
        value = fmaf(factor, parts[w * kStride + 4 + at], value);
      }
      const int head = first_head + h;
      Send(SharedAddress(&shared.attended[b][head][at % kRows][block.rank]) + peer,
           SharedAddress(&shared.merge_ready) + peer, __float_as_uint(value));
      if (at < kRanks)
        Send(block.Peer(&shared.softmax[b][head][block.rank]), block.Peer(&shared.merge_ready),
             __float_as_uint(most), __float_as_uint(sum));
    }
  }
  template <int H>
  __device__ __forceinline__ void AttendAndSpread(const StepLayer& layer, int b, int first_head) {
    Softmax<kPer> sums[H];
    Attend(layer, b, first_head, sums);
    Spread(b, first_head, sums);
  }

  // This rank's dimensions of every head, gated, to every rank.
  __device__ __forceinline__ void Merge() {
    const int pairs = share.heads * kRows / 2;  // of each row of x; two half warps have neighbours
    const bool upper = block.half_warp % 2 == 1;
#pragma unroll 1
    for (int pair = block.half_warp; pair < pairs * B; pair += kHalfWarps) {
      const int b = B == 1 ? 0 : pair / pairs, at = (pair - b * pairs) * 2;
      const int head = at / kRows, i = at % kRows;
      const float2 part = shared.softmax[b][head][block.half_lane];
      const float most = HalfMax(part.x, block.half_mask);
      const float factor = part.x == -INFINITY ? 0.0f : __expf(part.x - most);
      const float sum = HalfSum(factor * part.y, block.half_mask);
      float x =
          HalfSum(factor * shared.attended[b][head][i][block.half_lane], block.half_mask) / sum;
      float y =
          HalfSum(factor * shared.attended[b][head][i + 1][block.half_lane], block.half_mask) / sum;
      if (shape.gated) {
        x *= QuickSigmoid(shared.own[b][head * kRows + i]);
        y *= QuickSigmoid(shared.own[b][head * kRows + i + 1]);
      }
      const uint2 words = JoinPairs(SplitTwo(x, y), upper);
      const int k = head * D + block.rank * kRows + i - (upper ? 2 : 0);
      Send(block.Peer(&shared.slice[2 * b + (upper ? 1 : 0)][k]), block.Peer(&shared.slice_ready),
           words.x, words.y);
    }
  }

  // Asks for what a layer reads of earlier steps.
  __device__ __forceinline__ void Prefetch(const StepLayer& layer) const {
    if (share.heads == 0) return;
    // Of a long sequence the first part only: more would push itself out of L2 again.
    constexpr int kMostPositions = 512, kLineElements = 64, kLines = D / kLineElements;
#pragma unroll 1
    for (int b = 0; b < B; ++b) {
      const Part part = PartOf(b);
#pragma unroll 1
      for (int i = threadIdx.x; i < min(part.end - part.begin, kMostPositions) * kLines;
           i += kStepThreads) {
        const int64_t at =
            CacheRow(b, part.begin, part.begin + i / kLines) * D + i % kLines * kLineElements;
        PrefetchLine(layer.k_pages + at);
        PrefetchLine(layer.v_pages + at);
      }
    }
  }

  // One row of x has at most so many pairs for a half warp.
  static constexpr int kEarly = 4;
  Place places[kEarly] = {Locate(block.half_warp * 2), Locate((block.half_warp + kHalfWarps) * 2),
                          Locate((block.half_warp + 2 * kHalfWarps) * 2),
                          Locate((block.half_warp + 3 * kHalfWarps) * 2)};
  __device__ __forceinline__ void LoadFirst(const StepLayer& layer, int b) {
    const Part part = PartOf(b);
    const int end = share.heads > 0 ? min(part.end, shared.position[b]) : 0;
    cached = Cached{};
    Load(layer, b, part.begin, end, part.begin + block.warp, cached);
  }
  Cached cached;  // what this warp attends to first; asked for long before the queries are there

  __device__ __forceinline__ void Project(const StepLayer& layer) {
    LoadFirst(layer, 0);
    float q_norm = 0.0f, k_norm = 0.0f;
    if (shape.head_norms && threadIdx.x < D) {
      q_norm = shape.head_norm_offset + layer.q_norm[threadIdx.x];
      k_norm = shape.head_norm_offset + layer.k_norm[threadIdx.x];
    }
    block.AwaitStream();
    if (share.heads == 0) return;
    if (threadIdx.x < D) {
      shared.head_norms[0][threadIdx.x] = q_norm;
      shared.head_norms[1][threadIdx.x] = k_norm;
    }
    block.template MultiplyStream<4>(
        rows, [](const char*, const uint32_t(&)[kBlocksOfWarp][4][2]) {},
        [&](const float* parts, int first, int count) {
          if constexpr (B == 1) {
#pragma unroll
            for (int i = 0; i < kEarly; ++i) {
              const int pair = block.half_warp + i * kHalfWarps;
              if (pair < count / 2) Finish(layer, parts, pair * 2, 0, places[i]);
            }
          } else {
#pragma unroll 1
            for (int i = block.half_warp; i < count / 2 * B; i += kHalfWarps) {
              const int b = i / (count / 2), local = (i - b * (count / 2)) * 2;
              Finish(layer, parts, local, b, Locate(first + local));
            }
          }
        });
  }

  __device__ __forceinline__ void Mix(const StepLayer& layer) {
    if (share.heads == 0) return;
    int bytes = B * share.heads * (D * 4 + (shape.gated ? kRows * 4 : 0));
#pragma unroll
    for (int b = 0; b < B; ++b) bytes += PartOf(b).owner == block.rank ? 2 * D * 4 : 0;
    block.Await(&shared.mixer_ready, block.mixer_parity, bytes);
    PrepareHeads(layer);
    block.Sync();
#pragma unroll 1
    for (int b = 0; b < B; ++b) {
      if (b > 0) LoadFirst(layer, b);
      if constexpr (D <= 128) {
        if (share.heads == kMaxPassHeads) {
          AttendAndSpread<kMaxPassHeads>(layer, b, 0);
          continue;
        }
      }
      // Two larger heads at once would not fit in the registers.
#pragma unroll 1
      for (int head = 0; head < share.heads; ++head) {
        if (head > 0) LoadFirst(layer, b);
        AttendAndSpread<1>(layer, b, head);
      }
    }
    block.Await(&shared.merge_ready, block.merge_parity, B * share.heads * (D * 4 + kRanks * 8));
    Merge();
    block.Await(&shared.slice_ready, block.slice_parity, B * share.heads * D * 4);
  }

  __device__ __forceinline__ void Output() {
    if (share.heads == 0) return block.PublishNothing();
    block.MultiplySlice(share.heads * D / kBoxK, [](int, int) { return 1.0f; });
  }
};

}  // namespace qwend::cuda
