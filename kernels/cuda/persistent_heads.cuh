// The heads of the persistent step's attention layers: which lanes have what of one, and what is
// done to queries and the newest key before anything is attended to.
#pragma once

#include "kernels/cuda/page_layout.h"
#include "kernels/cuda/persistent_block.cuh"

namespace qwend::cuda {

// A warp has a head, each lane kPer elements of it from `at` on.
template <int B, int D>
struct HeadPreparer {
  StepBlock<B>& block;
  const ClusterShare& share;
  const StepShape& shape = block.a.shape;
  StepShared<B>& shared = block.shared;

  static constexpr int kPer = D / kWarp, kWords = kPer / 2;
  static_assert(kPer <= kPieceElements);
  using Words = uint32_t[kWords];
  const int kv_head = share.first_head / shape.group;
  const int at = block.lane * kPer;

  // A head whose elements from `at` on are this lane's.
  __device__ __forceinline__ void NormAndRotate(float (&x)[kPer], int b, bool query) const {
    if (shape.head_norms) {
      float square = 0.0f, weight[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) square = fmaf(x[i], x[i], square);
      const float inverse = rsqrtf(WarpSum(square) / D + shape.head_norm_eps);
      LoadFloats(weight, shared.attention.norms[query ? 0 : 1] + at);
#pragma unroll
      for (int i = 0; i < kPer; ++i) x[i] *= inverse * (shape.head_norm_offset + weight[i]);
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

  // Each head once for the block, in place: queries normed, rotated, scaled and in two halves, as
  // TileAttention takes them; the newest key and value as the cache keeps them, by the rank that
  // has their position. The first cluster of a group writes the cache.
  __device__ __forceinline__ void Prepare(const StepLayer& layer) const {
#pragma unroll 1
    for (int item = kStepWarps - 1 - block.warp; item < B * (share.heads + 1); item += kStepWarps) {
      const int b = item % B, head = item / B;
      const bool query = head < share.heads;
      const SequencePart part = shared.part[b];
      if (!query && part.owner != block.rank) continue;
      float* from = shared.mixer[b] + head * D + at;
      float x[kPer];
      LoadFloats(x, from);
      NormAndRotate(x, b, query);
      Words first, second;
      if (query) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const float scale = shape.score_scale;
          const SplitPair two =
              SplitTwo(__fmul_rn(x[2 * i], scale), __fmul_rn(x[2 * i + 1], scale));
          first[i] = two.high;
          second[i] = two.low;
        }
      } else {
        float value[kPer];
        LoadFloats(value, from + D);
        Round(first, x);
        Round(second, value);
      }
      __syncwarp();  // all lanes have read what is written over now
      bf16* const head_rows = reinterpret_cast<bf16*>(shared.mixer[b] + head * D);
      if (query) {
        Put(head_rows, 2 * head, first);
        Put(head_rows + D, 2 * head + 1, second);
        continue;
      }
      const int position = shared.position[b];
      Put(head_rows, position % 8, first);
      Put(head_rows + 2 * D, position % 8, second);
      if (share.first_head % shape.group != 0) continue;
      const int64_t to =
          static_cast<int64_t>(PageRow(block.a, shared, b, kv_head, position / kPageTokens) +
                               position % kPageTokens) *
          D;
      Put(Global(layer.k_pages) + to, position % 8, first);
      Put(Global(layer.v_pages) + to, position % 8, second);
    }
    __syncwarp();
  }

 private:
  // This lane's part of a row whose pieces have the given order.
  __device__ __forceinline__ void Put(bf16* row, int order, const Words& words) const {
    auto* to = reinterpret_cast<uint32_t*>(row + (at ^ order * kPieceElements));
    if constexpr (kWords == 4) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (kWords == 2) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else {
      *to = words[0];
    }
  }
  // As the cache keeps it.
  __device__ __forceinline__ static void Round(Words& words, const float (&x)[kPer]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = AsWord(__floats2bfloat162_rn(x[2 * i], x[2 * i + 1]));
  }
};

}  // namespace qwend::cuda
