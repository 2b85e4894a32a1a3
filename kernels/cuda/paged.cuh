// Where a position's key or value lies: block table, then page, head, offset; in its row as
// page_layout.h has it.
#pragma once

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/page_layout.h"

namespace qwend::cuda {

struct BlockTable {
  const int* table = nullptr;  // [S, max_pages]
  int64_t stride = 0;
  const int* row_sequence = nullptr;  // [T]
  __device__ __forceinline__ const int* PagesOf(int row) const {
    return table + row_sequence[row] * stride;
  }
};

inline BlockTable MakeBlockTable(const StepSequences& s) {
  return {s.block_table.As<const int>(), s.block_table.strides[0], s.row_sequence.As<const int>()};
}

// Offset of (position, kv_head) in a pool [P, KH, 64, D].
__device__ __forceinline__ int64_t PagedOffset(const int* pages, int position, int kv_head,
                                               int kv_heads, int head_dim) {
  const int64_t page = pages[position / kPageTokens];
  return ((page * kv_heads + kv_head) * kPageTokens + position % kPageTokens) * head_dim;
}

}  // namespace qwend::cuda
