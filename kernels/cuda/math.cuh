// The activation functions that several kernels use.
#pragma once

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

__device__ __forceinline__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float Silu(float x) { return x / (1.0f + expf(-x)); }

// log(1 + exp(x)), linear above 20 as in torch.
__device__ __forceinline__ float Softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

}  // namespace qwend::cuda
