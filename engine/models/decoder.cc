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
        fused_(phase == StepPhase::kDecode && plan == DecodePlan::kFused),
        list_(list),
        rows_(inputs.token_ids.rows()) {}

  void Layers() {
    const ModelWeights& w = ctx_.weights;
    if (!fused_) list_.Add("cache_mask", Mask());
    list_.Add("embedding_lookup", ops::EmbeddingLookup{.out = Rows(a_.hidden, rows_),
                                                       .table = w.embedding,
                                                       .token_ids = inputs_.token_ids});
    if (fused_) {
      for (; layer_ < spec_.num_layers(); ++layer_) FusedLayer();
      return;
    }
    Norm(w.layers[0].input_norm, 0);
    const int last = spec_.num_layers() - 1;
    for (; layer_ <= last; ++layer_) {
      const LayerWeights& layer = w.layers[layer_];
      if (spec_.layers[layer_] == LayerKind::kFullAttention) {
        FullAttention(layer);
      } else {
        LinearAttention(layer);
      }
      AddResidual(&layer.post_norm, layer_);
      Mlp(layer);
      const bool more = layer_ < last;
      AddResidual(more ? &w.layers[layer_ + 1].input_norm : nullptr, more ? layer_ + 1 : layer_);
    }
  }

 private:
  ops::RmsNorm NormOf(const TensorView& weight) const {
    return {.out = Rows(a_.normed, rows_),
            .x = Rows(a_.hidden, rows_),
            .weight = weight,
            .eps = spec_.rms_eps,
            .weight_offset = spec_.norm_weight_offset};
  }

  ops::Gemv Product(const TensorView& out, const TensorView& x, const TensorView& weight,
                    const TensorView& bias = {}) const {
    return {.out = Rows(out, rows_), .x = Rows(x, rows_), .weight = weight, .bias = bias};
  }

  ops::ResidualAdd Residual() const {
    return {
        .out = Rows(a_.hidden, rows_), .a = Rows(a_.hidden, rows_), .b = Rows(a_.block_out, rows_)};
  }

  ops::SiluMul Activation() const {
    return {.out = Rows(a_.act, rows_), .gate = Rows(a_.gate, rows_), .up = Rows(a_.up, rows_)};
  }

  ops::CacheMask Mask() const {
    return {.slots = Rows(a_.slots, rows_),
            .lengths = Rows(a_.lengths, rows_),
            .sequences = inputs_.sequences};
  }

  // From projected q, k, v to what attn_out_proj reads.
  ops::DecodeAttention AttentionOf(const LayerWeights& w, const LayerCache& cache) const {
    const int64_t heads = spec_.num_heads;
    const int64_t kv_heads = spec_.num_kv_heads;
    const int64_t dim = spec_.head_dim;
    // With an output gate each head's rows are its query, then its gate.
    const int64_t per_head = spec_.output_gate ? 2 * dim : dim;
    const TensorView q_and_gate = Rows(a_.q, rows_).SplitLast(heads, per_head);
    const TensorView q = q_and_gate.Slice(2, 0, dim);
    const TensorView k = Rows(a_.k, rows_).SplitLast(kv_heads, dim);
    const TensorView v = Rows(a_.v, rows_).SplitLast(kv_heads, dim);
    const TensorView out = Rows(a_.attended, rows_).SplitLast(heads, dim);
    ops::DecodeAttention parts{
        .mask = Mask(),
        .rope = {.q = q,
                 .k = k,
                 .cos = ctx_.workspace.rope_cos,
                 .sin = ctx_.workspace.rope_sin,
                 .positions = inputs_.sequences.positions},
        .update = {.k = k,
                   .v = v,
                   .k_pages = cache.k_pages,
                   .v_pages = cache.v_pages,
                   .slots = Rows(a_.slots, rows_)},
        .attention = {.out = out,
                      .q = q,
                      .k_pages = cache.k_pages,
                      .v_pages = cache.v_pages,
                      .lengths = Rows(a_.lengths, rows_),
                      .sequences = inputs_.sequences,
                      .scale =
                          static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec_.head_dim)))},
    };
    if (spec_.qk_norm) {
      parts.norm = {.q = q,
                    .k = k,
                    .q_weight = w.q_norm,
                    .k_weight = w.k_norm,
                    .eps = spec_.rms_eps,
                    .weight_offset = spec_.norm_weight_offset};
    }
    if (spec_.output_gate) parts.gate = {.x = out, .gate = q_and_gate.Slice(2, dim, dim)};
    return parts;
  }

  // From projected q, k, v, z, b, a to what linear_out_proj reads.
  ops::LinearAttention LinearAttentionOf(const LayerWeights& w, const LayerCache& cache) const {
    const int64_t key_heads = spec_.linear_key_heads;
    const int64_t value_heads = spec_.linear_value_heads;
    const int64_t key_dim = spec_.linear_key_dim;
    const int64_t value_dim = spec_.linear_value_dim;
    const int64_t keys = key_heads * key_dim;
    const int64_t values = value_heads * value_dim;
    const TensorView mixed = Rows(a_.conv_out, rows_);
    const TensorView ba = Rows(a_.ba, rows_);
    const TensorView beta = Rows(a_.beta, rows_);
    const TensorView log_decay = Rows(a_.log_decay, rows_);
    const TensorView delta_out = Rows(a_.delta_out, rows_).SplitLast(value_heads, value_dim);
    return {
        .conv = {.out = mixed,
                 .x = Rows(a_.qkv, rows_),
                 .weight = w.conv,
                 .state = cache.conv,
                 .sequences = inputs_.sequences},
        .gates = {.beta = beta,
                  .log_decay = log_decay,
                  .a = ba.Slice(1, value_heads, value_heads),
                  .b = ba.Slice(1, 0, value_heads),
                  .a_log = w.a_log,
                  .dt_bias = w.dt_bias},
        .rule = {.out = delta_out,
                 .q = mixed.Slice(1, 0, keys).SplitLast(key_heads, key_dim),
                 .k = mixed.Slice(1, keys, keys).SplitLast(key_heads, key_dim),
                 .v = mixed.Slice(1, 2 * keys, values).SplitLast(value_heads, value_dim),
                 .beta = beta,
                 .log_decay = log_decay,
                 .state = cache.recurrent,
                 .sequences = inputs_.sequences,
                 .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(key_dim)))},
        .norm = {.out = Rows(a_.gated, rows_).SplitLast(value_heads, value_dim),
                 .x = delta_out,
                 .z = Rows(a_.z, rows_).SplitLast(value_heads, value_dim),
                 .weight = w.gated_norm,
                 .eps = spec_.rms_eps},
    };
  }

  // The fused plan's layer: five kernels.
  void FusedLayer() {
    const LayerWeights& w = ctx_.weights.layers[layer_];
    const LayerCache& cache = ctx_.caches[layer_];
    ops::NormProjections in{.norm = NormOf(w.input_norm)};
    if (spec_.layers[layer_] == LayerKind::kFullAttention) {
      in.projections = {Product(a_.q, a_.normed, w.q_proj, w.q_bias),
                        Product(a_.k, a_.normed, w.k_proj, w.k_bias),
                        Product(a_.v, a_.normed, w.v_proj, w.v_bias)};
      in.count = 3;
      list_.Add("norm_qkv_proj", in, layer_);
      list_.Add("attention", AttentionOf(w, cache), layer_);
      FusedProject("attn_out_proj_residual", a_.attended, w.o_proj, w.o_bias);
    } else {
      in.projections = {Product(a_.qkv, a_.normed, w.in_proj_qkv),
                        Product(a_.z, a_.normed, w.in_proj_z),
                        Product(a_.ba, a_.normed, w.in_proj_ba)};
      in.count = 3;
      list_.Add("norm_in_proj", in, layer_);
      list_.Add("linear_attention", LinearAttentionOf(w, cache), layer_);
      FusedProject("linear_out_proj_residual", a_.gated, w.out_proj);
    }
    list_.Add("norm_gate_up_silu",
              ops::NormGateUpSilu{.norm = NormOf(w.post_norm),
                                  .gate = Product(a_.gate, a_.normed, w.gate_proj),
                                  .up = Product(a_.up, a_.normed, w.up_proj),
                                  .act = Activation()},
              layer_);
    FusedProject("down_proj_residual", a_.act, w.down_proj);
  }

  void FusedProject(const char* tag, const TensorView& x, const TensorView& weight,
                    const TensorView& bias = {}) {
    list_.Add(tag,
              ops::GemvResidual{.gemv = Product(a_.block_out, x, weight, bias), .add = Residual()},
              layer_);
  }

  void Norm(const TensorView& weight, int layer) { list_.Add("rms_norm", NormOf(weight), layer); }

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
    list_.Add("residual_add", Residual(), layer_);
    if (next_norm != nullptr) Norm(*next_norm, norm_layer);
  }

  void Project(const char* tag, const TensorView& out, const TensorView& x,
               const TensorView& weight, const TensorView& bias = {}) {
    ops::Gemv gemv = Product(out, x, weight, bias);
    const int parts = GemvSplits(ctx_.split_k, weight.rows(), weight.cols());
    if (phase_ == StepPhase::kPrefill || parts == 1) {
      list_.Add(tag, gemv, layer_);
      return;
    }
    gemv.splits = parts;
    gemv.partials =
        TensorView::Of(ctx_.workspace.partials.data, DType::kF32, {parts, rows_, weight.rows()});
    list_.Add(tag, gemv, layer_);
    list_.Add("splitk_reduce",
              ops::SplitKReduce{.out = gemv.out, .partials = gemv.partials, .bias = bias}, layer_);
  }

  void FullAttention(const LayerWeights& w) {
    Project("q_proj_gemv", a_.q, a_.normed, w.q_proj, w.q_bias);
    Project("k_proj_gemv", a_.k, a_.normed, w.k_proj, w.k_bias);
    Project("v_proj_gemv", a_.v, a_.normed, w.v_proj, w.v_bias);
    const ops::DecodeAttention parts = AttentionOf(w, ctx_.caches[layer_]);
    if (spec_.qk_norm) list_.Add("qk_norm", parts.norm, layer_);
    list_.Add("rope_embed", parts.rope, layer_);
    list_.Add("kv_cache_update", parts.update, layer_);
    Attend(parts.attention);
    if (spec_.output_gate) list_.Add("output_gate", parts.gate, layer_);
    Project("attn_out_proj", a_.block_out, a_.attended, w.o_proj, w.o_bias);
  }

  // Prefill in one operator, the explicit plan's decode in three.
  void Attend(const ops::Attention& a) {
    if (phase_ == StepPhase::kPrefill) {
      list_.Add("attention", a, layer_);
      return;
    }
    const TensorView scores = Rows(ctx_.workspace.scores, rows_);
    list_.Add("qk_dot",
              ops::QkDot{.scores = scores,
                         .q = a.q,
                         .k_pages = a.k_pages,
                         .lengths = a.lengths,
                         .sequences = a.sequences,
                         .scale = a.scale},
              layer_);
    list_.Add("softmax_mask", ops::SoftmaxMask{.scores = scores, .lengths = a.lengths}, layer_);
    list_.Add("pv_dot",
              ops::PvDot{.out = a.out,
                         .probs = scores,
                         .v_pages = a.v_pages,
                         .lengths = a.lengths,
                         .sequences = a.sequences},
              layer_);
  }

  void LinearAttention(const LayerWeights& w) {
    Project("in_proj_qkv", a_.qkv, a_.normed, w.in_proj_qkv);
    Project("in_proj_z", a_.z, a_.normed, w.in_proj_z);
    Project("in_proj_ba", a_.ba, a_.normed, w.in_proj_ba);
    const ops::LinearAttention parts = LinearAttentionOf(w, ctx_.caches[layer_]);
    list_.Add("causal_conv1d", parts.conv, layer_);
    list_.Add("delta_gates", parts.gates, layer_);
    list_.Add("gated_delta_rule", parts.rule, layer_);
    list_.Add("gated_rms_norm", parts.norm, layer_);
    Project("linear_out_proj", a_.block_out, a_.gated, w.out_proj);
  }

  void Mlp(const LayerWeights& w) {
    Project("gate_proj", a_.gate, a_.normed, w.gate_proj);
    Project("up_proj", a_.up, a_.normed, w.up_proj);
    list_.Add("silu_mul", Activation(), layer_);
    Project("down_proj", a_.block_out, a_.act, w.down_proj);
  }

  const DecoderContext& ctx_;
  const ModelSpec& spec_;
  const Activations& a_;
  const StepInputs& inputs_;
  const StepPhase phase_;
  const DecodePlan plan_;
  const bool fused_;  // decode in the fused plan
  OpList& list_;
  const int64_t rows_;
  int layer_ = 0;
};

}  // namespace

void AppendLayers(const DecoderContext& ctx, const StepInputs& inputs, StepPhase phase,
                  DecodePlan plan, OpList& list) {
  StepBuilder(ctx, inputs, phase, plan, list).Layers();
}

void AppendHead(const DecoderContext& ctx, const TensorView& sampling, const TensorView& tokens,
                int first_row, int count, HeadForm form, OpList& list) {
  const Activations& a = ctx.activations;
  const ops::RmsNorm norm{.out = a.normed.Slice(0, first_row, count),
                          .x = a.hidden.Slice(0, first_row, count),
                          .weight = ctx.weights.final_norm,
                          .eps = ctx.spec.rms_eps,
                          .weight_offset = ctx.spec.norm_weight_offset};
  const ops::Gemv head{
      .out = Rows(ctx.workspace.logits, count), .x = norm.out, .weight = ctx.weights.lm_head};
  ops::TokenSampler sampler{
      .tokens = {}, .logits = head.out, .rows = sampling, .vocab_limit = ctx.vocab_limit};
  if (form == HeadForm::kFused) {
    sampler.best = Rows(ctx.workspace.best, count);
    list.Add("norm_lm_head", ops::NormHead{.norm = norm,
                                           .head = head,
                                           .rows = sampling,
                                           .best = sampler.best,
                                           .vocab_limit = ctx.vocab_limit});
  } else {
    list.Add("final_rms_norm", norm);
    list.Add("lm_head_gemv", head);
  }
  if (!sampling) return;
  sampler.tokens = Rows(tokens, count);
  list.Add("token_sampler", sampler);
}

}  // namespace qwend
