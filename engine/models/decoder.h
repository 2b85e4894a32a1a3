// The layers of every family, laid out as operators. This is the only place that knows in which
// order a decoder computes; families differ in their ModelSpec alone.
#pragma once

#include <span>

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
  std::span<const SplitK> split_k;  // of the backend; the explicit plan's decode follows it
  int vocab_limit = 0;              // ids below may be sampled
};

enum class StepPhase {
  kDecode,   // one row a sequence, every row sampled, tags as in the operator map
  kPrefill,  // a chunk of one sequence, tags prefill_<name>
};

// From token ids to the residual stream after the last layer. The fused plan's decode has five
// operators a layer, the explicit plan's one for each row of the operator map; in prefill the plans
// differ in residual_add, with its norm apart or the two fused. Throws std::invalid_argument where
// tensors do not fit, naming tag and layer.
void AppendLayers(const DecoderContext& ctx, const StepInputs& inputs, StepPhase phase,
                  DecodePlan plan, OpList& list);

enum class HeadForm {
  kPlain,  // final_rms_norm and lm_head_gemv: all logits are written
  kFused,  // norm_lm_head: logits are written for the rows that need them. Needs `sampling`.
};

// Final norm, logits and, unless `sampling` is empty, the sampled ids, for `count` rows of the step
// from `first_row` on; they take the first `count` rows of logits and of `tokens`.
void AppendHead(const DecoderContext& ctx, const TensorView& sampling, const TensorView& tokens,
                int first_row, int count, HeadForm form, OpList& list);

}  // namespace qwend
