// Rows of any float type as f32. The operators compute in f32; f32 rows are used where they lie,
// and others pass through a scratch row.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace qwend::cpu {

// n elements of f32, bf16 or f16 to f32.
void ToFloats(const void* from, DType type, int64_t n, float* to);
// n elements of f32 to f32 or bf16, rounded to nearest even.
void FromFloats(const float* from, int64_t n, DType type, void* to);

// Memory of this thread, at least n floats, kept until the thread ends. Each user of the same time
// takes its own slot; a slot's content is lost when it is asked for again.
enum class ScratchSlot { kInA, kInB, kOutA, kOutB, kWeight, kWork, kWork2, kCount };
float* Scratch(ScratchSlot slot, int64_t n);

// Element [i, j, k, 0..] of a view of rank 2 and up: where its row starts.
inline void* RowAt(const TensorView& v, int64_t i, int64_t j = 0, int64_t k = 0) {
  return v.As<char>() + (i * v.strides[0] + j * v.strides[1] + k * v.strides[2]) * SizeOf(v.dtype);
}

// n elements at `data` as f32: in place when they are f32, else copied to the scratch slot.
inline const float* ReadFloats(const void* data, DType type, int64_t n, ScratchSlot slot) {
  if (type == DType::kF32) return static_cast<const float*>(data);
  float* to = Scratch(slot, n);
  ToFloats(data, type, n, to);
  return to;
}

// Where to compute n elements that belong at `data`; WriteBack brings them there when that is
// elsewhere.
inline float* WriteFloats(void* data, DType type, int64_t n, ScratchSlot slot) {
  return type == DType::kF32 ? static_cast<float*>(data) : Scratch(slot, n);
}
inline void WriteBack(const float* computed, int64_t n, DType type, void* data) {
  if (type != DType::kF32) FromFloats(computed, n, type, data);
}

// How many items make a piece that is worth a second thread, when one item costs about `work`
// multiply-adds.
inline int64_t GrainFor(int64_t work) {
  constexpr int64_t kPieceWork = 64 * 1024;
  return work >= kPieceWork ? 1 : kPieceWork / (work > 0 ? work : 1);
}

}  // namespace qwend::cpu
