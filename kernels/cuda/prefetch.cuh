// Asking L2 for memory that later kernels read, so that device memory stays busy while kernels
// start, exchange activations and end. Changes no result.
#pragma once

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

// Every block asks for its share of the span; called by all threads, acts in the first warp.
__device__ __forceinline__ void PrefetchShare(const Span& span) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (span.bytes == 0 || threadIdx.x >= kWarp) return;
  constexpr int64_t kUnit = 128;
  const int64_t lanes = int64_t{gridDim.x} * gridDim.y * gridDim.z * kWarp;
  const int64_t block = (int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t share = CeilDiv(CeilDiv(span.bytes, lanes), kUnit) * kUnit;
  const int64_t begin = (block * kWarp + threadIdx.x) * share;
  if (begin >= span.bytes) return;
  const uint32_t bytes = static_cast<uint32_t>(min(share, span.bytes - begin));
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(span.data + begin), "r"(bytes)
               : "memory");
#endif
}

}  // namespace qwend::cuda
