#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/page_layout.h"

namespace qwend::cuda {
namespace {

// One thread a row: from position and block table to the row's page slot and visible length.
__global__ void CacheMaskKernel(int* slots, int* lengths, const int* positions,
                                const int* row_sequence, const int* block_table,
                                int64_t table_stride, int rows) {
  WaitForPrevious();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int position = positions[row];
  const int page = block_table[row_sequence[row] * table_stride + position / kPageTokens];
  slots[row] = page * kPageTokens + position % kPageTokens;
  lengths[row] = position + 1;
}

// One block per (row, key-value head): writes the head's key and value to the row's page slot.
// Bytes: 2 * T * KH * D * (activation + page element).
template <typename A, typename P>
__global__ void KvCacheUpdateKernel(View<const A> k, View<const A> v, P* k_pages, P* v_pages,
                                    const int* slots, int kv_heads, int head_dim) {
  WaitForPrevious();
  const int row = blockIdx.x, head = blockIdx.y;
  const int page = slots[row] / kPageTokens, offset = slots[row] % kPageTokens;
  const int64_t to =
      ((static_cast<int64_t>(page) * kv_heads + head) * kPageTokens + offset) * head_dim;
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    const int64_t at = to + PageColumn(i, offset, head_dim);
    k_pages[at] = FromFloat<P>(ToFloat(k.At(row, head)[i]));
    v_pages[at] = FromFloat<P>(ToFloat(v.At(row, head)[i]));
  }
}

}  // namespace

void Run(const ops::CacheMask& op, const LaunchContext& ctx) {
  const int rows = static_cast<int>(op.slots.rows());
  Launch(ctx, CacheMaskKernel, dim3(CeilDiv(rows, 128)), dim3(128), 0, op.slots.As<int>(),
         op.lengths.As<int>(), op.sequences.positions.As<int>(),
         op.sequences.row_sequence.As<int>(), op.sequences.block_table.As<int>(),
         op.sequences.block_table.strides[0], rows);
}

void Run(const ops::KvCacheUpdate& op, const LaunchContext& ctx) {
  const int kv_heads = static_cast<int>(op.k.dim(1)), head_dim = static_cast<int>(op.k.dim(2));
  DispatchActivation(op.k.dtype, "KvCacheUpdate", [&](auto a) {
    using A = decltype(a);
    DispatchActivation(op.k_pages.dtype, "KvCacheUpdate", [&](auto p) {
      using P = decltype(p);
      Launch(ctx, KvCacheUpdateKernel<A, P>, dim3(op.k.rows(), kv_heads), dim3(128), 0,
             MakeView<const A>(op.k), MakeView<const A>(op.v), op.k_pages.As<P>(),
             op.v_pages.As<P>(), op.slots.As<int>(), kv_heads, head_dim);
    });
  });
}

}  // namespace qwend::cuda
