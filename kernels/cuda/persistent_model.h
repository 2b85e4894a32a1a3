// A decode step's operators as the persistent kernel's model: its shape and each layer's tensors,
// or why the kernel is not made for them.
#pragma once

#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/cuda/persistent_step.h"
#include "kernels/ops.h"

namespace qwend::cuda {

// What the list cannot be for; caught where the schedule is asked for.
struct Refusal {
  std::string why;
};
template <typename... Parts>
void Need(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream why;
  (why << ... << parts);
  throw Refusal{why.str()};
}

// A layer's five operators.
struct LayerOps {
  const ops::NormProjections* in = nullptr;
  const ops::DecodeAttention* attention = nullptr;
  const ops::LinearAttention* linear = nullptr;
  const ops::GemvResidual* out = nullptr;
  const ops::NormGateUpSilu* gate_up = nullptr;
  const ops::GemvResidual* down = nullptr;
};

// A row of a weight.
struct WeightRow {
  const TensorView* weight;
  int row;
};

// Pointers to tables are unset in the arguments; rows are those of the whole step. The operators
// are the list's, which must outlive this.
struct StepModel {
  StepArguments arguments;
  std::vector<StepLayer> layers;
  std::vector<LayerOps> operators;  // layer by layer
  const ops::NormHead* head = nullptr;
  ops::TokenSampler sampler;
};

// Throws Refusal.
StepModel ReadStepModel(std::span<const OpCall> calls);

// Which weight row makes element (head, element) of `view`, [T, heads, dim], cut out of the output
// of one of the projections. Throws Refusal where none does.
WeightRow RowOf(const ops::NormProjections& in, const TensorView& view, int head, int element);

}  // namespace qwend::cuda
