#include "kernels/cuda/math.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {
namespace {

constexpr int kNormThreads = 512;

// The sum of squares of columns [begin, end) by the whole block; every thread gets it.
template <typename A>
__device__ float SumOfSquares(const A* x, int begin, int end, float* scratch) {
  float sum = 0.0f;
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    const float v = ToFloat(x[i]);
    sum = fmaf(v, v, sum);
  }
  return BlockSum(sum, scratch);
}

template <typename A>
__device__ void ScaleRow(A* out, const A* x, int begin, int end, float inverse_rms, Vector weight,
                         float offset) {
  for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
    out[i] = FromFloat<A>(ToFloat(x[i]) * inverse_rms * (offset + weight[i]));
  }
}

// One block a row, two passes over it, the second from L1. Bytes: x read, out written, weight read;
// latency-bound.
template <typename A>
__global__ void RmsNormKernel(View<A> out, View<const A> x, Vector weight, int hidden, float eps,
                              float offset) {
  WaitForPrevious();
  __shared__ float scratch[kWarp];
  const A* row = x.At(blockIdx.x);
  const float sum = SumOfSquares(row, 0, hidden, scratch);
  ScaleRow(out.At(blockIdx.x), row, 0, hidden, rsqrtf(sum / hidden + eps), weight, offset);
}

// Block (part, row): this part's sum of squares.
template <typename A>
__global__ void RmsNormPartialKernel(float* partial_sums, View<const A> x, int hidden) {
  WaitForPrevious();
  __shared__ float scratch[kWarp];
  const int splits = gridDim.x, part = blockIdx.x, width = CeilDiv(hidden, splits);
  const int begin = min(part * width, hidden), end = min(begin + width, hidden);
  const float sum = SumOfSquares(x.At(blockIdx.y), begin, end, scratch);
  if (threadIdx.x == 0) partial_sums[blockIdx.y * splits + part] = sum;
}

// Block (part, row): adds the row's partial sums in order and scales this part's columns.
template <typename A>
__global__ void RmsNormScaleKernel(View<A> out, View<const A> x, Vector weight,
                                   const float* partial_sums, int hidden, float eps, float offset) {
  WaitForPrevious();
  const int splits = gridDim.x, part = blockIdx.x, width = CeilDiv(hidden, splits);
  const int begin = min(part * width, hidden), end = min(begin + width, hidden);
  float sum = 0.0f;
  for (int p = 0; p < splits; ++p) sum += partial_sums[blockIdx.y * splits + p];
  ScaleRow(out.At(blockIdx.y), x.At(blockIdx.y), begin, end, rsqrtf(sum / hidden + eps), weight,
           offset);
}

// One block a row: the residual sum is written, and normalised while it is in L1. Bytes: two in,
// two out.
template <typename A>
__global__ void RmsNormResidualFusedKernel(View<A> out, View<A> sum, View<const A> a,
                                           View<const A> b, Vector weight, int hidden, float eps,
                                           float offset) {
  WaitForPrevious();
  __shared__ float scratch[kWarp];
  A* total = sum.At(blockIdx.x);
  float squares = 0.0f;
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
    total[i] = FromFloat<A>(ToFloat(a.At(blockIdx.x)[i]) + ToFloat(b.At(blockIdx.x)[i]));
    const float v = ToFloat(total[i]);
    squares = fmaf(v, v, squares);
  }
  squares = BlockSum(squares, scratch);
  ScaleRow<A>(out.At(blockIdx.x), total, 0, hidden, rsqrtf(squares / hidden + eps), weight, offset);
}

// One warp per (row, head) of q, then of k, in place.
template <typename A>
__global__ void QkNormKernel(View<A> q, int heads, Vector q_weight, View<A> k, int kv_heads,
                             Vector k_weight, int head_dim, float eps, float offset) {
  WaitForPrevious();
  const int head = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp,
            lane = threadIdx.x % kWarp;
  if (head >= heads + kv_heads) return;
  const bool is_query = head < heads;
  A* x = is_query ? q.At(blockIdx.y, head) : k.At(blockIdx.y, head - heads);
  const Vector weight = is_query ? q_weight : k_weight;
  float sum = 0.0f;
  for (int i = lane; i < head_dim; i += kWarp) sum = fmaf(ToFloat(x[i]), ToFloat(x[i]), sum);
  const float inverse_rms = rsqrtf(WarpSum(sum) / head_dim + eps);
  for (int i = lane; i < head_dim; i += kWarp) {
    x[i] = FromFloat<A>(ToFloat(x[i]) * inverse_rms * (offset + weight[i]));
  }
}

// One warp per (row, value head): plain-weight norm, then the SiLU gate.
template <typename A>
__global__ void GatedRmsNormKernel(View<A> out, View<const A> x, View<const A> z, Vector weight,
                                   int heads, int head_dim, float eps) {
  WaitForPrevious();
  const int head = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp,
            lane = threadIdx.x % kWarp;
  if (head >= heads) return;
  const A* from = x.At(blockIdx.y, head);
  const A* gate = z.At(blockIdx.y, head);
  A* to = out.At(blockIdx.y, head);
  float sum = 0.0f;
  for (int i = lane; i < head_dim; i += kWarp) sum = fmaf(ToFloat(from[i]), ToFloat(from[i]), sum);
  const float inverse_rms = rsqrtf(WarpSum(sum) / head_dim + eps);
  for (int i = lane; i < head_dim; i += kWarp) {
    to[i] = FromFloat<A>(ToFloat(from[i]) * inverse_rms * weight[i] * Silu(ToFloat(gate[i])));
  }
}

}  // namespace

void Run(const ops::RmsNorm& op, const LaunchContext& ctx) {
  const int hidden = static_cast<int>(op.x.cols());
  const dim3 rows(op.x.rows()), parts(op.splits, op.x.rows()), threads(kNormThreads);
  DispatchActivation(op.x.dtype, "RmsNorm", [&](auto t) {
    using A = decltype(t);
    const View<A> out = MakeView<A>(op.out);
    const View<const A> x = MakeView<const A>(op.x);
    const Vector weight = MakeVector(op.weight);
    if (op.splits == 1) {
      Launch(ctx, RmsNormKernel<A>, rows, threads, 0, out, x, weight, hidden, op.eps,
             op.weight_offset);
    } else {
      float* partial_sums = op.partial_sums.As<float>();
      Launch(ctx, RmsNormPartialKernel<A>, parts, threads, 0, partial_sums, x, hidden);
      Launch(ctx, RmsNormScaleKernel<A>, parts, threads, 0, out, x, weight, partial_sums, hidden,
             op.eps, op.weight_offset);
    }
  });
}

void Run(const ops::RmsNormResidualFused& op, const LaunchContext& ctx) {
  DispatchActivation(op.a.dtype, "RmsNormResidualFused", [&](auto t) {
    using A = decltype(t);
    Launch(ctx, RmsNormResidualFusedKernel<A>, dim3(op.a.rows()), dim3(kNormThreads), 0,
           MakeView<A>(op.out), MakeView<A>(op.sum), MakeView<const A>(op.a),
           MakeView<const A>(op.b), MakeVector(op.weight), static_cast<int>(op.a.cols()), op.eps,
           op.weight_offset);
  });
}

void Run(const ops::QkNorm& op, const LaunchContext& ctx) {
  const int heads = static_cast<int>(op.q.dim(1)), kv_heads = static_cast<int>(op.k.dim(1));
  constexpr int kWarps = 4;
  DispatchActivation(op.q.dtype, "QkNorm", [&](auto t) {
    using A = decltype(t);
    Launch(ctx, QkNormKernel<A>, dim3(CeilDiv(heads + kv_heads, kWarps), op.q.rows()),
           dim3(kWarps * kWarp), 0, MakeView<A>(op.q), heads, MakeVector(op.q_weight),
           MakeView<A>(op.k), kv_heads, MakeVector(op.k_weight), static_cast<int>(op.q.dim(2)),
           op.eps, op.weight_offset);
  });
}

void Run(const ops::GatedRmsNorm& op, const LaunchContext& ctx) {
  const int heads = static_cast<int>(op.x.dim(1));
  constexpr int kWarps = 4;
  DispatchActivation(op.x.dtype, "GatedRmsNorm", [&](auto t) {
    using A = decltype(t);
    Launch(ctx, GatedRmsNormKernel<A>, dim3(CeilDiv(heads, kWarps), op.x.rows()),
           dim3(kWarps * kWarp), 0, MakeView<A>(op.out), MakeView<const A>(op.x),
           MakeView<const A>(op.z), MakeVector(op.weight), heads, static_cast<int>(op.x.dim(2)),
           op.eps);
  });
}

}  // namespace qwend::cuda
