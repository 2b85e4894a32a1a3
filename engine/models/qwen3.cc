#include "engine/models/registry.h"

namespace qwend {

// Llama with a norm on each head of q and k, before the rotation.
Family Qwen3Family() {
  return {.name = "qwen3",
          .model_types = {"qwen3"},
          .architectures = {"Qwen3ForCausalLM"},
          .default_head_dim = 128,
          .read = [](JsonFields& fields, ModelSpec& spec) {
            spec.qk_norm = true;
            spec.qkv_bias = spec.output_bias = fields.Bool("attention_bias", false);
          }};
}

}  // namespace qwend
