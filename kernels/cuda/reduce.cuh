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
