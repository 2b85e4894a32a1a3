#include "kernels/cpu/panels.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/float_types.h"

namespace qwend::cpu {
namespace {

// Steps of k packed together: a cache line of each source row.
constexpr int64_t kBlock = 16;

// One panel of bf16 pairs: a transpose of 4-byte words, [rows][pairs] -> [pairs][height].
void PackPairs(const uint16_t* src, int64_t row_stride, int64_t rows, int64_t height, int64_t cols,
               uint32_t* dst) {
  const int64_t whole = cols / 2;
  for (int64_t j0 = 0; j0 < whole; j0 += kBlock) {
    const int64_t count = std::min(kBlock, whole - j0);
    for (int64_t r = 0; r < rows; ++r) {
      uint32_t words[kBlock];
      std::memcpy(words, src + r * row_stride + 2 * j0, static_cast<size_t>(count) * 4);
      for (int64_t j = 0; j < count; ++j) dst[(j0 + j) * height + r] = words[j];
    }
  }
  if (cols % 2 != 0) {
    for (int64_t r = 0; r < rows; ++r) {
      uint16_t pair[2] = {src[r * row_stride + cols - 1], 0};
      std::memcpy(dst + whole * height + r, pair, 4);
    }
  }
  const int64_t steps = (cols + 1) / 2;
  for (int64_t r = rows; r < height; ++r) {
    for (int64_t j = 0; j < steps; ++j) dst[j * height + r] = 0;
  }
}

void PackFloats(const TensorView& host, int64_t first_row, int64_t rows, int64_t height,
                float* dst) {
  const int64_t cols = host.cols();
  for (int64_t k0 = 0; k0 < cols; k0 += kBlock) {
    const int64_t end = std::min(k0 + kBlock, cols);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = (first_row + r) * host.strides[0];
      for (int64_t k = k0; k < end; ++k) {
        dst[k * height + r] = LoadElement(host.data, host.dtype, row + k);
      }
    }
  }
  for (int64_t r = rows; r < height; ++r) {
    for (int64_t k = 0; k < cols; ++k) dst[k * height + r] = 0.0f;
  }
}

}  // namespace

void PackPanelRange(const TensorView& host, DType packed, int64_t begin, int64_t end, void* to) {
  const int64_t cols = host.cols();
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t first_row = panel * kPanelRows;
    const int64_t rows = std::min<int64_t>(kPanelRows, host.rows() - first_row);
    const int64_t height = PanelHeight(host.rows(), panel);
    char* at = static_cast<char*>(to) + PanelOffset(packed, cols, panel - begin);
    if (packed == DType::kBF16) {
      PackPairs(host.As<const uint16_t>() + first_row * host.strides[0], host.strides[0], rows,
                height, cols, reinterpret_cast<uint32_t*>(at));
    } else {
      PackFloats(host, first_row, rows, height, reinterpret_cast<float*>(at));
    }
  }
}

void PackPanels(const TensorView& host, DType packed, void* to) {
  PackPanelRange(host, packed, 0, PanelCount(host.rows()), to);
}

}  // namespace qwend::cpu
