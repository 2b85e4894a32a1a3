// The fused plan's projections into the residual stream.
#include "kernels/cuda/projection.cuh"

namespace qwend::cuda {
namespace {

// A projection with few rows, each long, and the residual stream behind it: out = residual + x w^T.
// Block (8 weight rows; a pass of rows of x): the warps share K, each lane has its part of the
// weights in registers before the kernel before has ended. Otherwise as
// ProjectKernel.
constexpr int kWarpBlocks = 8;  // pieces of K that a warp holds
template <int MaxThreads>
__global__ void __launch_bounds__(MaxThreads, 1)
    ResidualKernel(const __grid_constant__ ProjectArguments a) {
  extern __shared__ __align__(128) uint4 columns[];
  __shared__ float parts[2][kWarp][kRoundRows][kTileRows];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int quad = lane % 4, group = lane / 4;
  const int t0 = blockIdx.y * a.pass_rows, rows = min(a.pass_rows, a.rows - t0);
  const Segment& s = a.segments[0];
  const int row = blockIdx.x * kTileRows + group;

  uint4 w[kWarpBlocks];
#pragma unroll
  for (int b = 0; b < kWarpBlocks; ++b) {
    const int at = (warp * kWarpBlocks + b) * kBlockK + quad * 8;
    w[b] = at < a.k && row < s.n ? LoadStreaming(s.weight + static_cast<int64_t>(row) * a.k + at)
                                 : make_uint4(0, 0, 0, 0);
  }
  WaitForPrevious();
  const bool finishes = warp == 0 && row < s.n;
  float residual = 0.0f;
  if (finishes && quad < rows) residual = a.residual.At(t0 + quad)[row];
  StageX<false>(a, columns, nullptr, t0, rows, warps);
  __syncthreads();
  int turn = 0;
  for (int round = 0; round < rows; round += kRoundRows, turn ^= 1) {
    const int column_row = round + group / 2, t = round + quad;
    float sums[2][4] = {};
#pragma unroll
    for (int b = 0; b < kWarpBlocks; ++b) {
      const int block = warp * kWarpBlocks + b;
      uint4 c = make_uint4(0, 0, 0, 0);
      if (column_row < rows && block * kBlockK < a.k)
        c = columns[(block * rows + column_row) * 8 + (group % 2) * 4 + quad];
      MultiplyBlock(sums[0], sums[1], w[b], c);
    }
    parts[turn][warp][quad][group] = (sums[0][0] + sums[1][0]) + (sums[0][1] + sums[1][1]);
    __syncthreads();
    if (!finishes || t >= rows) continue;
    float value = s.bias ? s.bias[row] : 0.0f;
    for (int i = 0; i < warps; ++i) value += parts[turn][i][quad][group];
    if (round > 0) residual = a.residual.At(t0 + t)[row];
    s.out.At(t0 + t)[row] = value + residual;
  }
}

template <int MaxThreads>
void LaunchResidual(ProjectArguments a, const LaunchContext& ctx) {
  static const bool shares = ShareProcessor(ResidualKernel<MaxThreads>, kSharedLimit);
  static_cast<void>(shares);
  a.pass_rows = PassRows(a, 0);
  Launch(ctx, ResidualKernel<MaxThreads>,
         dim3(CeilDiv(a.segments[0].n, kTileRows), CeilDiv(a.rows, a.pass_rows)),
         dim3(CeilDiv(a.k, kBlockK * kWarpBlocks) * kWarp), a.pass_rows * RowBytes(a), a);
}

}  // namespace

void Run(const ops::GemvResidual& op, const LaunchContext& ctx) {
  if (!Fits(op.gemv, ctx) || op.add.a.dtype != DType::kF32) return RunParts(op, ctx);
  ProjectArguments a = MakeArguments(op.gemv.x);
  a.segments[0] = MakeSegment(op.gemv, op.add.out);
  a.count = 1;
  a.residual = MakeView<const float>(op.add.a);
  if (a.k <= 640 / kWarp * kWarpBlocks * kBlockK) return LaunchResidual<640>(a, ctx);
  LaunchResidual<1024>(a, ctx);
}

}  // namespace qwend::cuda
