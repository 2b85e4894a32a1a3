// Every weight of a model, from one table: what a checkpoint must hold, where the decoder finds it,
// and how much memory it takes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/models/model_spec.h"
#include "kernels/backend.h"
#include "kernels/tensor.h"

namespace qwend {

enum class TensorRole {
  kEmbedding,
  kProjection,
  kNorm,       // around 1 - norm_weight_offset
  kGatedNorm,  // around 1
  kBias,
  kConv,
  kALog,
  kDtBias,
};

// One tensor of a checkpoint, under its canonical name.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  TensorRole role;
};

struct LayerWeights {
  TensorView input_norm;  // [hidden]
  TensorView post_norm;   // [hidden]
  TensorView gate_proj;   // [intermediate, hidden]
  TensorView up_proj;     // [intermediate, hidden]
  TensorView down_proj;   // [hidden, intermediate]

  // Full attention. With an output gate, rows of q_proj are [query, gate] of each head in turn.
  TensorView q_proj;  // [heads * head_dim (* 2), hidden]
  TensorView k_proj;  // [kv_heads * head_dim, hidden]
  TensorView v_proj;  // [kv_heads * head_dim, hidden]
  TensorView o_proj;  // [hidden, heads * head_dim]
  TensorView q_bias, k_bias, v_bias, o_bias;
  TensorView q_norm, k_norm;  // [head_dim]

  // Linear attention.
  TensorView in_proj_qkv;  // [conv_channels, hidden]
  TensorView in_proj_z;    // [value_heads * value_dim, hidden]
  TensorView in_proj_ba;   // [2 * value_heads, hidden]: b, then a
  TensorView conv;         // [conv_channels, conv_width]
  TensorView a_log;        // [value_heads]
  TensorView dt_bias;      // [value_heads]
  TensorView gated_norm;   // [value_dim]
  TensorView out_proj;     // [hidden, value_heads * value_dim]
};

struct ModelWeights {
  TensorView embedding;   // [vocab, hidden]
  TensorView lm_head;     // [vocab, hidden]; the embedding itself when tied
  TensorView final_norm;  // [hidden]
  std::vector<LayerWeights> layers;
};

// One weight as the device keeps it: `parts` stacked by rows, packed for Gemv in the model's weight
// type, or plain fp32 (vectors and the convolution).
struct WeightSlot {
  TensorView* view = nullptr;  // into the ModelWeights
  std::vector<TensorSpec> parts;
  bool packed = false;

  int64_t rows() const;  // of all parts together
  int64_t cols() const;  // 1 for a vector
};

// The largest tensors first. `weights` is sized to the spec's layers; its views are still empty and
// its lm_head has no slot when tied.
std::vector<WeightSlot> WeightSlots(const ModelSpec& spec, ModelWeights& weights);

// Everything a checkpoint of this spec must hold, in slot order.
std::vector<TensorSpec> ModelTensors(const ModelSpec& spec);

// Device bytes of one slot, before padding.
int64_t SlotBytes(const WeightSlot& slot, const ModelSpec& spec, const Backend& backend);

}  // namespace qwend
