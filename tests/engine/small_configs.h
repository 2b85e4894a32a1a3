// A plain and a hybrid model, small enough to write down.
#pragma once

namespace qwend {

inline constexpr const char* kLlama = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
  "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
  "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16, "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": null, "hidden_act": "silu",
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "eos_token_id": [2, 3]})";

inline constexpr const char* kHybrid = R"({
  "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
  "tie_word_embeddings": true, "vision_config": {"depth": 1},
  "text_config": {
    "model_type": "qwen3_5_text", "dtype": "bfloat16", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 16, "max_position_embeddings": 64, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "eos_token_id": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [1, 1, 0]}}})";

}  // namespace qwend
