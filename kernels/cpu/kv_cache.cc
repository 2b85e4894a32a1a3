#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"

namespace qwend::cpu {
namespace {

void PutRow(const TensorView& from, const TensorView& pages, int64_t t, int64_t h, int32_t slot) {
  const int64_t dim = from.cols();
  void* to = static_cast<char*>(RowAt(pages, slot / kPageTokens, h, slot % kPageTokens));
  const float* row = ReadFloats(RowAt(from, t, h), from.dtype, dim, ScratchSlot::kInA);
  FromFloats(row, dim, pages.dtype, to);
}

}  // namespace

void Run(const ops::CacheMask& op, const LaunchContext& /*ctx*/) {
  const int32_t* positions = op.sequences.positions.As<int32_t>();
  const int32_t* row_sequence = op.sequences.row_sequence.As<int32_t>();
  for (int64_t t = 0; t < op.slots.rows(); ++t) {
    const int32_t position = positions[t];
    const int32_t* pages =
        static_cast<const int32_t*>(RowAt(op.sequences.block_table, row_sequence[t]));
    op.slots.As<int32_t>()[t] =
        pages[position / kPageTokens] * kPageTokens + position % kPageTokens;
    op.lengths.As<int32_t>()[t] = position + 1;
  }
}

// Parallel over heads, not rows: padded rows share a dummy slot, and one head's writes all come
// from one thread.
void Run(const ops::KvCacheUpdate& op, const LaunchContext& ctx) {
  const int32_t* slots = op.slots.As<int32_t>();
  const int64_t work = op.k.rows() * op.k.cols() * 2;
  ctx.pool.ParallelFor(op.k.dim(1), GrainFor(work), [&](int64_t begin, int64_t end, int) {
    for (int64_t h = begin; h < end; ++h) {
      for (int64_t t = 0; t < op.k.rows(); ++t) {
        PutRow(op.k, op.k_pages, t, h, slots[t]);
        PutRow(op.v, op.v_pages, t, h, slots[t]);
      }
    }
  });
}

}  // namespace qwend::cpu
