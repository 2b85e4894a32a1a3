// A model family as data: everything decoder.cc needs to lay out a step. Families differ only in
// what fills this in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/tensor.h"

namespace qwend {

enum class LayerKind { kFullAttention, kLinearAttention };

struct ModelSpec {
  std::string family;  // qwen3_5 | qwen3 | qwen2 | llama
  int hidden = 0;
  int intermediate = 0;
  int vocab_size = 0;
  int max_positions = 0;
  float rms_eps = 1e-6f;
  float norm_weight_offset = 0.0f;  // 1: zero-centred norm weights (all but the gated norm)
  bool tied_embeddings = false;
  DType weight_type = DType::kBF16;  // of the projections, as stored

  std::vector<LayerKind> layers;

  // Full attention.
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int rotary_dim = 0;
  double rope_theta = 1e4;
  bool qkv_bias = false;
  bool output_bias = false;
  bool qk_norm = false;
  bool output_gate = false;  // q_proj gives [query, gate] per head

  // Linear attention (gated delta rule).
  int linear_key_heads = 0;
  int linear_value_heads = 0;
  int linear_key_dim = 0;
  int linear_value_dim = 0;
  int conv_width = 0;

  std::vector<int32_t> eos_token_ids;  // of config.json

  int num_layers() const { return static_cast<int>(layers.size()); }
  int num_full_attention_layers() const {
    int n = 0;
    for (LayerKind k : layers) n += k == LayerKind::kFullAttention;
    return n;
  }
  int conv_channels() const {
    return 2 * linear_key_heads * linear_key_dim + linear_value_heads * linear_value_dim;
  }
};

}  // namespace qwend
