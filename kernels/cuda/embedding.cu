#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {
namespace {

// One block a row: copies `hidden` elements of the row's table entry. Bytes: T * hidden * (weight +
// activation).
template <typename W, typename A>
__global__ void EmbeddingLookupKernel(View<A> out, View<const W> table, const int* token_ids,
                                      int hidden) {
  WaitForPrevious();
  const int row = blockIdx.x;
  const W* from = table.At(max(token_ids[row], 0));
  A* to = out.At(row);
  for (int i = threadIdx.x; i < hidden; i += blockDim.x) to[i] = FromFloat<A>(ToFloat(from[i]));
}

}  // namespace

void Run(const ops::EmbeddingLookup& op, const LaunchContext& ctx) {
  Require(op.table.layout == Layout::kRowMajor,
          "EmbeddingLookup: the CUDA backend reads row-major tables only");
  const int hidden = static_cast<int>(op.table.cols());
  DispatchActivation(op.out.dtype, "EmbeddingLookup", [&](auto a) {
    using A = decltype(a);
    DispatchActivation(op.table.dtype, "EmbeddingLookup", [&](auto w) {
      using W = decltype(w);
      Launch(ctx, EmbeddingLookupKernel<W, A>, dim3(op.out.rows()), dim3(256), 0,
             MakeView<A>(op.out), MakeView<const W>(op.table), op.token_ids.As<int>(), hidden);
    });
  });
}

}  // namespace qwend::cuda
