// Copies from global to shared memory that run beside the arithmetic.
#pragma once

#include "kernels/cuda/mma.cuh"

namespace qwend::cuda {

// 16 bytes; with `valid` false the destination is zeroed and nothing is read.
__device__ __forceinline__ void AsyncCopy16(void* to_shared, const void* from_global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(to_shared)),
               "l"(from_global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void AsyncCommit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int Pending>
__device__ __forceinline__ void AsyncWait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace qwend::cuda
