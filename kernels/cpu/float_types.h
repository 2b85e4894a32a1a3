// Element access by type.
#pragma once

#include "kernels/bf16.h"
#include "kernels/tensor.h"

namespace qwend::cpu {

inline float LoadElement(const void* data, DType type, int64_t index) {
  switch (type) {
    case DType::kBF16:
      return Bf16ToFloat(static_cast<const uint16_t*>(data)[index]);
    case DType::kF16:
      return Fp16ToFloat(static_cast<const uint16_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

}  // namespace qwend::cpu
