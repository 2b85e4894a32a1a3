// The tensor core's m16n8k16 product, its operands loaded from shared memory.
#pragma once

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}
__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], const void* row) {
  LoadMatrix4(r, SharedAddress(row));
}

// The same, each matrix transposed.
__device__ __forceinline__ void LoadTransposed4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}

// An 8x8 matrix of 16-bit elements that the warp has in registers, two of row lane / 4 a lane,
// transposed.
__device__ __forceinline__ uint32_t Transposed(uint32_t v) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// c += a * b with a 16x16 (row-major), b 16x8 (column-major), both bf16, c f32: lane holds (row
// lane / 4, columns 2 * (lane % 4) and the next) in c[0], c[1], and the same eight rows below in
// c[2], c[3].
__device__ __forceinline__ void MmaBf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace qwend::cuda
