// The persistent step's attention layers: projection, head norms, rotation, cache write and
// attention, in one cluster from its query heads' projections to their part of the output. A
// cluster's query heads share one key-value head, whose keys and values every cluster that needs
// them projects for itself. Each rank attends to its part of the sequence, four warps to a head;
// then each rank merges its part of the dimensions.
#pragma once

#include "kernels/cuda/attention_head.cuh"
#include "kernels/cuda/persistent_block.cuh"

namespace qwend::cuda {

template <int B, int D>
struct AttentionMixer {
  StepBlock<B>& block;
  const ClusterShare& share;
  const StepShape& shape = block.a.shape;
  StepShared<B>& shared = block.shared;

  static constexpr int kRows = D / kRanks;        // of a head, this rank's
  static constexpr int kPer = 8;                  // elements of a head, a lane's
  static constexpr int kLanes = D / kPer;         // that have a head's vector
  static constexpr int kSub = kWarp / kLanes;     // positions side by side in a warp
  static constexpr int kAtOnce = 4;               // positions of a lane
  static constexpr int kSpan = kSplits * kSub;    // positions side by side for a head
  const int query_rows = (shape.gated ? 2 : 1) * kRows;  // of a head: its queries, then their gates
  const int rows = share.heads * query_rows + 2 * kRows;
  const int kv_head = share.first_head / shape.group;
  const int sub = block.lane / kLanes, at = block.lane % kLanes * kPer;
  const int split = block.warp % kSplits;

  // What a warp does in a round: one split of a head for a row of x.
  struct Item {
    int b, head;
    bool exists;
  };
  __device__ __forceinline__ Item ItemAt(int round) const {
    const int pair = round * kPairsAtOnce + block.warp / kSplits;
    return {pair % B, pair / B, pair < B * share.heads};
  }

  // A rank's part of a sequence, and who has its last position.
  struct Part {
    int begin, end, owner;
  };
  __device__ __forceinline__ Part PartOf(int b) const {
    const int last = shared.position[b], each = CeilDiv(last + 1, kRanks);
    return {block.rank * each, min((block.rank + 1) * each, last + 1), last / each};
  }

  // The bias of a row of this rank's projection.
  __device__ __forceinline__ float BiasOf(const StepLayer& layer, int row) const {
    const int mine = block.rank * kRows, head = row / query_rows;
    if (head < share.heads)
      return layer.q_bias[(share.first_head + head) * D + mine + row - head * query_rows];
    const int i = row - share.heads * query_rows;
    return (i < kRows ? layer.k_bias : layer.v_bias)[kv_head * D + mine + i % kRows];
  }

  // Which row of the pages, seen as [pages * kv_heads * 64, D], a position of this rank's part is.
  __device__ __forceinline__ int64_t CacheRow(int b, int begin, int position) const {
    const int index = position / kPageTokens - begin / kPageTokens;
    const int first = index < kCachedPages ? shared.page_rows[b][index]
                                           : PageRow(block.a, b, kv_head, position / kPageTokens);
    return first + position % kPageTokens;
  }

  // Keys and values of up to kAtOnce cached positions, every kSpan-th from `first`; zeros behind
  // the end.
  struct Cached {
    Packed<kPer> k[kAtOnce], v[kAtOnce];
  };
  __device__ __forceinline__ void Load(const StepLayer& layer, int b, int begin, int end, int first,
                                       Cached& c) const {
    c = Cached{};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int position = first + i * kSpan;
      if (position >= end) continue;
      const int64_t from = CacheRow(b, begin, position) * D + at;
      c.k[i].Load(Global(layer.k_pages) + from);
      c.v[i].Load(Global(layer.v_pages) + from);
    }
  }
  __device__ __forceinline__ int FirstOf(const Part& part) const {
    return part.begin + split + kSplits * sub;
  }
  __device__ __forceinline__ void LoadFirst(const StepLayer& layer, const Item& item) {
    cached = Cached{};
    if (!item.exists) return;
    const Part part = PartOf(item.b);
    Load(layer, item.b, part.begin, min(part.end, shared.position[item.b]), FirstOf(part), cached);
  }
  Cached cached;  // what this warp attends to next; asked for before the queries are there

  // Over the lanes that share a head's vector.
  __device__ __forceinline__ static float HeadSum(float v) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      v += __shfl_xor_sync(kFullMask, v, offset);
    return v;
  }

  __device__ __forceinline__ void LoadFloats(float (&x)[kPer], const float* from) const {
#pragma unroll
    for (int i = 0; i < kPer; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      x[i] = v.x;
      x[i + 1] = v.y;
      x[i + 2] = v.z;
      x[i + 3] = v.w;
    }
  }

  // This lane's part of head `head` of row b, normed and rotated.
  __device__ __forceinline__ void Prepare(float (&x)[kPer], int b, int head, bool query) const {
    LoadFloats(x, shared.mixer[b] + head * D + at);
    if (shape.head_norms) {
      float square = 0.0f, weight[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) square = fmaf(x[i], x[i], square);
      const float inverse = rsqrtf(HeadSum(square) / D + shape.head_norm_eps);
      LoadFloats(weight, shared.attention.norms[query ? 0 : 1] + at);
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[i] *= inverse * weight[i];
    }
    const int half = shape.rotary_half;  // kPer times a power of two
    float cos[kPer], sin[kPer];
    LoadFloats(cos, shared.cos[b] + (at & (half - 1)));
    LoadFloats(sin, shared.sin[b] + (at & (half - 1)));
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const float other = __shfl_xor_sync(kFullMask, x[i], half / kPer);
      if (at < 2 * half) x[i] = fmaf(x[i], cos[i], other * (at < half ? -sin[i] : sin[i]));
    }
  }

  // Positions with their scores, -inf where there is none, and values. Every lane of a head's
  // vector calls it with the same scores.
  template <int N>
  __device__ __forceinline__ static void Add(Softmax<kPer>& sums, const float (&scores)[N],
                                             const Packed<kPer> (&values)[N]) {
    float most = sums.largest;
#pragma unroll
    for (int i = 0; i < N; ++i) most = fmaxf(most, scores[i]);
    if (most == -INFINITY) return;
    Rescale(sums, most);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float v[kPer];
#pragma unroll
      for (int j = 0; j < kPer; ++j) v[j] = values[i][j];
      AddPosition(sums, scores[i], v);
    }
  }

  // This warp's part of an item. While some positions are worked on, the next are on their way.
  // The newest key and value come from the projection, as the cache will keep them; the first
  // cluster of a group writes them there.
  __device__ __forceinline__ void Attend(const StepLayer& layer, const Item& item,
                                         Softmax<kPer>& sums) {
    const int b = item.b, newest = shared.position[b];
    const Part part = PartOf(b);
    const int end = min(part.end, newest);
    float q[kPer];
    Prepare(q, b, item.head, true);
#pragma unroll
    for (int i = 0; i < kPer; ++i) q[i] *= shape.attention_scale;
    constexpr int kStride = kSpan * kAtOnce;
#pragma unroll 1
    for (int first = FirstOf(part); first - kSplits * sub < end; first += kStride) {
      Cached next;
      Load(layer, b, part.begin, end, first + kStride, next);
      float scores[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float k[kPer];
#pragma unroll
        for (int j = 0; j < kPer; ++j) k[j] = cached.k[i][j];
        scores[i] = Dot(q, k);
      }
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
        for (float& score : scores) score += __shfl_xor_sync(kFullMask, score, offset);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) scores[i] = first + i * kSpan < end ? scores[i] : -INFINITY;
      Add(sums, scores, cached.v);
      cached = next;
    }
    if (part.owner != block.rank || (newest - part.begin) % kSplits != split) return;
    float key[kPer], value[kPer];
    Prepare(key, b, share.heads, false);
    LoadFloats(value, shared.mixer[b] + (share.heads + 1) * D + at);
    Packed<kPer> k, v[1];
#pragma unroll
    for (int i = 0; i < kPer; i += 2) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(key[i], key[i + 1]);
      const __nv_bfloat162 two_values = __floats2bfloat162_rn(value[i], value[i + 1]);
      k.pairs[i / 2] = *reinterpret_cast<const uint32_t*>(&two);
      v[0].pairs[i / 2] = *reinterpret_cast<const uint32_t*>(&two_values);
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i) key[i] = k[i];
    const float score[1] = {HeadSum(Dot(q, key))};
    if (sub != 0) return;
    Add(sums, score, v);
    if (item.head != 0 || share.first_head % shape.group != 0) return;
    const int64_t to = CacheRow(b, part.begin, newest) * D + at;
    *reinterpret_cast<uint4*>(Global(layer.k_pages) + to) =
        make_uint4(k.pairs[0], k.pairs[1], k.pairs[2], k.pairs[3]);
    *reinterpret_cast<uint4*>(Global(layer.v_pages) + to) =
        make_uint4(v[0].pairs[0], v[0].pairs[1], v[0].pairs[2], v[0].pairs[3]);
  }

  // A round's sums, merged for each of its heads, to the ranks that have their dimensions.
  __device__ __forceinline__ void Spread(int round, const Softmax<kPer>& sums) {
    float* parts = shared.parts;
    float2* partials = shared.attention.partials[0];
    if (round > 0) block.Sync();  // the round before has been read
    float* mine = parts + block.warp * kPartialFloats + block.lane * kPer;
#pragma unroll
    for (int i = 0; i < kPer; i += 4)
      *reinterpret_cast<float4*>(mine + i) = make_float4(
          sums.values[i], sums.values[i + 1], sums.values[i + 2], sums.values[i + 3]);
    if (block.lane % kLanes == 0)
      partials[block.warp * 4 + sub] = make_float2(sums.largest, sums.sum);
    block.Sync();
    constexpr int kThreads = D / 4;  // of a head
    const int local = threadIdx.x / kThreads, pair = round * kPairsAtOnce + local;
    if (local >= kPairsAtOnce || pair >= B * share.heads) return;
    const int b = pair % B, head = pair / B, dim = threadIdx.x % kThreads * 4;
    parts += local * kSplits * kPartialFloats + dim;
    partials += local * kSplits * 4;
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kSpan; ++i) most = fmaxf(most, partials[i / kSub * 4 + i % kSub].x);
    float sum = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      const float2 partial = partials[i / kSub * 4 + i % kSub];
      const float factor = partial.x == -INFINITY ? 0.0f : __expf(partial.x - most);
      const float4 v = *reinterpret_cast<const float4*>(parts + i * D);
      sum = fmaf(factor, partial.y, sum);
      value = {fmaf(factor, v.x, value.x), fmaf(factor, v.y, value.y),
               fmaf(factor, v.z, value.z), fmaf(factor, v.w, value.w)};
    }
    const uint32_t to_rank = Mapped(&shared, dim / kRows) - SharedAddress(&shared);
    Send(SharedAddress(&shared.attention.attended[b][head][block.rank][dim % kRows]) + to_rank,
         SharedAddress(&shared.merge_ready) + to_rank,
         make_uint4(__float_as_uint(value.x), __float_as_uint(value.y), __float_as_uint(value.z),
                    __float_as_uint(value.w)));
    if (dim / 4 < kRanks)
      Send(block.Peer(&shared.attention.softmax[b][head][block.rank]),
           block.Peer(&shared.merge_ready), __float_as_uint(most), __float_as_uint(sum));
  }

  // This rank's dimensions of every head, gated, to every rank. A warp has a row of x.
  __device__ __forceinline__ void Merge() {
    constexpr int kVector = kRows < 8 ? kRows : 8;
    const int head = block.lane / kRows, i = block.lane % kRows, column = block.lane / kRanks;
    const uint32_t ready = block.Peer(&shared.slice_ready);
#pragma unroll 1
    for (int b = block.warp; b < B; b += kStepWarps) {
      if (head < share.heads) {
        const float2* softmax = shared.attention.softmax[b][head];
        float most = -INFINITY;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) most = fmaxf(most, softmax[r].x);
        float sum = 0.0f, x = 0.0f;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          const float2 part = softmax[r];
          const float factor = part.x == -INFINITY ? 0.0f : __expf(part.x - most);
          sum = fmaf(factor, part.y, sum);
          x = fmaf(factor, shared.attention.attended[b][head][r][i], x);
        }
        x = __fdividef(x, sum);
        if (shape.gated) x *= QuickSigmoid(shared.kept[b][head * query_rows + kRows + i]);
        const Halves v(x);
        shared.outgoing[2 * b][block.lane] = v.high;
        shared.outgoing[2 * b + 1][block.lane] = v.low;
      }
      __syncwarp();
#pragma unroll 1
      for (int j = 0; j < share.heads * kRows; j += kVector) {
        const bf16* from = &shared.outgoing[2 * b + column][j];
        const uint32_t to = block.Peer(&shared.slice[2 * b + column][j / kRows * D +
                                                                     block.rank * kRows + j % kRows]);
        if constexpr (kVector == 8) {
          Send(to, ready, *reinterpret_cast<const uint4*>(from));
        } else {
          const uint2 v = *reinterpret_cast<const uint2*>(from);
          Send(to, ready, v.x, v.y);
        }
      }
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
        const int64_t from =
            CacheRow(b, part.begin, part.begin + i / kLines) * D + i % kLines * kLineElements;
        PrefetchLine(Global(layer.k_pages) + from);
        PrefetchLine(Global(layer.v_pages) + from);
      }
    }
  }

  // Queries to every rank, keys and values to the rank that has the newest position; gates stay.
  __device__ __forceinline__ void Project(const StepLayer& layer) {
    cached = Cached{};  // nothing of it lives from layer to layer
    float q_norm = 0.0f, k_norm = 0.0f;
    if (shape.head_norms && threadIdx.x < D) {
      q_norm = shape.head_norm_offset + Global(layer.q_norm)[threadIdx.x];
      k_norm = shape.head_norm_offset + Global(layer.k_norm)[threadIdx.x];
    }
    block.AwaitStream();
    if (share.heads == 0) return;
    if (threadIdx.x < D) {
      shared.attention.norms[0][threadIdx.x] = q_norm;
      shared.attention.norms[1][threadIdx.x] = k_norm;
    }
    block.template MultiplyStream<4, kTilesAtOnce>(
        rows, [](const char*) {},
        [&](const float* parts, int, int count) {
          LoadFirst(layer, ItemAt(0));
          const int b = threadIdx.x % B;
          const float factor = shared.norm_factor[b];
#pragma unroll 1
          for (int i = threadIdx.x; i < count * B; i += kStepThreads) {
            float v = block.SumParts(parts, i) * factor;
            if (layer.q_bias != nullptr) v += BiasOf(layer, i / B);
            shared.kept[b][i / B] = v;
          }
          block.Sync();
          block.template SendHeads<D>(
              share.heads + 2,
              [&](int head) {
                return head < share.heads
                           ? head * query_rows
                           : share.heads * query_rows + (head - share.heads) * kRows;
              },
              [&](int b, int head) { return head < share.heads ? -1 : PartOf(b).owner; });
        });
  }

  __device__ __forceinline__ void Mix(const StepLayer& layer) {
    if (share.heads == 0) return;
    int bytes = B * share.heads * D * 4;
#pragma unroll
    for (int b = 0; b < B; ++b) bytes += PartOf(b).owner == block.rank ? 2 * D * 4 : 0;
    block.Await(&shared.mixer_ready, block.mixer_parity, bytes);
    const int rounds = CeilDiv(B * share.heads, kPairsAtOnce);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const Item item = ItemAt(round);
      Softmax<kPer> sums;
      if (item.exists) Attend(layer, item, sums);
      LoadFirst(layer, ItemAt(round + 1));
      Spread(round, sums);
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
