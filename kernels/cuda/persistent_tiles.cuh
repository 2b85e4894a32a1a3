// Products of the persistent step on tensor cores: 16 rows of a weight, as they came into the ring,
// times the columns of all rows of x.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/persistent_shared.cuh"

namespace qwend::cuda {

// 64 elements of K of eight columns from `first` on, four rows of x, as the product's second
// operand. Of fewer rows than four the columns come again.
using Columns = uint32_t[4][2];
template <int B>
__device__ __forceinline__ void LoadColumns(Columns& x, const bf16* columns, int stride, int first,
                                            int k) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t r[4];
    LoadMatrix4(r, columns + (first + lane % 8) % (2 * B) * stride + k + i * 32 + lane / 8 * 8);
    x[2 * i][0] = r[0];
    x[2 * i][1] = r[1];
    x[2 * i + 1][0] = r[2];
    x[2 * i + 1][1] = r[3];
  }
}

__device__ __forceinline__ void Clear(Columns& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i][0] = x[i][1] = 0;
}

// 16 rows of a weight times 64 elements of K, added to `c`; `row` is where this lane's row of the
// tile begins. Four sums run side by side.
using Weights64 = uint32_t[4][4];
using Sums = float[4][4];
__device__ __forceinline__ void LoadTile(Weights64& w, const char* row) {
  const int lane = threadIdx.x % kWarp;
  const uint32_t swizzle = SharedAddress(row) >> 7 & 7;
#pragma unroll
  for (int s = 0; s < 4; ++s) LoadMatrix4(w[s], row + ((2 * s + lane / 16) ^ swizzle) * 16);
}
__device__ __forceinline__ void MultiplyTile(Sums& c, const Weights64& w, const Columns& x) {
#pragma unroll
  for (int s = 0; s < 4; ++s) MmaBf16(c[s], w[s], x[s][0], x[s][1]);
}
// Lane (g, t) has the sums of rows g and g + 8 for row t of the four rows of x.
__device__ __forceinline__ float2 Total(const Sums& c) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = (c[0][i] + c[1][i]) + (c[2][i] + c[3][i]);
  return make_float2(v[0] + v[1], v[2] + v[3]);
}

}  // namespace qwend::cuda
