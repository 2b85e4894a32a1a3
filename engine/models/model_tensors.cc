#include "engine/models/model_tensors.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace qwend {
namespace {

class SlotTable {
 public:
  std::vector<WeightSlot> slots;
  std::string prefix;  // of the names that follow

  void Packed(TensorView& view, const char* name, int64_t rows, int64_t cols,
              TensorRole role = TensorRole::kProjection) {
    slots.push_back({&view, {{prefix + name, {rows, cols}, role}}, true});
  }
  // Two projections of the same input, stacked.
  void Stacked(TensorView& view, const char* first, const char* second, int64_t rows_each,
               int64_t cols) {
    Packed(view, first, rows_each, cols);
    slots.back().parts.push_back({prefix + second, {rows_each, cols}, TensorRole::kProjection});
  }
  void Plain(TensorView& view, const char* name, std::vector<int64_t> shape, TensorRole role) {
    slots.push_back({&view, {{prefix + name, std::move(shape), role}}, false});
  }
};

void AddFullAttention(const ModelSpec& s, LayerWeights& w, SlotTable& t) {
  const int64_t q = int64_t{s.num_heads} * s.head_dim;
  const int64_t kv = int64_t{s.num_kv_heads} * s.head_dim;
  const int64_t q_rows = s.output_gate ? 2 * q : q;
  t.Packed(w.q_proj, "self_attn.q_proj.weight", q_rows, s.hidden);
  t.Packed(w.k_proj, "self_attn.k_proj.weight", kv, s.hidden);
  t.Packed(w.v_proj, "self_attn.v_proj.weight", kv, s.hidden);
  t.Packed(w.o_proj, "self_attn.o_proj.weight", s.hidden, q);
  if (s.qkv_bias) {
    t.Plain(w.q_bias, "self_attn.q_proj.bias", {q_rows}, TensorRole::kBias);
    t.Plain(w.k_bias, "self_attn.k_proj.bias", {kv}, TensorRole::kBias);
    t.Plain(w.v_bias, "self_attn.v_proj.bias", {kv}, TensorRole::kBias);
  }
  if (s.output_bias) t.Plain(w.o_bias, "self_attn.o_proj.bias", {s.hidden}, TensorRole::kBias);
  if (s.qk_norm) {
    t.Plain(w.q_norm, "self_attn.q_norm.weight", {s.head_dim}, TensorRole::kNorm);
    t.Plain(w.k_norm, "self_attn.k_norm.weight", {s.head_dim}, TensorRole::kNorm);
  }
}

void AddLinearAttention(const ModelSpec& s, LayerWeights& w, SlotTable& t) {
  const int64_t value = int64_t{s.linear_value_heads} * s.linear_value_dim;
  const int64_t channels = s.conv_channels();
  t.Packed(w.in_proj_qkv, "linear_attn.in_proj_qkv.weight", channels, s.hidden);
  t.Packed(w.in_proj_z, "linear_attn.in_proj_z.weight", value, s.hidden);
  t.Stacked(w.in_proj_ba, "linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight",
            s.linear_value_heads, s.hidden);
  t.Packed(w.out_proj, "linear_attn.out_proj.weight", s.hidden, value);
  t.Plain(w.conv, "linear_attn.conv1d.weight", {channels, 1, s.conv_width}, TensorRole::kConv);
  t.Plain(w.a_log, "linear_attn.A_log", {s.linear_value_heads}, TensorRole::kALog);
  t.Plain(w.dt_bias, "linear_attn.dt_bias", {s.linear_value_heads}, TensorRole::kDtBias);
  t.Plain(w.gated_norm, "linear_attn.norm.weight", {s.linear_value_dim}, TensorRole::kGatedNorm);
}

}  // namespace

int64_t WeightSlot::rows() const {
  int64_t n = 0;
  for (const TensorSpec& part : parts) n += part.shape[0];
  return n;
}

int64_t WeightSlot::cols() const { return parts[0].shape.size() == 1 ? 1 : parts[0].shape.back(); }

std::vector<WeightSlot> WeightSlots(const ModelSpec& spec, ModelWeights& weights) {
  weights.layers.resize(spec.layers.size());
  SlotTable t;
  t.Packed(weights.embedding, "embed_tokens.weight", spec.vocab_size, spec.hidden,
           TensorRole::kEmbedding);
  if (!spec.tied_embeddings) {
    t.Packed(weights.lm_head, "lm_head.weight", spec.vocab_size, spec.hidden);
  }
  t.Plain(weights.final_norm, "norm.weight", {spec.hidden}, TensorRole::kNorm);
  for (int i = 0; i < spec.num_layers(); ++i) {
    LayerWeights& w = weights.layers[i];
    t.prefix = absl::StrCat("layers.", i, ".");
    t.Plain(w.input_norm, "input_layernorm.weight", {spec.hidden}, TensorRole::kNorm);
    if (spec.layers[i] == LayerKind::kFullAttention) {
      AddFullAttention(spec, w, t);
    } else {
      AddLinearAttention(spec, w, t);
    }
    t.Plain(w.post_norm, "post_attention_layernorm.weight", {spec.hidden}, TensorRole::kNorm);
    t.Packed(w.gate_proj, "mlp.gate_proj.weight", spec.intermediate, spec.hidden);
    t.Packed(w.up_proj, "mlp.up_proj.weight", spec.intermediate, spec.hidden);
    t.Packed(w.down_proj, "mlp.down_proj.weight", spec.hidden, spec.intermediate);
  }
  return std::move(t.slots);
}

std::vector<TensorSpec> ModelTensors(const ModelSpec& spec) {
  ModelWeights unused;
  std::vector<TensorSpec> tensors;
  for (WeightSlot& slot : WeightSlots(spec, unused)) {
    for (TensorSpec& part : slot.parts) tensors.push_back(std::move(part));
  }
  return tensors;
}

int64_t SlotBytes(const WeightSlot& slot, const ModelSpec& spec, const Backend& backend) {
  if (slot.packed) return backend.PackedBytes(spec.weight_type, slot.rows(), slot.cols());
  return slot.rows() * slot.cols() * SizeOf(DType::kF32);
}

}  // namespace qwend
