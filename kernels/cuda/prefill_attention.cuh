// Causal attention of a chunk with the softmax kept online: the score matrix never reaches memory.
#pragma once

#include "kernels/cuda/paged.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {

constexpr int kFlashWarps = 4;
constexpr int kFlashWarpRows = 4;                         // query rows of a warp
constexpr int kFlashRows = kFlashWarps * kFlashWarpRows;  // and of a block
constexpr int kFlashKeys = kWarp;                         // positions of a tile: one a lane

template <int D>
struct FlashShared {
  float q[kFlashRows][D];
  float k[kFlashKeys][D + 1];  // the odd row length keeps lanes, one key each, on different banks
  float v[kFlashKeys][D];
  float p[kFlashRows][kFlashKeys];
};

// Block (16 query rows of a sequence, head, sequence). Tiles of 32 positions go through shared
// memory; a lane scores one position for its warp's four rows, then owns D / 32 columns of the
// weighted sum. Masked scores are -inf. Flops: 4 * D per (row, visible position). Bound: f32
// arithmetic.
template <int D, typename A, typename P>
__global__ void __launch_bounds__(kFlashWarps* kWarp)
    PrefillAttentionKernel(View<A> out, View<const A> q, const P* k_pages, const P* v_pages,
                           const int* lengths, BlockTable table, const int* query_start, int group,
                           int kv_heads, float scale) {
  WaitForPrevious();
  constexpr int kPerLane = D < kWarp ? 1 : D / kWarp;
  extern __shared__ __align__(16) unsigned char raw[];
  FlashShared<D>& sh = *reinterpret_cast<FlashShared<D>*>(raw);

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, head = blockIdx.y,
            kv_head = head / group;
  const int first = query_start[blockIdx.z] + blockIdx.x * kFlashRows,
            end = query_start[blockIdx.z + 1];
  if (first >= end) return;
  const int rows = min(kFlashRows, end - first);
  const int* pages = table.PagesOf(first);
  for (int i = threadIdx.x; i < kFlashRows * D; i += blockDim.x) {
    const int r = i / D;
    sh.q[r][i % D] = r < rows ? ToFloat(q.At(first + r, head)[i % D]) * scale : 0.0f;
  }

  int visible[kFlashWarpRows];
  float largest[kFlashWarpRows], sum[kFlashWarpRows], acc[kFlashWarpRows][kPerLane] = {};
#pragma unroll
  for (int r = 0; r < kFlashWarpRows; ++r) {
    const int row = warp * kFlashWarpRows + r;
    visible[r] = row < rows ? lengths[first + row] : 0;
    largest[r] = -INFINITY;
    sum[r] = 0.0f;
  }
  const int last = lengths[first + rows - 1];  // rows of a sequence stand in order of position

  for (int p0 = 0; p0 < last; p0 += kFlashKeys) {
    __syncthreads();
    for (int i = threadIdx.x; i < kFlashKeys * D; i += blockDim.x) {
      const int j = i / D, position = p0 + j;
      const bool valid = position < last;
      const int64_t at = valid ? PagedOffset(pages, position, kv_head, kv_heads, D) +
                                     PageColumn(i % D, position, D)
                               : 0;
      sh.k[j][i % D] = valid ? ToFloat(k_pages[at]) : 0.0f;
      sh.v[j][i % D] = valid ? ToFloat(v_pages[at]) : 0.0f;
    }
    __syncthreads();

    float score[kFlashWarpRows] = {};
#pragma unroll 8
    for (int d = 0; d < D; ++d) {
      const float key = sh.k[lane][d];
#pragma unroll
      for (int r = 0; r < kFlashWarpRows; ++r)
        score[r] = fmaf(sh.q[warp * kFlashWarpRows + r][d], key, score[r]);
    }
#pragma unroll
    for (int r = 0; r < kFlashWarpRows; ++r) {
      const float s = p0 + lane < visible[r] ? score[r] : -INFINITY;
      const float now = fmaxf(largest[r], WarpMax(s));
      const float shrink = now == -INFINITY ? 0.0f : expf(largest[r] - now);
      const float weight = s == -INFINITY ? 0.0f : expf(s - now);
      sum[r] = fmaf(sum[r], shrink, WarpSum(weight));
      largest[r] = now;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) acc[r][i] *= shrink;
      sh.p[warp * kFlashWarpRows + r][lane] = weight;
    }
    __syncwarp();
    for (int j = 0; j < kFlashKeys; ++j) {
      float value[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        value[i] = lane + i * kWarp < D ? sh.v[j][lane + i * kWarp] : 0.0f;
#pragma unroll
      for (int r = 0; r < kFlashWarpRows; ++r) {
        const float weight = sh.p[warp * kFlashWarpRows + r][j];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) acc[r][i] = fmaf(weight, value[i], acc[r][i]);
      }
    }
    __syncwarp();
  }
#pragma unroll
  for (int r = 0; r < kFlashWarpRows; ++r) {
    const int row = warp * kFlashWarpRows + r;
    if (row >= rows) break;
    const float inverse = 1.0f / sum[r];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + i * kWarp < D)
        out.At(first + row, head)[lane + i * kWarp] = FromFloat<A>(acc[r][i] * inverse);
    }
  }
}

template <int D, typename A, typename P>
void AllowFlashShared() {
  Check(cudaFuncSetAttribute(PrefillAttentionKernel<D, A, P>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(sizeof(FlashShared<D>))),
        "raising the attention kernel's shared memory");
}

inline void PreparePrefillAttention() {
  AllowFlashShared<256, float, bf16>();
  AllowFlashShared<256, float, float>();
  AllowFlashShared<256, bf16, bf16>();
  AllowFlashShared<256, bf16, float>();
}

template <typename A, typename P>
void LaunchPrefillAttention(const ops::Attention& op, const LaunchContext& ctx) {
  const int heads = static_cast<int>(op.q.dim(1)), kv_heads = static_cast<int>(op.k_pages.dim(1));
  const int rows = static_cast<int>(op.q.rows());
  const int sequences = static_cast<int>(op.sequences.state_slot.rows());
  // A decode step has one row a sequence; a chunk may give all its rows to one.
  const int longest = rows == sequences ? 1 : rows;
  const dim3 grid(CeilDiv(longest, kFlashRows), heads, sequences), block(kFlashWarps * kWarp);
  DispatchSize<16, 32, 64, 128, 256>(op.q.dim(2), "Attention: head_dim", [&](auto d) {
    constexpr int kDim = decltype(d)::value;
    Launch(ctx, PrefillAttentionKernel<kDim, A, P>, grid, block, sizeof(FlashShared<kDim>),
           MakeView<A>(op.out), MakeView<const A>(op.q), op.k_pages.As<const P>(),
           op.v_pages.As<const P>(), op.lengths.As<int>(), MakeBlockTable(op.sequences),
           op.sequences.query_start.As<int>(), heads / kv_heads, kv_heads, op.scale);
  });
}

}  // namespace qwend::cuda
