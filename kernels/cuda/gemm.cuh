// Prefill's product: out[T, N] = x[T, K] * weight[N, K]^T on tensor cores. x is rounded to bf16 on
// its way to shared memory, weights are bf16 as stored, sums are f32 along K in one fixed order.
#pragma once

#include "kernels/cuda/async_copy.cuh"

namespace qwend::cuda {

constexpr int kGemmM = 64;  // rows of x a block covers
constexpr int kGemmN = 64;  // output columns
constexpr int kGemmK = 64;  // depth of one stage
constexpr int kGemmThreads = 128;
constexpr int kGemmPad = 8;  // elements, so that ldmatrix rows fall into different banks

struct GemmStage {
  bf16 x[kGemmM][kGemmK + kGemmPad];
  bf16 w[kGemmN][kGemmK + kGemmPad];
};

// x elements one thread moves per stage, held in registers between the global load and the store to
// shared memory.
struct GemmXFragment {
  uint4 packed[kGemmM * kGemmK / 8 / kGemmThreads];
};

template <typename A>
__device__ __forceinline__ uint4 LoadRounded8(const A* x) {
  if constexpr (std::is_same_v<A, bf16>) {
    return *reinterpret_cast<const uint4*>(x);
  } else {
    const float4 a = *reinterpret_cast<const float4*>(x),
                 b = *reinterpret_cast<const float4*>(x + 4);
    union {
      __nv_bfloat162 pairs[4];
      uint4 packed;
    } u;
    u.pairs[0] = __floats2bfloat162_rn(a.x, a.y);
    u.pairs[1] = __floats2bfloat162_rn(a.z, a.w);
    u.pairs[2] = __floats2bfloat162_rn(b.x, b.y);
    u.pairs[3] = __floats2bfloat162_rn(b.z, b.w);
    return u.packed;
  }
}

template <typename A>
__device__ __forceinline__ void LoadX(GemmXFragment& f, View<const A> x, int m0, int k0, int rows,
                                      int k) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(f.packed) / sizeof(uint4)); ++i) {
    const int piece = threadIdx.x + i * kGemmThreads, row = piece / (kGemmK / 8),
              col = piece % (kGemmK / 8) * 8;
    const bool valid = m0 + row < rows && k0 + col < k;
    f.packed[i] = valid ? LoadRounded8(x.At(m0 + row) + k0 + col) : make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void StoreX(GemmStage& stage, const GemmXFragment& f) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(f.packed) / sizeof(uint4)); ++i) {
    const int piece = threadIdx.x + i * kGemmThreads, row = piece / (kGemmK / 8),
              col = piece % (kGemmK / 8) * 8;
    *reinterpret_cast<uint4*>(&stage.x[row][col]) = f.packed[i];
  }
}

__device__ __forceinline__ void CopyW(GemmStage& stage, const bf16* weight, int n0, int k0, int n,
                                      int k) {
#pragma unroll
  for (int i = 0; i < kGemmN * kGemmK / 8 / kGemmThreads; ++i) {
    const int piece = threadIdx.x + i * kGemmThreads, row = piece / (kGemmK / 8),
              col = piece % (kGemmK / 8) * 8;
    const bool valid = n0 + row < n && k0 + col < k;
    AsyncCopy16(&stage.w[row][col],
                valid ? weight + static_cast<int64_t>(n0 + row) * k + k0 + col : weight, valid);
  }
  AsyncCommit();
}

// One block: a 64x64 tile of out, two stages along K; one warp: 32x32 of it. Flops: 2 * T * N * K.
// Bytes: the weights once per 64 rows. Bound: tensor cores once T is in the hundreds.
template <typename A, typename O>
__global__ void __launch_bounds__(kGemmThreads)
    GemmKernel(View<O> out, View<const A> x, const bf16* weight, Vector bias, int rows, int n,
               int k) {
  WaitForPrevious();
  __shared__ __align__(16) GemmStage stages[2];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int n0 = blockIdx.x * kGemmN, m0 = blockIdx.y * kGemmM;
  const int warp_m = warp / 2 * 32, warp_n = warp % 2 * 32;

  float acc[2][4][4] = {};
  GemmXFragment fragment;
  LoadX(fragment, x, m0, 0, rows, k);
  CopyW(stages[0], weight, n0, 0, n, k);
  StoreX(stages[0], fragment);
  const int steps = CeilDiv(k, kGemmK);
  for (int step = 0; step < steps; ++step) {
    AsyncWait<0>();
    __syncthreads();  // this stage is filled, and nobody reads the other one any more
    GemmStage& now = stages[step % 2];
    GemmStage& next = stages[(step + 1) % 2];
    const bool more = step + 1 < steps;
    if (more) {
      CopyW(next, weight, n0, (step + 1) * kGemmK, n, k);
      LoadX(fragment, x, m0, (step + 1) * kGemmK, rows, k);
    }
#pragma unroll
    for (int kk = 0; kk < kGemmK; kk += 16) {
      uint32_t a[2][4], b[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        LoadMatrix4(a[i], &now.x[warp_m + i * 16 + lane % 16][kk + lane / 16 * 8]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        LoadMatrix4(b[j],
                    &now.w[warp_n + j * 16 + lane / 16 * 8 + lane % 8][kk + lane / 8 % 2 * 8]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          MmaBf16(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
    if (more) StoreX(next, fragment);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int h = 0; h < 4; ++h) {
        const int row = m0 + warp_m + i * 16 + lane / 4 + h / 2 * 8;
        const int col = n0 + warp_n + j * 8 + lane % 4 * 2 + h % 2;
        if (row < rows && col < n) {
          out.At(row)[col] = FromFloat<O>(bias ? acc[i][j][h] + bias[col] : acc[i][j][h]);
        }
      }
    }
  }
}

template <typename A, typename O>
void LaunchGemm(View<O> out, View<const A> x, const bf16* weight, Vector bias, int rows, int n,
                int k, const LaunchContext& ctx) {
  Launch(ctx, GemmKernel<A, O>, dim3(CeilDiv(n, kGemmN), CeilDiv(rows, kGemmM)), dim3(kGemmThreads),
         0, out, x, weight, bias, rows, n, k);
}

}  // namespace qwend::cuda
