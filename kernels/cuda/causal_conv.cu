#include "kernels/cuda/math.cuh"

namespace qwend::cuda {
namespace {

constexpr int kMaxConvWidth = 8;

// Column `t` of a sequence's input, t counted from its first row in this step; below zero the
// carried tail.
template <typename A, typename S>
__device__ __forceinline__ float InputAt(View<const A> x, const S* tail, int first_row, int t,
                                         int channel, int tails, int channels) {
  return t >= 0 ? ToFloat(x.At(first_row + t)[channel])
                : ToFloat(tail[static_cast<int64_t>(tails + t) * channels + channel]);
}

// One thread per (row, channel), rows of one sequence in blockIdx.y: convolution over the newest
// `width` columns, then SiLU. Bytes: x and out once, the tail for the first rows.
template <typename A, typename S>
__global__ void CausalConvKernel(View<A> out, View<const A> x, Vector weight, const S* state,
                                 const int* state_slot, const int* query_start,
                                 const int* row_sequence, int channels, int width) {
  WaitForPrevious();
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (channel >= channels) return;
  const int sequence = row_sequence[row], first = query_start[sequence], tails = width - 1;
  const S* tail = state + static_cast<int64_t>(state_slot[sequence]) * tails * channels;
  float sum = 0.0f;
  for (int j = 0; j < width; ++j) {
    sum = fmaf(weight[static_cast<int64_t>(channel) * width + j],
               InputAt(x, tail, first, row - first - tails + j, channel, tails, channels), sum);
  }
  out.At(row)[channel] = FromFloat<A>(Silu(sum));
}

// One thread per (sequence, channel), after all outputs are computed: the tail becomes the newest
// width - 1 columns.
template <typename A, typename S>
__global__ void ConvStateKernel(View<const A> x, S* state, const int* state_slot,
                                const int* query_start, int channels, int width) {
  WaitForPrevious();
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, sequence = blockIdx.y;
  if (channel >= channels) return;
  const int first = query_start[sequence], count = query_start[sequence + 1] - first,
            tails = width - 1;
  if (count <= 0) return;
  S* tail = state + static_cast<int64_t>(state_slot[sequence]) * tails * channels;
  float newest[kMaxConvWidth];
  for (int j = 0; j < tails; ++j)
    newest[j] = InputAt(x, tail, first, count - tails + j, channel, tails, channels);
  for (int j = 0; j < tails; ++j)
    tail[static_cast<int64_t>(j) * channels + channel] = FromFloat<S>(newest[j]);
}

// Decode, one row a sequence: both of the above in one pass of one thread per (row, channel).
template <typename A, typename S>
__global__ void ConvDecodeKernel(View<A> out, View<const A> x, Vector weight, S* state,
                                 const int* state_slot, int channels, int width) {
  WaitForPrevious();
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y, tails = width - 1;
  if (channel >= channels) return;
  S* tail = state + static_cast<int64_t>(state_slot[row]) * tails * channels + channel;
  float columns[kMaxConvWidth];
#pragma unroll
  for (int j = 0; j < kMaxConvWidth; ++j) {
    if (j < tails) columns[j] = ToFloat(tail[static_cast<int64_t>(j) * channels]);
    if (j == tails) columns[j] = ToFloat(x.At(row)[channel]);
  }
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kMaxConvWidth; ++j) {
    if (j < width) sum = fmaf(weight[static_cast<int64_t>(channel) * width + j], columns[j], sum);
    if (j > 0 && j < width) tail[static_cast<int64_t>(j - 1) * channels] = FromFloat<S>(columns[j]);
  }
  out.At(row)[channel] = FromFloat<A>(Silu(sum));
}

}  // namespace

void Run(const ops::CausalConv1d& op, const LaunchContext& ctx) {
  const int rows = static_cast<int>(op.x.rows()), channels = static_cast<int>(op.x.cols());
  const int width = static_cast<int>(op.weight.cols());
  const int sequences = static_cast<int>(op.sequences.state_slot.rows());
  Require(width <= kMaxConvWidth, "CausalConv1d: width ", width, " is above ", kMaxConvWidth);
  const dim3 block(128), row_grid(CeilDiv(channels, 128), rows),
      sequence_grid(CeilDiv(channels, 128), sequences);
  const int* slots = op.sequences.state_slot.As<int>();
  const int* starts = op.sequences.query_start.As<int>();
  DispatchActivation(op.x.dtype, "CausalConv1d", [&](auto a) {
    using A = decltype(a);
    DispatchActivation(op.state.dtype, "CausalConv1d", [&](auto s) {
      using S = decltype(s);
      const auto x = MakeView<const A>(op.x);
      const auto out = MakeView<A>(op.out);
      S* state = op.state.As<S>();
      const Vector weight = MakeVector(op.weight);
      if (rows == sequences) {
        Launch(ctx, ConvDecodeKernel<A, S>, row_grid, block, 0, out, x, weight, state, slots,
               channels, width);
        return;
      }
      Launch(ctx, CausalConvKernel<A, S>, row_grid, block, 0, out, x, weight,
             static_cast<const S*>(state), slots, starts, op.sequences.row_sequence.As<int>(),
             channels, width);
      Launch(ctx, ConvStateKernel<A, S>, sequence_grid, block, 0, x, state, slots, starts, channels,
             width);
    });
  });
}

}  // namespace qwend::cuda
