#include "engine/models/decoder.h"

#include <cmath>

namespace qwend {
namespace {

// The first `rows` rows of a buffer.
TensorView Rows(const TensorView& buffer, int64_t rows) { return buffer.Slice(0, 0, rows); }

class StepBuilder {
 public:
  StepBuilder(const DecoderContext& ctx, const StepInputs& inputs, StepPhase phase, DecodePlan plan,
              OpList& list)
      : ctx_(ctx),
        spec_(ctx.spec),
        a_(ctx.activations),
        inputs_(inputs),
        phase_(phase),
        plan_(plan),
        list_(list),
        rows_(inputs.token_ids.rows()) {}

  void Layers() {
    const ModelWeights& w = ctx_.weights;
    list_.Add("cache_mask", ops::CacheMask{.slots = Rows(a_.slots, rows_),
                                           .lengths = Rows(a_.lengths, rows_),
                                           .sequences = inputs_.sequences});
    list_.Add("embedding_lookup", ops::EmbeddingLookup{.out = Rows(a_.hidden, rows_),
                                                       .table = w.embedding,
                                                       .token_ids = inputs_.token_ids});
    Norm(w.layers[0].input_norm, 0);
    const int last = spec_.num_layers() - 1;
    for (layer_ = 0; layer_ <= last; ++layer_) {
      const LayerWeights& layer = w.layers[layer_];
      if (spec_.layers[layer_] == LayerKind::kFullAttention) {
        FullAttention(layer, ctx_.caches[layer_]);
      } else {
        LinearAttention(layer, ctx_.caches[layer_]);
      }
      AddResidual(&layer.post_norm, layer_);
      Mlp(layer);
      if (layer_ < last) {
        AddResidual(&w.layers[layer_ + 1].input_norm, layer_ + 1);
      } else {
        AddResidual(FinalNormFused(phase_, plan_) ? &w.final_norm : nullptr, layer_);
      }
    }
  }

 private:
  void Norm(const TensorView& weight, int layer) {
    list_.Add("rms_norm",
              ops::RmsNorm{.out = Rows(a_.normed, rows_),
                           .x = Rows(a_.hidden, rows_),
                           .weight = weight,
                           .eps = spec_.rms_eps,
                           .weight_offset = spec_.norm_weight_offset},
              layer);
  }

  // The block's output joins the stream; then, unless null, the norm of the next block, which may
  // be the next layer's.
  void AddResidual(const TensorView* next_norm, int norm_layer) {
    if (plan_ == DecodePlan::kFused && next_norm != nullptr) {
      list_.Add("rms_norm_residual_fused",
                ops::RmsNormResidualFused{.out = Rows(a_.normed, rows_),
                                          .sum = Rows(a_.hidden, rows_),
                                          .a = Rows(a_.hidden, rows_),
                                          .b = Rows(a_.block_out, rows_),
                                          .weight = *next_norm,
                                          .eps = spec_.rms_eps,
                                          .weight_offset = spec_.norm_weight_offset},
                layer_);
      return;
    }
    list_.Add("residual_add",
              ops::ResidualAdd{.out = Rows(a_.hidden, rows_),
                               .a = Rows(a_.hidden, rows_),
                               .b = Rows(a_.block_out, rows_)},
              layer_);
    if (next_norm != nullptr) Norm(*next_norm, norm_layer);
  }

  void Project(const char* tag, const TensorView& out, const TensorView& x,
               const TensorView& weight, const TensorView& bias = {}) {
    list_.Add(
        tag,
        ops::Gemv{.out = Rows(out, rows_), .x = Rows(x, rows_), .weight = weight, .bias = bias},
        layer_);
  }

  void FullAttention(const LayerWeights& w, const LayerCache& cache) {
    const int64_t heads = spec_.num_heads;
    const int64_t kv_heads = spec_.num_kv_heads;
    const int64_t dim = spec_.head_dim;
    Project("q_proj_gemv", a_.q, a_.normed, w.q_proj, w.q_bias);
    Project("k_proj_gemv", a_.k, a_.normed, w.k_proj, w.k_bias);
    Project("v_proj_gemv", a_.v, a_.normed, w.v_proj, w.v_bias);

    // With an output gate each head's rows are its query, then its gate.
    const int64_t per_head = spec_.output_gate ? 2 * dim : dim;
    const TensorView q_and_gate = Rows(a_.q, rows_).SplitLast(heads, per_head);
    const TensorView q = q_and_gate.Slice(2, 0, dim);
    const TensorView k = Rows(a_.k, rows_).SplitLast(kv_heads, dim);
    const TensorView v = Rows(a_.v, rows_).SplitLast(kv_heads, dim);
    const TensorView out = Rows(a_.attended, rows_).SplitLast(heads, dim);
    if (spec_.qk_norm) {
      list_.Add("qk_norm",
                ops::QkNorm{.q = q,
                            .k = k,
                            .q_weight = w.q_norm,
                            .k_weight = w.k_norm,
                            .eps = spec_.rms_eps,
                            .weight_offset = spec_.norm_weight_offset},
                layer_);
    }
    list_.Add("rope_embed",
              ops::RopeEmbed{.q = q,
                             .k = k,
                             .cos = ctx_.workspace.rope_cos,
                             .sin = ctx_.workspace.rope_sin,
                             .positions = inputs_.sequences.positions},
              layer_);
    list_.Add("kv_cache_update",
              ops::KvCacheUpdate{.k = k,
                                 .v = v,
                                 .k_pages = cache.k_pages,
                                 .v_pages = cache.v_pages,
                                 .slots = Rows(a_.slots, rows_)},
              layer_);
    Attend(q, out, cache);
    if (spec_.output_gate) {
      list_.Add("output_gate", ops::OutputGate{.x = out, .gate = q_and_gate.Slice(2, dim, dim)},
                layer_);
    }
    Project("attn_out_proj", a_.block_out, a_.attended, w.o_proj, w.o_bias);
  }

  void Attend(const TensorView& q, const TensorView& out, const LayerCache& cache) {
    const TensorView lengths = Rows(a_.lengths, rows_);
    const float scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec_.head_dim)));
    if (phase_ == StepPhase::kPrefill || plan_ == DecodePlan::kFused) {
      list_.Add("attention",
                ops::Attention{.out = out,
                               .q = q,
                               .k_pages = cache.k_pages,
                               .v_pages = cache.v_pages,
                               .lengths = lengths,
                               .sequences = inputs_.sequences,
                               .scale = scale},
                layer_);
      return;
    }
    const TensorView scores = Rows(ctx_.workspace.scores, rows_);
    list_.Add("qk_dot",
              ops::QkDot{.scores = scores,
                         .q = q,
                         .k_pages = cache.k_pages,
                         .lengths = lengths,
                         .sequences = inputs_.sequences,
                         .scale = scale},
              layer_);
    list_.Add("softmax_mask", ops::SoftmaxMask{.scores = scores, .lengths = lengths}, layer_);
    list_.Add("pv_dot",
              ops::PvDot{.out = out,
                         .probs = scores,
                         .v_pages = cache.v_pages,
                         .lengths = lengths,
                         .sequences = inputs_.sequences},
              layer_);
  }

  void LinearAttention(const LayerWeights& w, const LayerCache& cache) {
    const int64_t key_heads = spec_.linear_key_heads;
    const int64_t value_heads = spec_.linear_value_heads;
    const int64_t key_dim = spec_.linear_key_dim;
    const int64_t value_dim = spec_.linear_value_dim;
    Project("in_proj_qkv", a_.qkv, a_.normed, w.in_proj_qkv);
    Project("in_proj_z", a_.z, a_.normed, w.in_proj_z);
    Project("in_proj_ba", a_.ba, a_.normed, w.in_proj_ba);
    const TensorView mixed = Rows(a_.conv_out, rows_);
    list_.Add("causal_conv1d",
              ops::CausalConv1d{.out = mixed,
                                .x = Rows(a_.qkv, rows_),
                                .weight = w.conv,
                                .state = cache.conv,
                                .sequences = inputs_.sequences},
              layer_);
    const TensorView ba = Rows(a_.ba, rows_);
    const TensorView beta = Rows(a_.beta, rows_);
    const TensorView log_decay = Rows(a_.log_decay, rows_);
    list_.Add("delta_gates",
              ops::DeltaGates{.beta = beta,
                              .log_decay = log_decay,
                              .a = ba.Slice(1, value_heads, value_heads),
                              .b = ba.Slice(1, 0, value_heads),
                              .a_log = w.a_log,
                              .dt_bias = w.dt_bias},
              layer_);
    const int64_t keys = key_heads * key_dim;
    const int64_t values = value_heads * value_dim;
    const TensorView delta_out = Rows(a_.delta_out, rows_).SplitLast(value_heads, value_dim);
    list_.Add("gated_delta_rule",
              ops::GatedDeltaRule{
                  .out = delta_out,
                  .q = mixed.Slice(1, 0, keys).SplitLast(key_heads, key_dim),
                  .k = mixed.Slice(1, keys, keys).SplitLast(key_heads, key_dim),
                  .v = mixed.Slice(1, 2 * keys, values).SplitLast(value_heads, value_dim),
                  .beta = beta,
                  .log_decay = log_decay,
                  .state = cache.recurrent,
                  .sequences = inputs_.sequences,
                  .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(key_dim)))},
              layer_);
    list_.Add("gated_rms_norm",
              ops::GatedRmsNorm{.out = Rows(a_.gated, rows_).SplitLast(value_heads, value_dim),
                                .x = delta_out,
                                .z = Rows(a_.z, rows_).SplitLast(value_heads, value_dim),
                                .weight = w.gated_norm,
                                .eps = spec_.rms_eps},
              layer_);
    Project("linear_out_proj", a_.block_out, a_.gated, w.out_proj);
  }

  void Mlp(const LayerWeights& w) {
    Project("gate_proj", a_.gate, a_.normed, w.gate_proj);
    Project("up_proj", a_.up, a_.normed, w.up_proj);
    list_.Add(
        "silu_mul",
        ops::SiluMul{
            .out = Rows(a_.act, rows_), .gate = Rows(a_.gate, rows_), .up = Rows(a_.up, rows_)},
        layer_);
    Project("down_proj", a_.block_out, a_.act, w.down_proj);
  }

  const DecoderContext& ctx_;
  const ModelSpec& spec_;
  const Activations& a_;
  const StepInputs& inputs_;
  const StepPhase phase_;
  const DecodePlan plan_;
  OpList& list_;
  const int64_t rows_;
  int layer_ = 0;
};

}  // namespace

void AppendLayers(const DecoderContext& ctx, const StepInputs& inputs, StepPhase phase,
                  DecodePlan plan, OpList& list) {
  StepBuilder(ctx, inputs, phase, plan, list).Layers();
}

void AppendHead(const DecoderContext& ctx, const TensorView& sampling, int first_row, int count,
                bool normed, OpList& list) {
  const Activations& a = ctx.activations;
  const TensorView x = a.normed.Slice(0, first_row, count);
  if (!normed) {
    list.Add("final_rms_norm", ops::RmsNorm{.out = x,
                                            .x = a.hidden.Slice(0, first_row, count),
                                            .weight = ctx.weights.final_norm,
                                            .eps = ctx.spec.rms_eps,
                                            .weight_offset = ctx.spec.norm_weight_offset});
  }
  const TensorView logits = Rows(ctx.workspace.logits, count);
  list.Add("lm_head_gemv", ops::Gemv{.out = logits, .x = x, .weight = ctx.weights.lm_head});
  if (!sampling) return;
  list.Add("token_sampler", ops::TokenSampler{.tokens = Rows(ctx.workspace.tokens, count),
                                              .logits = logits,
                                              .rows = sampling,
                                              .vocab_limit = ctx.vocab_limit});
}

bool FinalNormFused(StepPhase phase, DecodePlan plan) {
  return phase == StepPhase::kDecode && plan == DecodePlan::kFused;
}

}  // namespace qwend
