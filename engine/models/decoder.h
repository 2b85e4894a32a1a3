// The layers of every family, laid out as operators. This is the only place that knows in which
// order a decoder computes; families differ in their ModelSpec alone.
#pragma once

#include "engine/engine.h"
#include "engine/models/model_spec.h"
#include "engine/models/model_tensors.h"
#include "engine/op_list.h"
#include "engine/step_buffers.h"

namespace qwend {

// What the operators of a step are wired to. All of it outlives the lists.
struct DecoderContext {
  const ModelSpec& spec;
  const ModelWeights& weights;
  const std::vector<LayerCache>& caches;
  const Activations& activations;
  const Workspace& workspace;
  int vocab_limit = 0;  // ids below may be sampled
};

enum class StepPhase {
  kDecode,   // one row a sequence, every row sampled, tags as in the operator map
  kPrefill,  // a chunk of one sequence, tags prefill_<name>
};

// From token ids to the residual stream after the last layer. In decode, and only there, the plan
// chooses between attention in three operators and in one; in both phases it chooses between
// residual_add with its norm apart and the two fused. Throws std::invalid_argument where tensors do
// not fit, naming tag and layer.
void AppendLayers(const DecoderContext& ctx, const StepInputs& inputs, StepPhase phase,
                  DecodePlan plan, OpList& list);

// Final norm, logits and, unless `sampling` is empty, the sampled token, for `count` rows of the
// step from `first_row` on; they take the first `count` rows of logits and tokens. Rows that
// AppendLayers has already normed (FinalNormFused) go to the head as they are.
void AppendHead(const DecoderContext& ctx, const TensorView& sampling, int first_row, int count,
                bool normed, OpList& list);

// Whether AppendLayers leaves the final norm done: the last residual_add of a fused decode step
// carries it.
bool FinalNormFused(StepPhase phase, DecodePlan plan);

}  // namespace qwend
