#include "engine/step_buffers.h"

#include <algorithm>

#include "engine/models/model_tensors.h"

namespace qwend {

StepSizes::StepSizes(const MemoryPlan& plan, const BackendInfo& info)
    : chunk(plan.prefill_chunk_tokens),
      max_context(plan.max_context_tokens),
      max_pages((plan.max_context_tokens + kPageTokens - 1) / kPageTokens),
      pages(plan.kv_pages + 1),
      slots(plan.max_sequences + 1),
      explicit_plan(plan.decode_plan == DecodePlan::kExplicit),
      activation(info.activation_type),
      kv(info.kv_type),
      conv(info.conv_type),
      split_k(info.split_k) {
  int bucket = 1;
  for (; bucket < plan.max_sequences; bucket *= 2) buckets.push_back(bucket);
  buckets.push_back(bucket);
  max_bucket = bucket;
  max_rows = std::max(chunk, max_bucket);
}

std::vector<LayerCache> LayOutKv(const ModelSpec& spec, const StepSizes& sizes,
                                 MemoryCursor& cursor) {
  std::vector<LayerCache> caches(spec.layers.size());
  for (size_t i = 0; i < caches.size(); ++i) {
    if (spec.layers[i] != LayerKind::kFullAttention) continue;
    for (TensorView* pages : {&caches[i].k_pages, &caches[i].v_pages}) {
      *pages =
          cursor.Tensor(sizes.kv, {sizes.pages, spec.num_kv_heads, kPageTokens, spec.head_dim});
    }
  }
  return caches;
}

void LayOutStates(const ModelSpec& spec, const StepSizes& sizes, MemoryCursor& cursor,
                  std::vector<LayerCache>& caches) {
  for (size_t i = 0; i < caches.size(); ++i) {
    if (spec.layers[i] != LayerKind::kLinearAttention) continue;
    caches[i].recurrent = cursor.Tensor(DType::kF32, {sizes.slots, spec.linear_value_heads,
                                                      spec.linear_key_dim, spec.linear_value_dim});
    caches[i].conv =
        cursor.Tensor(sizes.conv, {sizes.slots, spec.conv_width - 1, spec.conv_channels()});
  }
}

Activations LayOutActivations(const ModelSpec& spec, const StepSizes& sizes, MemoryCursor& cursor) {
  Activations a;
  const int64_t rows = sizes.max_rows;
  const auto take = [&](int64_t cols) { return cursor.Tensor(sizes.activation, {rows, cols}); };
  a.hidden = take(spec.hidden);
  a.normed = take(spec.hidden);
  a.block_out = take(spec.hidden);
  a.slots = cursor.Tensor(DType::kI32, {rows});
  a.lengths = cursor.Tensor(DType::kI32, {rows});

  const int64_t shared = cursor.used();
  int64_t end = shared;
  if (spec.num_full_attention_layers() > 0) {
    const int64_t q = int64_t{spec.num_heads} * spec.head_dim;
    const int64_t kv = int64_t{spec.num_kv_heads} * spec.head_dim;
    a.q = take(spec.output_gate ? 2 * q : q);
    a.k = take(kv);
    a.v = take(kv);
    a.attended = take(q);
    end = std::max(end, cursor.used());
    cursor.Rewind(shared);
  }
  if (spec.num_full_attention_layers() < spec.num_layers()) {
    const int64_t value = int64_t{spec.linear_value_heads} * spec.linear_value_dim;
    a.qkv = take(spec.conv_channels());
    a.conv_out = take(spec.conv_channels());
    a.z = take(value);
    a.ba = take(2 * spec.linear_value_heads);
    a.beta = cursor.Tensor(DType::kF32, {rows, spec.linear_value_heads});
    a.log_decay = cursor.Tensor(DType::kF32, {rows, spec.linear_value_heads});
    a.delta_out = take(value);
    a.gated = take(value);
    end = std::max(end, cursor.used());
    cursor.Rewind(shared);
  }
  a.gate = take(spec.intermediate);
  a.up = take(spec.intermediate);
  a.act = take(spec.intermediate);
  cursor.Rewind(std::max(end, cursor.used()));
  return a;
}

namespace {

// Partial sums of one row of x, for the projection that has the most.
int64_t PartialElements(const ModelSpec& spec, const StepSizes& sizes) {
  int64_t most = 0;
  ModelWeights unused;
  for (const WeightSlot& slot : WeightSlots(spec, unused)) {
    const int parts = GemvSplits(sizes.split_k, slot.rows(), slot.cols());
    if (slot.packed && parts > 1) most = std::max(most, parts * slot.rows());
  }
  return most;
}

}  // namespace

Workspace LayOutWorkspace(const ModelSpec& spec, const StepSizes& sizes, MemoryCursor& cursor) {
  Workspace w;
  const int64_t half = spec.rotary_dim / 2;
  w.rope_cos = cursor.Tensor(DType::kF32, {sizes.max_context, half});
  w.rope_sin = cursor.Tensor(DType::kF32, {sizes.max_context, half});
  if (sizes.explicit_plan) {
    w.scores = cursor.Tensor(DType::kF32, {sizes.max_bucket, spec.num_heads, sizes.max_context});
    w.partials = cursor.Tensor(DType::kF32, {sizes.max_bucket * PartialElements(spec, sizes)});
  }
  w.logits = cursor.Tensor(DType::kF32, {sizes.max_bucket, spec.vocab_size});
  w.tokens = cursor.Tensor(DType::kI32, {1});
  w.best = cursor.Tensor(DType::kU8, {sizes.max_bucket, 8});
  w.inputs_bytes = std::max(LayOutInputs(sizes, sizes.max_bucket, sizes.max_bucket, nullptr).bytes,
                            LayOutInputs(sizes, sizes.chunk, 1, nullptr).bytes);
  w.inputs = cursor.Take(w.inputs_bytes);
  return w;
}

StepInputs LayOutInputs(const StepSizes& sizes, int rows, int sequences, void* base) {
  MemoryCursor cursor(base);
  StepInputs in;
  in.token_ids = cursor.Tensor(DType::kI32, {rows});
  in.sampling = cursor.Tensor(DType::kU8, {sequences, sizeof(SamplingRow)});
  in.sequences.query_start = cursor.Tensor(DType::kI32, {sequences + 1});
  in.sequences.row_sequence = cursor.Tensor(DType::kI32, {rows});
  in.sequences.positions = cursor.Tensor(DType::kI32, {rows});
  in.sequences.block_table = cursor.Tensor(DType::kI32, {sequences, sizes.max_pages});
  in.sequences.state_slot = cursor.Tensor(DType::kI32, {sequences});
  in.bytes = cursor.used();
  return in;
}

}  // namespace qwend
