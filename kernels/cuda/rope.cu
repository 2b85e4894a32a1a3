#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {
namespace {

// One block a row: rotates element pairs (i, i + half) of every query and key head, angles from the
// tables. Bytes: the rotated part of q and k, read and written.
template <typename A>
__global__ void RopeEmbedKernel(View<A> q, int heads, View<A> k, int kv_heads, const float* cos,
                                const float* sin, const int* positions, int half) {
  WaitForPrevious();
  const int row = blockIdx.x;
  const int64_t angle = static_cast<int64_t>(positions[row]) * half;
  for (int i = threadIdx.x; i < (heads + kv_heads) * half; i += blockDim.x) {
    const int head = i / half, j = i % half;
    A* x = head < heads ? q.At(row, head) : k.At(row, head - heads);
    const float c = cos[angle + j], s = sin[angle + j];
    const float first = ToFloat(x[j]), second = ToFloat(x[j + half]);
    x[j] = FromFloat<A>(first * c - second * s);
    x[j + half] = FromFloat<A>(second * c + first * s);
  }
}

}  // namespace

void Run(const ops::RopeEmbed& op, const LaunchContext& ctx) {
  const int half = static_cast<int>(op.cos.cols());
  const int heads = static_cast<int>(op.q.dim(1)), kv_heads = static_cast<int>(op.k.dim(1));
  DispatchActivation(op.q.dtype, "RopeEmbed", [&](auto a) {
    using A = decltype(a);
    Launch(ctx, RopeEmbedKernel<A>, dim3(op.q.rows()), dim3(256), 0, MakeView<A>(op.q), heads,
           MakeView<A>(op.k), kv_heads, op.cos.As<float>(), op.sin.As<float>(),
           op.positions.As<int>(), half);
  });
}

}  // namespace qwend::cuda
