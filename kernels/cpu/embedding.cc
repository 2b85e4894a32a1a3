#include <algorithm>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/panels.h"

namespace qwend::cpu {

void Run(const ops::EmbeddingLookup& op, const LaunchContext& ctx) {
  const int64_t hidden = op.out.cols();
  const int32_t* ids = op.token_ids.As<int32_t>();
  ctx.pool.ParallelFor(
      op.out.rows(), GrainFor(8 * hidden), [&](int64_t begin, int64_t end, int /*worker*/) {
        for (int64_t t = begin; t < end; ++t) {
          const int64_t id = std::max(ids[t], 0);
          float* out = WriteFloats(RowAt(op.out, t), op.out.dtype, hidden, ScratchSlot::kOutA);
          if (op.table.layout == Layout::kCpuPanels) {
            for (int64_t i = 0; i < hidden; ++i) out[i] = PanelElement(op.table, id, i);
          } else {
            ToFloats(RowAt(op.table, id), op.table.dtype, hidden, out);
          }
          WriteBack(out, hidden, op.out.dtype, RowAt(op.out, t));
        }
      });
}

}  // namespace qwend::cpu
