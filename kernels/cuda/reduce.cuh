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

// Sums each of R values over the warp with R - 1 + log2(32 / R) exchanges: lane l gets the sum of
// value l / (32 / R).
template <int R>
__device__ __forceinline__ float WarpSums(float (&v)[R], int lane) {
  int offset = kWarp / 2;
#pragma unroll
  for (int half = R / 2; half >= 1; half /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float send = upper ? v[i] : v[i + half], keep = upper ? v[i + half] : v[i];
      v[i] = keep + __shfl_xor_sync(kFullMask, send, offset);
    }
  }
#pragma unroll
  for (; offset >= 1; offset /= 2) v[0] += __shfl_xor_sync(kFullMask, v[0], offset);
  return v[0];
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
