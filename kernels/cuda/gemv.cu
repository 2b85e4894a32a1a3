#include <algorithm>

#include "kernels/cuda/gemm.cuh"
#include "kernels/cuda/load8.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {
namespace {

constexpr int kGemvWarps = 8;
constexpr int kMaxGemvRows = 8;  // rows of x that one pass over the weights serves
constexpr int kGemvUnroll = 4;   // 16-byte weight loads in flight per lane and output row

// Where a Gemv's sums go: to `out` with the bias, or unrounded to part `blockIdx.y` of `partials`.
template <typename O>
struct GemvOutput {
  View<O> out;
  float* partials = nullptr;  // [splits, T, N]
  Vector bias;
};

// One block: kGemvWarps / KWarps groups of R output rows over one share of K; one warp: R rows over
// every KWarps-th 256-element piece of that share, T rows of x at once. Every weight byte is read
// once per T rows, 16 bytes a lane. Bytes: N * K * 2 per pass. Bound: memory bandwidth. Order of
// one sum: lane chains, butterfly, warps, parts.
template <int T, int R, int KWarps, typename A, typename O>
__global__ void __launch_bounds__(kGemvWarps* kWarp)
    GemvKernel(GemvOutput<O> to, View<const A> x, const bf16* weight, int n, int k, int rows) {
  constexpr int kGroups = kGemvWarps / KWarps;
  constexpr int kPiece = kWarp * 8;
  __shared__ float parts[KWarps][kGroups][T][R];

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = warp / KWarps, k_warp = warp % KWarps;
  const int n0 = (blockIdx.x * kGroups + group) * R;
  const int t0 = blockIdx.z * kMaxGemvRows;
  const int splits = gridDim.y, pieces = CeilDiv(k, kPiece), share = CeilDiv(pieces, splits);
  const int end = min((static_cast<int>(blockIdx.y) + 1) * share * kPiece, k);

  constexpr int kStep = KWarps * kPiece;
  const auto load = [&](uint4(&w)[kGemvUnroll][R], int base) {
#pragma unroll
    for (int u = 0; u < kGemvUnroll; ++u) {
      const int at = base + u * kStep;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        w[u][r] = at < end && n0 + r < n
                      ? LoadStreaming(weight + static_cast<int64_t>(n0 + r) * k + at)
                      : make_uint4(0, 0, 0, 0);
      }
    }
  };
  // Weights do not depend on the kernel before: the first are on their way while it still runs.
  int base = (blockIdx.y * share + k_warp) * kPiece + lane * 8;
  uint4 w[kGemvUnroll][R];
  load(w, base);
  WaitForPrevious();

  float acc[T][R] = {};
  while (base < end) {
#pragma unroll
    for (int u = 0; u < kGemvUnroll; ++u) {
      const int at = base + u * kStep;
      if (at >= end) break;
#pragma unroll
      for (int t = 0; t < T; ++t) {
        if (T > 1 && t0 + t >= rows) break;
        const Eight xs = LoadEight(x.At(t0 + t) + at);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const Eight ws = Widen(w[u][r]);
#pragma unroll
          for (int i = 0; i < 8; ++i) acc[t][r] = fmaf(ws.v[i], xs.v[i], acc[t][r]);
        }
      }
    }
    base += kStep * kGemvUnroll;
    if (base < end) load(w, base);
  }
#pragma unroll
  for (int t = 0; t < T; ++t) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const float sum = WarpSum(acc[t][r]);
      if (lane == 0) parts[k_warp][group][t][r] = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kGroups * T * R; i += blockDim.x) {
    const int r = i % R, g = i / R % kGroups, t = i / (R * kGroups);
    const int row = (blockIdx.x * kGroups + g) * R + r, token = t0 + t;
    if (row >= n || token >= rows) continue;
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < KWarps; ++p) sum += parts[p][g][t][r];
    if (splits > 1) {
      to.partials[(static_cast<int64_t>(blockIdx.y) * rows + token) * n + row] = sum;
    } else {
      to.out.At(token)[row] = FromFloat<O>(to.bias ? sum + to.bias[row] : sum);
    }
  }
}

// Any weight type and any K: one warp per output row and row of x, element by element.
template <typename W, typename A, typename O>
__global__ void GemvGenericKernel(GemvOutput<O> to, View<const A> x, const W* weight, int n, int k,
                                  int rows) {
  WaitForPrevious();
  const int row = blockIdx.x * kGemvWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp,
            token = blockIdx.z;
  if (row >= n) return;
  const int splits = gridDim.y, share = CeilDiv(k, splits);
  const int begin = blockIdx.y * share, end = min(begin + share, k);
  float sum = 0.0f;
  for (int i = begin + lane; i < end; i += kWarp) {
    sum = fmaf(ToFloat(weight[static_cast<int64_t>(row) * k + i]), ToFloat(x.At(token)[i]), sum);
  }
  sum = WarpSum(sum);
  if (lane != 0) return;
  if (splits > 1) {
    to.partials[(static_cast<int64_t>(blockIdx.y) * rows + token) * n + row] = sum;
  } else {
    to.out.At(token)[row] = FromFloat<O>(to.bias ? sum + to.bias[row] : sum);
  }
}

// One thread per output: adds the parts in order. Bytes: splits * T * N * 4 in, T * N out.
template <typename O>
__global__ void SplitKReduceKernel(View<O> out, const float* partials, Vector bias, int splits,
                                   int rows, int n) {
  WaitForPrevious();
  const int i = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (i >= n) return;
  float sum = 0.0f;
  for (int p = 0; p < splits; ++p)
    sum += partials[(static_cast<int64_t>(p) * rows + token) * n + i];
  out.At(token)[i] = FromFloat<O>(bias ? sum + bias[i] : sum);
}

template <int R, int KWarps, typename A, typename O>
void LaunchGemv(const ops::Gemv& op, const GemvOutput<O>& to, const LaunchContext& ctx) {
  const int n = static_cast<int>(op.weight.rows()), k = static_cast<int>(op.weight.cols());
  const int rows = static_cast<int>(op.x.rows());
  const dim3 grid(CeilDiv(n, R * kGemvWarps / KWarps), op.splits, CeilDiv(rows, kMaxGemvRows));
  const dim3 block(kGemvWarps * kWarp);
  const auto x = MakeView<const A>(op.x);
  const auto* weight = op.weight.As<const bf16>();
  if (rows == 1) {
    Launch(ctx, GemvKernel<1, R, KWarps, A, O>, grid, block, 0, to, x, weight, n, k, rows);
  } else if (rows == 2) {
    Launch(ctx, GemvKernel<2, R, KWarps, A, O>, grid, block, 0, to, x, weight, n, k, rows);
  } else if (rows <= 4) {
    Launch(ctx, GemvKernel<4, R, KWarps, A, O>, grid, block, 0, to, x, weight, n, k, rows);
  } else {
    Launch(ctx, GemvKernel<8, R, KWarps, A, O>, grid, block, 0, to, x, weight, n, k, rows);
  }
}

template <typename A, typename O>
void RunGemv(const ops::Gemv& op, const LaunchContext& ctx) {
  const int n = static_cast<int>(op.weight.rows()), k = static_cast<int>(op.weight.cols());
  const int rows = static_cast<int>(op.x.rows());
  const GemvOutput<O> to{MakeView<O>(op.out), op.partials.As<float>(), MakeVector(op.bias)};
  const bool vectors =
      k % 8 == 0 && op.x.strides[0] % 8 == 0 && reinterpret_cast<uintptr_t>(op.x.data) % 16 == 0;
  if (op.weight.dtype == DType::kBF16 && vectors) {
    if (rows > kMaxDecodeRows && op.splits == 1) {
      LaunchGemm<A, O>(to.out, MakeView<const A>(op.x), op.weight.As<const bf16>(), to.bias, rows,
                       n, k, ctx);
    } else if (n >= 16384) {
      LaunchGemv<4, 1, A, O>(op, to, ctx);
    } else if (n >= 3072) {
      LaunchGemv<2, 1, A, O>(op, to, ctx);
    } else {
      LaunchGemv<1, 2, A, O>(op, to, ctx);
    }
    return;
  }
  const dim3 grid(CeilDiv(n, kGemvWarps), op.splits, rows), block(kGemvWarps * kWarp);
  const auto x = MakeView<const A>(op.x);
  switch (op.weight.dtype) {
    case DType::kBF16:
      return Launch(ctx, GemvGenericKernel<bf16, A, O>, grid, block, 0, to, x,
                    op.weight.As<const bf16>(), n, k, rows);
    case DType::kF16:
      return Launch(ctx, GemvGenericKernel<__half, A, O>, grid, block, 0, to, x,
                    op.weight.As<const __half>(), n, k, rows);
    default:
      return Launch(ctx, GemvGenericKernel<float, A, O>, grid, block, 0, to, x,
                    op.weight.As<const float>(), n, k, rows);
  }
}

}  // namespace

// `qwend-bench --sweep=splitk` on an H200: with a block's warps sharing K already, the reduction
// costs more than a second part saves, for every matrix of Qwen3.5-0.8B and all but one of the
// article's geometry.
std::vector<SplitK> SplitKTable() { return {{.rows = 896, .cols = 4864, .parts = 2}}; }

void Run(const ops::Gemv& op, const LaunchContext& ctx) {
  Require(op.weight.layout == Layout::kRowMajor,
          "Gemv: the CUDA backend reads row-major weights only");
  const DType out = op.splits > 1 ? DType::kF32 : op.out.dtype;
  DispatchActivation(op.x.dtype, "Gemv", [&](auto a) {
    DispatchActivation(out, "Gemv", [&](auto o) { RunGemv<decltype(a), decltype(o)>(op, ctx); });
  });
}

void Run(const ops::SplitKReduce& op, const LaunchContext& ctx) {
  const int splits = static_cast<int>(op.partials.dim(0)),
            rows = static_cast<int>(op.partials.dim(1));
  const int n = static_cast<int>(op.partials.dim(2));
  DispatchActivation(op.out.dtype, "SplitKReduce", [&](auto o) {
    using O = decltype(o);
    Launch(ctx, SplitKReduceKernel<O>, dim3(CeilDiv(n, 128), rows), dim3(128), 0,
           MakeView<O>(op.out), op.partials.As<float>(), MakeVector(op.bias), splits, rows, n);
  });
}

}  // namespace qwend::cuda
