// Everything a step works on, at addresses that never change: caches, activations, workspace, and
// the inputs that the host rewrites each step. One set of layout functions both sizes the arena
// (with a cursor over nothing) and cuts it up, so the two cannot disagree.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "engine/memory_plan.h"
#include "engine/models/model_spec.h"
#include "kernels/backend.h"
#include "kernels/ops.h"

namespace qwend {

// Hands out aligned pieces from `base` on; with a null base it only counts.
class MemoryCursor {
 public:
  static constexpr int64_t kAlignment = 256;
  static int64_t Padded(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  explicit MemoryCursor(void* base = nullptr) : base_(static_cast<char*>(base)) {}
  void* Take(int64_t bytes) {
    char* p = base_ == nullptr ? nullptr : base_ + used_;
    used_ += Padded(bytes);
    return p;
  }
  TensorView Tensor(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView v = TensorView::Of(nullptr, dtype, shape);
    v.data = Take(v.bytes());
    return v;
  }
  int64_t used() const { return used_; }
  void Rewind(int64_t used) { used_ = used; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// The sizes that all layouts follow from.
struct StepSizes {
  StepSizes(const MemoryPlan& plan, const BackendInfo& info);

  std::vector<int> buckets;  // decode batch sizes, ascending; the last holds max_sequences
  int max_bucket = 0;
  int chunk = 0;               // rows of the longest prefill
  int max_rows = 0;            // of any step
  int max_context = 0;         // positions of one sequence
  int max_pages = 0;           // of one sequence
  int pages = 0;               // of the pool, the dummy included; it is the last
  int slots = 0;               // of the states, the dummy included; it is the last
  bool explicit_plan = false;  // decode wants the score matrix and split-K partials
  DType activation, kv, conv;
  std::vector<SplitK> split_k;  // of the backend

  int dummy_page() const { return pages - 1; }
  int dummy_slot() const { return slots - 1; }
};

// A layer's part of the caches; which fields are set depends on its kind.
struct LayerCache {
  TensorView k_pages;    // [pages, kv_heads, 64, head_dim]
  TensorView v_pages;    // [pages, kv_heads, 64, head_dim]
  TensorView recurrent;  // f32 [slots, value_heads, key_dim, value_dim]
  TensorView conv;       // [slots, conv_width - 1, conv_channels]
};

std::vector<LayerCache> LayOutKv(const ModelSpec& spec, const StepSizes& sizes,
                                 MemoryCursor& cursor);
// Adds recurrent and convolution states to what LayOutKv made.
void LayOutStates(const ModelSpec& spec, const StepSizes& sizes, MemoryCursor& cursor,
                  std::vector<LayerCache>& caches);

// Rows are max_rows; a step uses the first T of them. The blocks of a layer follow one another, so
// mixer and MLP share their memory.
struct Activations {
  TensorView hidden;     // [rows, hidden], the residual stream
  TensorView normed;     // [rows, hidden]
  TensorView block_out;  // [rows, hidden], what a block adds to the stream
  TensorView slots;      // i32 [rows]
  TensorView lengths;    // i32 [rows]

  TensorView q;         // [rows, heads * head_dim (* 2 with gates)]
  TensorView k;         // [rows, kv_heads * head_dim]
  TensorView v;         // [rows, kv_heads * head_dim]
  TensorView attended;  // [rows, heads * head_dim]

  TensorView qkv;        // [rows, conv_channels]
  TensorView conv_out;   // [rows, conv_channels]
  TensorView z;          // [rows, value_heads * value_dim]
  TensorView ba;         // [rows, 2 * value_heads]
  TensorView beta;       // f32 [rows, value_heads]
  TensorView log_decay;  // f32 [rows, value_heads]
  TensorView delta_out;  // [rows, value_heads * value_dim]
  TensorView gated;      // [rows, value_heads * value_dim]

  TensorView gate;  // [rows, intermediate]
  TensorView up;    // [rows, intermediate]
  TensorView act;   // [rows, intermediate]
};

Activations LayOutActivations(const ModelSpec& spec, const StepSizes& sizes, MemoryCursor& cursor);

struct Workspace {
  TensorView rope_cos;  // f32 [max_context, rotary_dim / 2]
  TensorView rope_sin;  // f32 [max_context, rotary_dim / 2]
  TensorView scores;    // f32 [max_bucket, heads, max_context]; explicit plan only
  TensorView partials;  // f32 [max_bucket * the largest parts * N]; explicit plan only
  TensorView logits;    // f32 [max_bucket, vocab]
  TensorView tokens;    // i32 [1], what prefill sampled
  TensorView best;      // u8 [max_bucket, 8], from NormHead to TokenSampler
  void* inputs = nullptr;
  int64_t inputs_bytes = 0;
};

Workspace LayOutWorkspace(const ModelSpec& spec, const StepSizes& sizes, MemoryCursor& cursor);

// What a step of T rows and S sequences reads, cut from one region, so that it goes over in one
// piece. The host's image of the region and the device's differ in their base alone.
struct StepInputs {
  TensorView token_ids;  // i32 [T]; first, and decode's sampler leaves the next step's ids there
  TensorView sampling;   // u8 [S, sizeof(SamplingRow)]
  StepSequences sequences;
  int64_t bytes = 0;
};

StepInputs LayOutInputs(const StepSizes& sizes, int rows, int sequences, void* base);

}  // namespace qwend
