// What every kernel file needs: strided views as kernel arguments, element conversion, type
// dispatch, checked launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace qwend::cuda {

using bf16 = __nv_bfloat16;

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;

template <typename T>
__host__ __device__ constexpr T CeilDiv(T a, T b) {
  return (a + b - 1) / b;
}

__device__ __forceinline__ float ToFloat(float v) { return v; }
__device__ __forceinline__ float ToFloat(bf16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float ToFloat(__half v) { return __half2float(v); }
template <typename T>
__device__ __forceinline__ T FromFloat(float v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else if constexpr (std::is_same_v<T, bf16>) {
    return __float2bfloat16_rn(v);
  } else {
    return __float2half_rn(v);
  }
}

// Two bf16 in one 32-bit register, widened: exact.
__device__ __forceinline__ float LowBf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighBf16(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// A view whose innermost dimension is contiguous, as a kernel takes it: element (i, j, k) at i * s0
// + j * s1 + k.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t s0 = 0;
  int64_t s1 = 0;
  __device__ __forceinline__ T* At(int64_t i, int64_t j = 0) const {
    return data + i * s0 + j * s1;
  }
};

template <typename T>
View<T> MakeView(const TensorView& v) {
  return {static_cast<T*>(v.data), v.rank > 1 ? v.strides[0] : 0, v.rank > 2 ? v.strides[1] : 0};
}

// A small vector (norm weight, bias, convolution weight) in whatever type the checkpoint stored it.
struct Vector {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  __device__ __forceinline__ float operator[](int64_t i) const {
    switch (dtype) {
      case DType::kBF16:
        return ToFloat(static_cast<const bf16*>(data)[i]);
      case DType::kF16:
        return ToFloat(static_cast<const __half*>(data)[i]);
      default:
        return static_cast<const float*>(data)[i];
    }
  }
  __host__ __device__ explicit operator bool() const { return data != nullptr; }
};
inline Vector MakeVector(const TensorView& v) { return {v.data, v.dtype}; }

// body(T{}) with T the element type of `dtype`.
template <typename Body>
void DispatchActivation(DType dtype, const char* op, Body&& body) {
  switch (dtype) {
    case DType::kF32:
      body(float{});
      return;
    case DType::kBF16:
      body(bf16{});
      return;
    default:
      Require(false, op, ": the CUDA backend takes f32 or bf16 here, not ", Name(dtype));
  }
}

// The smallest of the given head sizes that is D itself; an unlisted D is the caller's mistake.
template <int... Sizes, typename Body>
void DispatchSize(int64_t size, const char* what, Body&& body) {
  const bool found =
      ((size == Sizes ? (body(std::integral_constant<int, Sizes>{}), true) : false) || ...);
  Require(found, what, ": size ", size, " is not one of those the CUDA backend is built for");
}

// First in every kernel, before anything is read that an earlier kernel writes or written that one
// reads: the launch below lets a kernel's blocks take their places while the one before still runs.
__device__ __forceinline__ void WaitForPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// Launches with programmatic dependent launch: inside a capture too, where the edge between two
// kernels then is one.
template <typename... Params, typename... Args>
void Launch(const LaunchContext& ctx, void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = ctx.stream;
  config.attrs = &overlap;
  config.numAttrs = ctx.overlap && ctx.begin_early ? 1 : 0;
  Check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...),
        "launching a kernel");
}

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// For kernels that shall take their places beside one another: all of an SM's shared memory for
// blocks, `shared_bytes` of it for one. An SM changes its division between shared memory and L1
// only when it is empty, so kernels that follow each other must agree on it. Once per kernel,
// before anything is captured.
template <typename... Params>
bool ShareProcessor(void (*kernel)(Params...), int64_t shared_bytes = 0) {
  Check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        "dividing shared memory and L1");
  if (shared_bytes > 0) {
    Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared_bytes)),
          "raising a kernel's shared memory");
  }
  return true;
}

// 16 bytes that are read once: not kept in L1.
__device__ __forceinline__ uint4 LoadStreaming(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

}  // namespace qwend::cuda
