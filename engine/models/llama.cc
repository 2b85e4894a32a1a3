#include "engine/models/registry.h"

namespace qwend {

// The plain decoder: full attention everywhere, norm weights as stored. One flag puts a bias on all
// four attention projections.
Family LlamaFamily() {
  return {.name = "llama",
          .model_types = {"llama"},
          .architectures = {"LlamaForCausalLM"},
          .read = [](JsonFields& fields, ModelSpec& spec) {
            spec.qkv_bias = spec.output_bias = fields.Bool("attention_bias", false);
            if (fields.Bool("mlp_bias", false)) {
              fields.Fail("mlp_bias", "is true; biases in the MLP are not supported");
            }
          }};
}

}  // namespace qwend
