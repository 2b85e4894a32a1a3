// What a decode attention kernel is given, and how one of its warps takes up a head: norm,
// rotation, keys and values as they lie in the pages.
#pragma once

#include "kernels/cuda/paged.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {

struct AttentionArguments {
  View<float> out;
  View<const float> q, k, v, gate;
  Vector q_weight, k_weight;  // none: no head norms
  float norm_offset = 0.0f, norm_eps = 0.0f;
  const float* cos = nullptr;
  const float* sin = nullptr;
  int half = 0;  // rotated pairs
  bf16* k_pages = nullptr;
  bf16* v_pages = nullptr;
  const int* positions = nullptr;
  BlockTable table;
  int group = 0, kv_heads = 0;
  float scale = 0.0f;
  float* partials = nullptr;  // [rows, kv_heads, splits, group, 4 + D]
  unsigned* counters = nullptr;
};

// What a warp needs to norm and rotate one head's vector, none of it made by an earlier kernel.
template <int D>
struct HeadConstants {
  static constexpr int kPer = CeilDiv(D, kWarp);
  float weight[kPer], cos[kPer], sin[kPer];  // of elements, and pairs, i * 32 + lane

  __device__ __forceinline__ HeadConstants(const AttentionArguments& a, const Vector& weights,
                                           int position, int lane) {
    const int64_t angle = static_cast<int64_t>(position) * a.half;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int at = i * kWarp + lane;
      weight[i] = weights && at < D ? a.norm_offset + weights[at] : 1.0f;
      cos[i] = at < a.half ? a.cos[angle + at] : 1.0f;
      sin[i] = at < a.half ? a.sin[angle + at] : 0.0f;
    }
  }
};

// One head's vector into shared memory, normed and rotated. One warp.
template <int D>
__device__ __forceinline__ void PrepareHead(float* to, const float* from, const HeadConstants<D>& c,
                                            bool normed, const AttentionArguments& a, int lane) {
  constexpr int kPer = HeadConstants<D>::kPer;
  float x[kPer], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int at = i * kWarp + lane;
    x[i] = at < D ? from[at] : 0.0f;
    square = fmaf(x[i], x[i], square);
  }
  const float inverse = normed ? rsqrtf(WarpSum(square) / D + a.norm_eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int at = i * kWarp + lane;
    if (at < D) to[at] = x[i] * inverse * c.weight[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int at = i * kWarp + lane;
    if (at >= a.half) continue;
    const float first = to[at], second = to[at + a.half];
    to[at] = first * c.cos[i] - second * c.sin[i];
    to[at + a.half] = second * c.cos[i] + first * c.sin[i];
  }
  __syncwarp();
}

// N consecutive bf16 as they lie in memory, in one load.
template <int N>
struct Packed {
  uint32_t pairs[CeilDiv(N, 2)] = {};
  __device__ __forceinline__ void Load(const bf16* from) {
    if constexpr (N == 8) {
      const uint4 w = *reinterpret_cast<const uint4*>(from);
      pairs[0] = w.x;
      pairs[1] = w.y;
      pairs[2] = w.z;
      pairs[3] = w.w;
    } else if constexpr (N == 4) {
      const uint2 w = *reinterpret_cast<const uint2*>(from);
      pairs[0] = w.x;
      pairs[1] = w.y;
    } else if constexpr (N == 2) {
      pairs[0] = *reinterpret_cast<const uint32_t*>(from);
    } else {
      pairs[0] = *reinterpret_cast<const uint16_t*>(from);
    }
  }
  __device__ __forceinline__ float operator[](int i) const {
    return i % 2 == 0 ? LowBf16(pairs[i / 2]) : HighBf16(pairs[i / 2]);
  }
};

// Largest score, sum of exponentials and weighted values of some positions.
template <int N>
struct Softmax {
  float largest = -INFINITY;
  float sum = 0.0f;
  float values[N] = {};
};

}  // namespace qwend::cuda
