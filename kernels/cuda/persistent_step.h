// The persistent plan's tables: what its one kernel is told of a model. Written by the host
// (persistent_schedule.cu), read by the device (persistent_step.cuh).
//
// The device's clusters of kRanks blocks each take whole heads of every mixer and a share of every
// MLP, so that what happens inside a mixer or an MLP stays in a cluster. Each block of a cluster
// has every kRanks-th part of it: its rank's share of each head's dimensions, of the MLP's columns
// and of the residual stream. What a mixer or MLP adds to the stream is a sum over the clusters.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

constexpr int kRanks = 16;       // blocks of a cluster
constexpr int kMaxClusters = 8;  // whose sums one word takes, two from each
constexpr int kStepWarps = 8;    // that compute
constexpr int kStepThreads = kStepWarps * kWarp;
constexpr int kMaxStepRows = 8;  // rows of x in one pass: 1, 2, 4 or 8
constexpr int kBoxK = 64;        // elements of K in a copied box: 128 bytes
constexpr int kTile = 16;        // rows of a weight that a warp multiplies at once
constexpr int kMaxStepHidden = 1024;
constexpr int kMixerFloats = 1024;  // a row's queries, keys and values, of one cluster
constexpr int kMaxRotaryHalf = 64;
constexpr int kMaxSliceK = 768;  // of a mixer's or an MLP's output inside one cluster
constexpr int kMaxLinearSliceK = 512, kMaxLinearDim = 128;  // of a linear layer's, and a head's
constexpr int kBoxGap = 512;        // before every second box of four rows, for other banks
constexpr int kMaxStepLayers = 31;  // whose tables fit beside the activations
constexpr int kMaxPassHeads = 2;    // query heads of a cluster: none, one or both
constexpr int kMaxValueHeads = 8;   // value heads of a cluster

// A slot of the ring, in a pass of so many rows: the activations of eight leave room for less.
// Besides its bytes, how many 64 elements of K it has of kTile whole rows, and of a rank's rows of
// an output matrix.
constexpr int kSlotBytes = 32 << 10;
__host__ __device__ constexpr int SlotBytes(int rows) {
  return rows == 8 ? kSlotBytes / 2 : kSlotBytes;
}
__host__ __device__ constexpr int SlotStride(int rows) { return SlotBytes(rows) + 2 * kBoxGap; }
__host__ __device__ constexpr int SlotColumns(int rows) {
  return SlotBytes(rows) / (kTile * kBoxK * 2);
}
__host__ __device__ constexpr int SlotBlocks(int rows) {
  return SlotBytes(rows) / (kMaxStepHidden / kRanks * kBoxK * 2);
}
static_assert(kMaxLinearSliceK * kMaxLinearDim / kRanks * 4 <= SlotBytes(8));  // a row's states
// How many a block asks for at once.
__host__ __device__ constexpr int SlotsInFlight(int rows) {
  return 2 * (kSlotBytes / SlotBytes(rows));
}

// One request of the tensor engine. `bytes` is what the slot waits for in all, in its first request
// alone; zero in the others. With map kCopyCache it stands for the keys and values that the block
// attends to in layer `row`, with kCopyState for the recurrent state that it works on there, as
// many slots as they take. The head, which all blocks share evenly, comes after kCopyHead. The
// gates' weights have a place of their own beside the ring.
constexpr int16_t kCopyCache = -1, kCopyState = -2, kCopyHead = -3;
constexpr int32_t kToGates = 1 << 20;  // and from there on
struct CopyCommand {
  int32_t row;
  int16_t k_block;
  int16_t map;
  int32_t offset;  // from the slot's start
  int32_t bytes;
};

// A slot of whole rows has 16 of them, in boxes of as many as a rank has of a head at once: fewer
// requests for the same bytes. Where a box of `rows` rows, `bytes` in all, begins in it:
__host__ __device__ constexpr int BoxRows(int head_dim) { return head_dim / kRanks; }
__host__ __device__ constexpr int BoxShift(int rows) { return rows == 4 ? 2 : rows == 8 ? 3 : 4; }
__host__ __device__ constexpr int BoxOffset(int box, int rows, int bytes) {
  return box * bytes + (rows == 4 ? (box + 1) / 2 * kBoxGap : 0);
}

// The part of a layer that one cluster has, for each kind of layer.
struct ClusterShare {
  int first_head = 0, heads = 0;  // query heads, or key heads of a linear layer
  int first_unit = 0, units = 0;  // of the MLP, 64 columns each
};

struct StepLayer {
  bool linear = false;
  int state_map = 0;  // of a linear layer's recurrent state
  const float *mixer_norm = nullptr, *mlp_norm = nullptr;
  // Linear layers. The convolution's weights are [channels, 4].
  const float *conv_weight = nullptr, *dt_bias = nullptr, *gated_norm = nullptr, *a_log = nullptr;
  float* conv_state = nullptr;
  // Attention layers; norms and biases where the model has them.
  const float *q_norm = nullptr, *k_norm = nullptr;
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;
  bf16 *k_pages = nullptr, *v_pages = nullptr;
};

// What all layers of a model share.
struct StepShape {
  int rows = 0;  // of this pass
  int hidden = 0, vocab = 0, vocab_limit = 0, layers = 0, clusters = 0;
  int mlp_box_rows = 0;
  float norm_offset = 0.0f, norm_eps = 0.0f, per_hidden = 0.0f;  // 1 / hidden
  // Linear layers.
  int key_dim = 0, value_dim = 0, key_heads = 0, heads_per_key = 0;
  float delta_scale = 0.0f, l2_eps = 0.0f, gated_eps = 0.0f;
  // Attention layers.
  int head_dim = 0, kv_heads = 0, group = 0, rotary_half = 0;
  bool gated = false, head_norms = false;
  float head_norm_offset = 0.0f, head_norm_eps = 0.0f;
  float score_scale = 0.0f;  // of queries, for scores that are exponents of 2
};

struct StepArguments {
  StepShape shape;
  ClusterShare shares[2][kMaxClusters];  // attention, linear
  // How many slots each cluster's blocks ask for at once before the head, where all ask for
  // SlotsInFlight: enough to keep the memory busy. More would only lengthen the queues in which
  // the clusters' words and the few loads wait, but for clusters with more to read than the others,
  // which wait for them.
  int in_flight[kMaxClusters];
  const StepLayer* layers = nullptr;
  const CUtensorMap* maps = nullptr;
  const CopyCommand* commands = nullptr;  // block by block
  const int* first_command = nullptr;     // [blocks + 1]
  const int* first_head_tile = nullptr;   // [blocks + 1]: 16 rows of the vocabulary each
  // The stream's partial sums, [2 steps][2 exchanges][kMaxStepRows][hidden], each by turns; and the
  // steps counted.
  unsigned long long* words = nullptr;
  uint32_t* turn = nullptr;
  // What the step reads and writes.
  const int* token_ids = nullptr;
  View<const bf16> embedding;
  const float* final_norm = nullptr;
  const int* positions = nullptr;
  const int* state_slot = nullptr;
  const int* block_table = nullptr;
  int64_t block_table_stride = 0;
  const float *rope_cos = nullptr, *rope_sin = nullptr;
  View<float> logits;
  const SamplingRow* sampling = nullptr;
  unsigned long long* best = nullptr;
  uint64_t* times = nullptr;  // a timestamp after each operator, when asked for
};

}  // namespace qwend::cuda
