#include "kernels/cuda/paged.cuh"
#include "kernels/cuda/prefill_attention.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {
namespace {

constexpr int kDotWarps = 8;
constexpr int kDotBlocks = 64;  // blocks along the positions of one (row, key-value head)
constexpr int kMaxGroup = 16;   // query heads that share a key-value head
constexpr int kPvColumns = 32;  // head_dim columns of one block
constexpr int kPvLanes = kPvColumns / 2;
constexpr int kPvGroups = 64;  // positions in flight: groups of kPvLanes threads

// Block (position slice, key-value head, row): one warp per position, all query heads of the group
// at once, so that a key is read once. Loops to the row's real length. Bytes: KH * length * D * 2.
// Bound: memory bandwidth.
template <int D, typename A, typename P>
__global__ void __launch_bounds__(kDotWarps* kWarp)
    QkDotKernel(View<float> scores, View<const A> q, const P* k_pages, const int* lengths,
                BlockTable table, int group, int kv_heads, float scale) {
  WaitForPrevious();
  constexpr int kPerLane = D < kWarp ? 1 : D / kWarp;
  static_assert(kPerLane <= kPieceElements);
  const int lane = threadIdx.x % kWarp, kv_head = blockIdx.y, row = blockIdx.z;
  const bool active = lane * kPerLane < D;
  const int length = lengths[row];
  const int* pages = table.PagesOf(row);

  float query[kMaxGroup][kPerLane];
#pragma unroll
  for (int g = 0; g < kMaxGroup; ++g) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      query[g][i] = g < group && active
                        ? ToFloat(q.At(row, kv_head * group + g)[lane * kPerLane + i]) * scale
                        : 0.0f;
    }
  }
  for (int p = blockIdx.x * kDotWarps + threadIdx.x / kWarp; p < length;
       p += gridDim.x * kDotWarps) {
    const P* key =
        k_pages + PagedOffset(pages, p, kv_head, kv_heads, D) + PageColumn(lane * kPerLane, p, D);
    float k[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) k[i] = active ? ToFloat(key[i]) : 0.0f;
#pragma unroll
    for (int g = 0; g < kMaxGroup; ++g) {
      if (g >= group) break;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) sum = fmaf(query[g][i], k[i], sum);
      sum = WarpSum(sum);
      if (lane == 0) scores.At(row, kv_head * group + g)[p] = sum;
    }
  }
}

// Block (head, row): maximum, exponentials and their sum, division; three passes over length scores
// in L1/L2.
__global__ void SoftmaxMaskKernel(View<float> scores, const int* lengths) {
  WaitForPrevious();
  __shared__ float scratch[kWarp];
  float* s = scores.At(blockIdx.y, blockIdx.x);
  const int length = lengths[blockIdx.y];
  float largest = -INFINITY;
  for (int i = threadIdx.x; i < length; i += blockDim.x) largest = fmaxf(largest, s[i]);
  largest = BlockMax(largest, scratch);
  float sum = 0.0f;
  for (int i = threadIdx.x; i < length; i += blockDim.x) {
    s[i] = expf(s[i] - largest);
    sum += s[i];
  }
  const float inverse = 1.0f / BlockSum(sum, scratch);
  for (int i = threadIdx.x; i < length; i += blockDim.x) s[i] *= inverse;
}

// Block (32 columns, head, row): threads (column pair, position group), each a chain over every
// 16th position; groups are added in order at the end. Bytes: H * length * D * 2, of which GQA
// repeats come from L2.
template <typename A, typename P>
__global__ void __launch_bounds__(kPvLanes* kPvGroups)
    PvDotKernel(View<A> out, View<const float> probs, const P* v_pages, const int* lengths,
                BlockTable table, int group, int kv_heads, int head_dim) {
  WaitForPrevious();
  __shared__ float parts[kPvGroups][kPvColumns];
  const int head = blockIdx.y, row = blockIdx.z, kv_head = head / group;
  const int lane = threadIdx.x % kPvLanes, position_group = threadIdx.x / kPvLanes;
  const int column = blockIdx.x * kPvColumns + lane * 2, length = lengths[row];
  const int* pages = table.PagesOf(row);
  const float* weights = probs.At(row, head);
  float first = 0.0f, second = 0.0f;
  if (column < head_dim) {
#pragma unroll 4
    for (int p = position_group; p < length; p += kPvGroups) {
      const P* value = v_pages + PagedOffset(pages, p, kv_head, kv_heads, head_dim) +
                       PageColumn(column, p, head_dim);
      first = fmaf(weights[p], ToFloat(value[0]), first);
      second = fmaf(weights[p], ToFloat(value[1]), second);
    }
  }
  parts[position_group][lane * 2] = first;
  parts[position_group][lane * 2 + 1] = second;
  __syncthreads();
  const int c = blockIdx.x * kPvColumns + threadIdx.x;
  if (threadIdx.x >= kPvColumns || c >= head_dim) return;
  float sum = 0.0f;
  for (int g = 0; g < kPvGroups; ++g) sum += parts[g][threadIdx.x];
  out.At(row, head)[c] = FromFloat<A>(sum);
}

}  // namespace

void Run(const ops::QkDot& op, const LaunchContext& ctx) {
  const int heads = static_cast<int>(op.q.dim(1)), kv_heads = static_cast<int>(op.k_pages.dim(1));
  const int group = heads / kv_heads;
  Require(group <= kMaxGroup, "QkDot: ", group,
          " query heads share a key-value head; the CUDA backend takes ", kMaxGroup);
  DispatchActivation(op.q.dtype, "QkDot", [&](auto a) {
    using A = decltype(a);
    DispatchActivation(op.k_pages.dtype, "QkDot", [&](auto p) {
      using P = decltype(p);
      DispatchSize<16, 32, 64, 128, 256>(op.q.dim(2), "QkDot: head_dim", [&](auto d) {
        Launch(ctx, QkDotKernel<decltype(d)::value, A, P>, dim3(kDotBlocks, kv_heads, op.q.rows()),
               dim3(kDotWarps * kWarp), 0, MakeView<float>(op.scores), MakeView<const A>(op.q),
               op.k_pages.As<const P>(), op.lengths.As<int>(), MakeBlockTable(op.sequences), group,
               kv_heads, op.scale);
      });
    });
  });
}

void Run(const ops::SoftmaxMask& op, const LaunchContext& ctx) {
  Launch(ctx, SoftmaxMaskKernel, dim3(op.scores.dim(1), op.scores.rows()), dim3(1024), 0,
         MakeView<float>(op.scores), op.lengths.As<int>());
}

void Run(const ops::PvDot& op, const LaunchContext& ctx) {
  const int heads = static_cast<int>(op.out.dim(1)), head_dim = static_cast<int>(op.out.dim(2));
  const int kv_heads = static_cast<int>(op.v_pages.dim(1));
  const dim3 grid(CeilDiv(head_dim, kPvColumns), heads, op.out.rows()), block(kPvLanes * kPvGroups);
  DispatchActivation(op.out.dtype, "PvDot", [&](auto a) {
    using A = decltype(a);
    DispatchActivation(op.v_pages.dtype, "PvDot", [&](auto p) {
      using P = decltype(p);
      Launch(ctx, PvDotKernel<A, P>, grid, block, 0, MakeView<A>(op.out),
             MakeView<const float>(op.probs), op.v_pages.As<const P>(), op.lengths.As<int>(),
             MakeBlockTable(op.sequences), heads / kv_heads, kv_heads, head_dim);
    });
  });
}

void Run(const ops::Attention& op, const LaunchContext& ctx) {
  DispatchActivation(op.q.dtype, "Attention", [&](auto a) {
    DispatchActivation(op.k_pages.dtype, "Attention",
                       [&](auto p) { LaunchPrefillAttention<decltype(a), decltype(p)>(op, ctx); });
  });
}

void PrepareAttentionKernels() { PreparePrefillAttention(); }

}  // namespace qwend::cuda
