#include "engine/models/registry.h"

namespace qwend {

// Llama with a bias on q, k and v, always, and none on the output projection.
Family Qwen2Family() {
  return {.name = "qwen2",
          .model_types = {"qwen2"},
          .architectures = {"Qwen2ForCausalLM"},
          .read = [](JsonFields&, ModelSpec& spec) { spec.qkv_bias = true; }};
}

}  // namespace qwend
