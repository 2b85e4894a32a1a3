// Sums and maxima over a warp or a block, always in the same order.
#pragma once

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

__device__ __forceinline__ float WarpSum(float v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullMask, v, offset);
  return v;
}

__device__ __forceinline__ float WarpMax(float v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    v = fmaxf(v, __shfl_xor_sync(kFullMask, v, offset));
  return v;
}

// Of WarpSums: R values are left, whose sums over the lanes that differ in the bits from Offset
// down are wanted. Recursive, because a loop that halves its own bound is not unrolled, and its
// values then lie in local memory.
template <int R, int Offset, int N>
__device__ __forceinline__ float SumHalves(float (&v)[N], int lane) {
  if constexpr (Offset == 0) {
    return v[0];
  } else if constexpr (R == 1) {
    v[0] += __shfl_xor_sync(kFullMask, v[0], Offset);
    return SumHalves<1, Offset / 2>(v, lane);
  } else {
    const bool upper = (lane & Offset) != 0;
#pragma unroll
    for (int i = 0; i < R / 2; ++i) {
      const float send = upper ? v[i] : v[i + R / 2], keep = upper ? v[i + R / 2] : v[i];
      v[i] = keep + __shfl_xor_sync(kFullMask, send, Offset);
    }
    return SumHalves<R / 2, Offset / 2>(v, lane);
  }
}

// Sums each of R values over the warp with R - 1 + log2(32 / R) exchanges: lane l gets the sum of
// value l / (32 / R).
template <int R>
__device__ __forceinline__ float WarpSums(float (&v)[R], int lane) {
  return SumHalves<R, kWarp / 2>(v, lane);
}

// Every thread of the block gets the result. `scratch` is shared memory of kWarp floats; safe to
// reuse at once.
template <typename WarpReduce>
__device__ __forceinline__ float BlockReduce(float v, float identity, float* scratch,
                                             WarpReduce reduce) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  v = reduce(v);
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  v = reduce(lane < warps ? scratch[lane] : identity);
  __syncthreads();
  return v;
}

__device__ __forceinline__ float BlockSum(float v, float* scratch) {
  return BlockReduce(v, 0.0f, scratch, WarpSum);
}

__device__ __forceinline__ float BlockMax(float v, float* scratch) {
  return BlockReduce(v, -INFINITY, scratch, WarpMax);
}

}  // namespace qwend::cuda
