#include "kernels/cuda/persistent_model.h"

namespace qwend::cuda {
namespace {

constexpr int kOpsPerLayer = 5;

template <typename T>
const T& As(const OpCall& call) {
  const T* op = std::get_if<T>(&call.op);
  Need(op != nullptr, "operator ", call.tag, " is not where the fused plan has it");
  return *op;
}

const float* FloatVector(const TensorView& v, const char* what) {
  Need(v.dtype == DType::kF32, what, " is ", Name(v.dtype), ", the persistent kernel reads f32");
  Need(reinterpret_cast<uintptr_t>(v.data) % 16 == 0, what, " does not begin at 16 bytes");
  return v.As<const float>();
}

const float* Bias(const ops::Gemv& g) { return g.bias ? FloatVector(g.bias, "a bias") : nullptr; }

void NeedWeight(const ops::Gemv& g, const char* what) {
  Need(g.weight.dtype == DType::kBF16 && g.weight.layout == Layout::kRowMajor &&
           g.weight.contiguous() && reinterpret_cast<uintptr_t>(g.weight.data) % 16 == 0,
       what, " must be bf16");
  Need(g.weight.cols() % kBoxK == 0, what, " has ", g.weight.cols(), " columns, no multiple of ",
       kBoxK);
}

class Reader {
 public:
  explicit Reader(std::span<const OpCall> calls) : calls_(calls) {}

  StepModel Make() {
    Read();
    for (const LayerOps& layer : m_.operators) TakeLayer(layer);
    const StepShape& h = shape();
    Need(h.head_dim != 0, "no layer has attention");
    Need(h.key_dim == 0 || (h.head_dim == 256 && h.key_dim == 128) ||
             (h.head_dim == 64 && h.key_dim == 64),
         "attention heads of ", h.head_dim, " beside linear heads of ", h.key_dim);
    return std::move(m_);
  }

 private:
  StepShape& shape() { return m_.arguments.shape; }

  void Read() {
    const int count = static_cast<int>(calls_.size());
    Need(count >= 3 + kOpsPerLayer && (count - 3) % kOpsPerLayer == 0, "the list has ", count,
         " operators");
    const auto& embedding = As<ops::EmbeddingLookup>(calls_[0]);
    m_.head = &As<ops::NormHead>(calls_[count - 2]);
    m_.sampler = As<ops::TokenSampler>(calls_[count - 1]);
    for (int i = 1; i + 2 < count; i += kOpsPerLayer) {
      LayerOps layer{.in = &As<ops::NormProjections>(calls_[i]),
                     .out = &As<ops::GemvResidual>(calls_[i + 2]),
                     .gate_up = &As<ops::NormGateUpSilu>(calls_[i + 3]),
                     .down = &As<ops::GemvResidual>(calls_[i + 4])};
      layer.linear = std::get_if<ops::LinearAttention>(&calls_[i + 1].op);
      if (layer.linear == nullptr) layer.attention = &As<ops::DecodeAttention>(calls_[i + 1]);
      m_.operators.push_back(layer);
    }
    StepShape& h = shape();
    h.rows = static_cast<int>(embedding.out.rows());
    h.hidden = static_cast<int>(embedding.out.cols());
    h.per_hidden = 1.0f / static_cast<float>(h.hidden);
    h.layers = static_cast<int>(m_.operators.size());
    h.vocab = static_cast<int>(m_.head->head.weight.rows());
    h.vocab_limit = m_.head->vocab_limit;
    h.norm_offset = m_.head->norm.weight_offset;
    h.norm_eps = m_.head->norm.eps;
    Need(h.hidden <= kMaxStepHidden && h.hidden % (2 * kBoxK) == 0, "hidden_size ", h.hidden,
         " is not a multiple of ", 2 * kBoxK, " up to ", kMaxStepHidden);
    Need(h.layers <= kMaxStepLayers, h.layers, " layers, at most ", kMaxStepLayers);
    Need(embedding.table.dtype == DType::kBF16 && embedding.table.layout == Layout::kRowMajor,
         "the embedding must be bf16");
    NeedWeight(m_.head->head, "lm_head");
    Need(!m_.head->head.bias && m_.head->head.out.dtype == DType::kF32, "the head has a bias");
    StepArguments& a = m_.arguments;
    a.token_ids = embedding.token_ids.As<const int>();
    a.embedding = MakeView<const bf16>(embedding.table);
    a.final_norm = FloatVector(m_.head->norm.weight, "the final norm");
    a.logits = MakeView<float>(m_.head->head.out);
    a.sampling = m_.head->rows.As<const SamplingRow>();
    a.best = m_.head->best.As<unsigned long long>();
  }

  void TakeLayer(const LayerOps& ops) {
    StepLayer layer;
    layer.linear = ops.linear != nullptr;
    layer.mixer_norm = FloatVector(ops.in->norm.weight, "a norm");
    layer.mlp_norm = FloatVector(ops.gate_up->norm.weight, "a norm");
    for (int i = 0; i < ops.in->count; ++i) NeedWeight(ops.in->projections[i], "a projection");
    for (const ops::Gemv* g :
         {&ops.out->gemv, &ops.down->gemv, &ops.gate_up->gate, &ops.gate_up->up}) {
      NeedWeight(*g, "a projection");
      Need(!g->bias, "output and MLP biases have no place in the persistent kernel");
    }
    Need(ops.in->projections[0].out.dtype == DType::kF32, "activations must be f32");
    for (const ops::RmsNorm* n : {&ops.in->norm, &ops.gate_up->norm}) {
      Need(n->weight_offset == shape().norm_offset && n->eps == shape().norm_eps,
           "the norms of a layer and of the head differ");
    }
    Need(ops.down->gemv.weight.cols() == m_.operators[0].down->gemv.weight.cols() &&
             ops.gate_up->gate.weight.rows() == ops.down->gemv.weight.cols() &&
             ops.gate_up->up.weight.rows() == ops.down->gemv.weight.cols(),
         "the layers' MLPs differ in size");
    if (layer.linear) {
      TakeLinear(ops, layer);
    } else {
      TakeAttention(ops, layer);
    }
    m_.layers.push_back(layer);
  }

  void TakeSequences(const StepSequences& q) {
    StepArguments& a = m_.arguments;
    a.positions = q.positions.As<const int>();
    a.state_slot = q.state_slot.As<const int>();
    a.block_table = q.block_table.As<const int>();
    a.block_table_stride = q.block_table.strides[0];
    Need(q.state_slot.rows() == shape().rows, "the persistent kernel has one row a sequence");
  }

  void TakeLinear(const LayerOps& ops, StepLayer& layer) {
    const ops::LinearAttention& op = *ops.linear;
    StepShape& h = shape();
    h.key_dim = static_cast<int>(op.rule.k.dim(2));
    h.value_dim = static_cast<int>(op.rule.v.dim(2));
    h.key_heads = static_cast<int>(op.rule.k.dim(1));
    h.heads_per_key = static_cast<int>(op.rule.v.dim(1)) / h.key_heads;
    h.delta_scale = op.rule.scale;
    h.l2_eps = op.rule.l2_eps;
    h.gated_eps = op.norm.eps;
    Need(h.key_dim == h.value_dim && (h.key_dim == 64 || h.key_dim == 128), "linear heads of ",
         h.key_dim, " and ", h.value_dim, "; 64 and 128 are built");
    Need(op.conv.weight.cols() == 4, "a convolution over ", op.conv.weight.cols(),
         " samples; 4 are built");
    for (int i = 0; i < ops.in->count; ++i)
      Need(!ops.in->projections[i].bias, "a linear layer's projection has a bias");
    Need(op.conv.state.dtype == DType::kF32 && op.conv.state.contiguous() &&
             op.rule.state.dtype == DType::kF32 && op.rule.state.contiguous(),
         "convolution and recurrent state must be f32 and contiguous");
    TakeSequences(op.conv.sequences);
    layer.conv_weight = FloatVector(op.conv.weight, "a layer's vector");
    layer.dt_bias = FloatVector(op.gates.dt_bias, "a layer's vector");
    layer.gated_norm = FloatVector(op.norm.weight, "a layer's vector");
    layer.a_log = FloatVector(op.gates.a_log, "A_log");
    Need(reinterpret_cast<uintptr_t>(layer.conv_weight) % 16 == 0 &&
             reinterpret_cast<uintptr_t>(layer.gated_norm) % 16 == 0,
         "the convolution's or the gated norm's weights are not aligned to 16 bytes");
    layer.conv_state = op.conv.state.As<float>();
  }

  void TakeAttention(const LayerOps& ops, StepLayer& layer) {
    const ops::DecodeAttention& op = *ops.attention;
    StepShape& h = shape();
    h.head_dim = static_cast<int>(op.attention.q.dim(2));
    h.kv_heads = static_cast<int>(op.attention.k_pages.dim(1));
    h.group = static_cast<int>(op.attention.q.dim(1)) / h.kv_heads;
    h.rotary_half = static_cast<int>(op.rope.cos.cols());
    h.gated = static_cast<bool>(op.gate.x);
    h.head_norms = static_cast<bool>(op.norm.q);
    h.score_scale = op.attention.scale * 1.44269504f;  // log2 e
    Need(h.head_dim == 64 || h.head_dim == 128 || h.head_dim == 256, "head_dim ", h.head_dim,
         "; 64, 128 and 256 are built");
    Need(h.rotary_half <= kMaxRotaryHalf && h.rotary_half >= 8 &&
             (h.rotary_half & (h.rotary_half - 1)) == 0,
         "rotary_dim ", 2 * h.rotary_half, " of ", h.head_dim);
    Need(op.update.k_pages.dtype == DType::kBF16 && op.update.v_pages.dtype == DType::kBF16 &&
             op.update.k_pages.contiguous() && op.update.v_pages.contiguous(),
         "the cache must be bf16 and contiguous");
    Need(op.attention.q.dim(1) % h.kv_heads == 0 && 2 * h.rotary_half <= h.head_dim,
         op.attention.q.dim(1), " query heads for ", h.kv_heads, ", rotary_dim ",
         2 * h.rotary_half);
    TakeSequences(op.attention.sequences);
    if (h.head_norms) {
      h.head_norm_offset = op.norm.weight_offset;
      h.head_norm_eps = op.norm.eps;
      layer.q_norm = FloatVector(op.norm.q_weight, "a layer's vector");
      layer.k_norm = FloatVector(op.norm.k_weight, "a layer's vector");
    }
    Need(!h.gated || !ops.in->projections[0].bias, "gated queries with a bias");
    layer.q_bias = Bias(ops.in->projections[0]);
    layer.k_bias = Bias(ops.in->projections[1]);
    layer.v_bias = Bias(ops.in->projections[2]);
    Need((layer.q_bias == nullptr) == (layer.k_bias == nullptr) &&
             (layer.q_bias == nullptr) == (layer.v_bias == nullptr),
         "only some of a layer's q, k and v have a bias");
    layer.k_pages = op.update.k_pages.As<bf16>();
    layer.v_pages = op.update.v_pages.As<bf16>();
    m_.arguments.rope_cos = op.rope.cos.As<const float>();
    m_.arguments.rope_sin = op.rope.sin.As<const float>();
  }

  std::span<const OpCall> calls_;
  StepModel m_;
};

}  // namespace

StepModel ReadStepModel(std::span<const OpCall> calls) { return Reader(calls).Make(); }

WeightRow RowOf(const ops::NormProjections& in, const TensorView& view, int head, int element) {
  for (int i = 0; i < in.count; ++i) {
    const ops::Gemv& g = in.projections[i];
    const int64_t offset = view.As<const float>() - g.out.As<const float>();
    if (offset < 0 || offset >= g.out.cols()) continue;
    const int64_t stride = view.rank > 2 ? view.strides[1] : 0;
    return {&g.weight, static_cast<int>(offset + head * stride + element)};
  }
  throw Refusal{"a mixer reads what no projection of its layer makes"};
}

}  // namespace qwend::cuda
