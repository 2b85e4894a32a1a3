// The heads of the persistent step's attention layers: which lanes have what of one, and what is
// done to queries and the newest key before anything is attended to.
#pragma once

#include "kernels/cuda/attention_head.cuh"
#include "kernels/cuda/persistent_block.cuh"

namespace qwend::cuda {

// A warp has one or more vectors of D elements side by side.
template <int D>
struct HeadLanes {
  static constexpr int kPer = 8;               // elements, a lane's
  static constexpr int kLanes = D / kPer;      // that have a vector
  static constexpr int kSub = kWarp / kLanes;  // vectors side by side
  __device__ __forceinline__ static int Sub() { return threadIdx.x % kWarp / kLanes; }
  __device__ __forceinline__ static int At() { return threadIdx.x % kLanes * kPer; }

  // Over the lanes that share a head's vector.
  __device__ __forceinline__ static float Sum(float v) {
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2)
      v += __shfl_xor_sync(kFullMask, v, offset);
    return v;
  }
};

// Rounded as the cache keeps it.
template <int N>
__device__ __forceinline__ Packed<N> Round(float (&x)[N]) {
  Packed<N> packed;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(x[i], x[i + 1]);
    packed.pairs[i / 2] = *reinterpret_cast<const uint32_t*>(&two);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = packed[i];
  return packed;
}

template <int B, int D>
struct HeadPreparer {
  StepBlock<B>& block;
  const ClusterShare& share;
  const StepShape& shape = block.a.shape;
  StepShared<B>& shared = block.shared;

  using Lanes = HeadLanes<D>;
  static constexpr int kPer = Lanes::kPer;
  const int kv_head = share.first_head / shape.group;
  const int sub = Lanes::Sub(), at = Lanes::At();

  // A head whose elements from `at` on are this lane's.
  __device__ __forceinline__ void NormAndRotate(float (&x)[kPer], int b, bool query) const {
    if (shape.head_norms) {
      float square = 0.0f, weight[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) square = fmaf(x[i], x[i], square);
      const float inverse = rsqrtf(Lanes::Sum(square) / D + shape.head_norm_eps);
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

  // Each head once for the block, in place: queries normed, rotated and scaled; the newest key and
  // value as the cache keeps them, by the rank that has their position. The first cluster of a
  // group writes the cache.
  __device__ __forceinline__ void Prepare(const StepLayer& layer) const {
#pragma unroll 1
    for (int item = block.warp; item < B * (share.heads + 1); item += kStepWarps) {
      const int b = item % B, head = item / B;
      const bool query = head < share.heads;
      const SequencePart part = shared.part[b];
      if (!query && part.owner != block.rank) continue;
      float* from = shared.mixer[b] + head * D + at;
      float x[kPer];
      LoadFloats(x, from);
      NormAndRotate(x, b, query);
      if (query) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) x[i] *= shape.attention_scale;
        if (sub == 0) StoreFloats(from, x);
        continue;
      }
      float value[kPer];
      LoadFloats(value, from + D);
      const Packed<kPer> k = Round(x), v = Round(value);
      if (sub != 0) continue;
      StoreFloats(from, x);
      StoreFloats(from + D, value);
      if (share.first_head % shape.group != 0) continue;
      const int64_t to =
          CacheRow(block.a, shared, b, kv_head, part.begin, shared.position[b]) * D + at;
      *reinterpret_cast<uint4*>(Global(layer.k_pages) + to) =
          make_uint4(k.pairs[0], k.pairs[1], k.pairs[2], k.pairs[3]);
      *reinterpret_cast<uint4*>(Global(layer.v_pages) + to) =
          make_uint4(v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]);
    }
    __syncwarp();
  }
};

}  // namespace qwend::cuda
