// The CPU's packed weight layout (Layout::kCpuPanels).
//
// Rows are taken kPanelRows at a time, zero rows filling the last panel, and inside a panel K runs
// outermost, so that a Gemv reads one contiguous stream and vector lanes are output rows: each
// output is one chain of fused multiply-adds in order of k, the same in every instruction set, for
// every number of rows, alone or in a batch.
//   bf16: [panels][ceil(K / 2)][kPanelRows][2]   (a pair of k beside each other; a missing last k
//   is zero) f32:  [panels][K][kPanelRows]
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace qwend::cpu {

constexpr int kPanelRows = 64;

int64_t PanelBytes(DType packed, int64_t rows, int64_t cols);
void PackPanels(const TensorView& host, DType packed,
                void* to);  // host: row-major bf16, f16 or f32
float PanelElement(const TensorView& packed, int64_t row, int64_t col);

}  // namespace qwend::cpu
