// The CPU's packed weight layout (Layout::kCpuPanels).
//
// Rows are taken kPanelRows at a time, and inside a panel K runs outermost, so that a Gemv reads
// one contiguous stream and vector lanes are output rows: each output is one chain of fused
// multiply-adds in order of k, the same in every instruction set, for every number of rows, alone
// or in a batch. The last panel may be narrower: its height is rounded up to kPanelStep, and zero
// rows fill it.
//   bf16: [panels][ceil(K / 2)][height][2]  (a pair of k beside each other; a missing last k is 0)
//   f32:  [panels][K][height]
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/tensor.h"

namespace qwend::cpu {

constexpr int kPanelRows = 32;
constexpr int kPanelStep = 16;

constexpr int64_t PanelCount(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// Rows that panel `panel` stores: kPanelRows, or fewer in the last one.
constexpr int64_t PanelHeight(int64_t rows, int64_t panel) {
  const int64_t left = rows - panel * kPanelRows;
  return left >= kPanelRows ? kPanelRows : (left + kPanelStep - 1) / kPanelStep * kPanelStep;
}

// Bytes of one row of storage: what a panel takes for each of its rows.
constexpr int64_t PanelRowBytes(DType packed, int64_t cols) {
  return packed == DType::kBF16 ? (cols + 1) / 2 * 4 : cols * 4;
}

constexpr int64_t PanelOffset(DType packed, int64_t cols, int64_t panel) {
  return panel * kPanelRows * PanelRowBytes(packed, cols);
}

// `packed` is kBF16 or kF32.
constexpr int64_t PanelBytes(DType packed, int64_t rows, int64_t cols) {
  return (rows + kPanelStep - 1) / kPanelStep * kPanelStep * PanelRowBytes(packed, cols);
}

// What a host matrix of this type is packed as: bf16 stays, f16 and f32 become f32.
constexpr DType PackedType(DType host) { return host == DType::kBF16 ? host : DType::kF32; }

// Panels [begin, end) of `host`, row-major bf16 [N, K] for packed bf16, bf16, f16 or f32 for packed
// f32. `to` is where panel `begin` goes.
void PackPanelRange(const TensorView& host, DType packed, int64_t begin, int64_t end, void* to);

// All panels: PanelBytes(packed, N, K) at `to`.
void PackPanels(const TensorView& host, DType packed, void* to);

// Element [row, col] of a packed matrix.
inline float PanelElement(const TensorView& packed, int64_t row, int64_t col) {
  const int64_t panel = row / kPanelRows;
  const int64_t height = PanelHeight(packed.rows(), panel);
  const char* base = packed.As<const char>() + PanelOffset(packed.dtype, packed.cols(), panel);
  const int64_t r = row - panel * kPanelRows;
  if (packed.dtype == DType::kF32) {
    return reinterpret_cast<const float*>(base)[col * height + r];
  }
  const uint32_t bits =
      reinterpret_cast<const uint16_t*>(base)[(col / 2 * height + r) * 2 + col % 2];
  return std::bit_cast<float>(bits << 16);
}

}  // namespace qwend::cpu
