// What an operator leaves behind, and how to read it: for tests and tools that look at a step from
// the outside.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/ops.h"

namespace qwend {

// One tensor that an operator wrote, under its field's name.
struct OpOutput {
  const char* name;
  TensorView view;
  // i32 [T]; set for a score matrix [T, H, max_context]: only the first lengths[t] columns of row t
  // were written.
  TensorView lengths{};
  int row_dim = 0;  // which dimension of the view counts the rows of the step
};

// Everything the operator writes, tensors changed in place included, in the order of declaration.
// Key and value pages and states are left out: they hold more than this step, and the operators
// that read them show what is in them. So are a fused operator's tensors between its parts, which
// a backend may leave unwritten; of NormHead's logits the rows that keep them are written.
std::vector<OpOutput> OutputsOf(const Op& op);

// The elements of a row-major, possibly strided view in device memory, in order. ReadFloats takes
// f32, bf16 and f16, ReadInts i32; std::invalid_argument for others. Waits for the device.
std::vector<float> ReadFloats(Backend& backend, const TensorView& view);
std::vector<int32_t> ReadInts(Backend& backend, const TensorView& view);

}  // namespace qwend
