#include <string>

#include "engine/models/registry.h"

namespace qwend {
namespace {

void Read(JsonFields& fields, ModelSpec& spec) {
  spec.norm_weight_offset = 1.0f;
  spec.qk_norm = true;
  spec.output_gate = fields.Bool("attn_output_gate", true);
  spec.qkv_bias = spec.output_bias = fields.Bool("attention_bias", false);

  if (!fields.Has("layer_types")) {
    const auto interval = fields.Int("full_attention_interval", 1, 1 << 16, 4);
    for (int i = 0; i < spec.num_layers(); ++i) {
      spec.layers[i] =
          (i + 1) % interval == 0 ? LayerKind::kFullAttention : LayerKind::kLinearAttention;
    }
  }
  spec.linear_key_heads = static_cast<int>(fields.Int("linear_num_key_heads", 1, 1024));
  spec.linear_value_heads = static_cast<int>(fields.Int("linear_num_value_heads", 1, 1024));
  spec.linear_key_dim = static_cast<int>(fields.Int("linear_key_head_dim", 1, 1024));
  spec.linear_value_dim = static_cast<int>(fields.Int("linear_value_head_dim", 1, 1024));
  spec.conv_width = static_cast<int>(fields.Int("linear_conv_kernel_dim", 2, 16));
  if (fields.status().ok() && spec.linear_value_heads % spec.linear_key_heads != 0) {
    fields.Fail("linear_num_value_heads",
                "is " + std::to_string(spec.linear_value_heads) + ", which linear_num_key_heads (" +
                    std::to_string(spec.linear_key_heads) + ") does not divide");
  }
}

}  // namespace

// Most layers carry a gated delta rule's state, every fourth attends; norms are zero-centred,
// attention has per-head q and k norms and an output gate, and a quarter of each head is rotated.
Family Qwen35Family() {
  return {.name = "qwen3_5",
          .model_types = {"qwen3_5", "qwen3_5_text"},
          .architectures = {"Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"},
          .default_head_dim = 256,
          .default_partial_rotary = 0.25,
          .must_state_tying = true,
          .read = Read};
}

}  // namespace qwend
