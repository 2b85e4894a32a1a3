// The activation functions that several kernels use.
#pragma once

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

__device__ __forceinline__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float Silu(float x) { return x / (1.0f + expf(-x)); }

}  // namespace qwend::cuda
