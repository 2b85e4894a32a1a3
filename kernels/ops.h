// Every operator as one plain struct: views in, views out, scalars. `Op` is their sum type; each
// backend defines `Run(const ops::X&, const LaunchContext&)` for every alternative, in the file
// named after the operator's group.
//
// Letters in shapes:
//   T  rows of this step: one per token (decode: one per sequence; prefill: the tokens of a chunk)
//   S  sequences of this step; rows of sequence s are [query_start[s], query_start[s + 1])
//   H / KH query / key-value heads, D head_dim, I intermediate, V vocabulary, P pages of the pool
//   NK / NV key / value heads of a linear layer, DK / DV their sizes, C = 2 * NK * DK + NV * DV
//   convolution channels
//
// Numbers: activations are fp32 or bf16 (the backend's choice), every sum is fp32 in an order that
// depends on the shape of one row only, and each output is rounded once. A row's bits never depend
// on the other rows.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>

#include "kernels/tensor.h"

namespace qwend {

constexpr int kPageTokens = 64;
constexpr int kInvalidToken =
    -1;  // what TokenSampler writes for a row whose logits hold NaN or +inf

// What TokenSampler needs to know of one row. Lives in device memory, one per row, rewritten by the
// host each step.
struct SamplingRow {
  static constexpr int kMaxBanned = 64;
  float temperature = 0.0f;  // 0: greedy
  float top_p = 1.0f;        // (0, 1]
  float min_p = 0.0f;        // [0, 1)
  int32_t top_k = 0;         // 0: off
  uint64_t seed = 0;         // key of the counter-based generator
  int32_t position =
      0;  // its counter: the position in the sequence that the sampled token will take
  int32_t num_banned = 0;  // ids that may not be sampled now (end-of-sequence before min_tokens)
  int32_t banned[kMaxBanned] = {};
  int32_t keep_logits = 0;  // 1: the row's logits are wanted, however the token is chosen
  int32_t unused = 0;
};
static_assert(sizeof(SamplingRow) % 8 == 0);

// The sequences of a step: what attention and the recurrent operators need to find each row's
// memory.
struct StepSequences {
  TensorView query_start;   // i32 [S + 1]
  TensorView row_sequence;  // i32 [T]: which sequence a row belongs to
  TensorView positions;     // i32 [T]: position in its sequence, from 0
  TensorView block_table;   // i32 [S, max_pages]: page of each 64 positions
  TensorView state_slot;    // i32 [S]: recurrent and convolution state
};

namespace ops {

struct EmbeddingLookup {
  TensorView out;        // [T, hidden]
  TensorView table;      // [V, hidden], any layout of this backend
  TensorView token_ids;  // i32 [T]; kInvalidToken reads row 0, for a sequence that is about to end
};

// Rotates the first rotary_dim = 2 * cos.cols() elements of every head, rotate-half inside them;
// the rest passes.
struct RopeEmbed {
  TensorView q;          // [T, H, D], in place
  TensorView k;          // [T, KH, D], in place
  TensorView cos;        // f32 [max_context, rotary_dim / 2]
  TensorView sin;        // f32 [max_context, rotary_dim / 2]
  TensorView positions;  // i32 [T]
};

// out = x * weight^T + bias. Every projection, for any T. With splits > 1 it writes `partials`
// (part p holds the sum over its share of K, without bias) and leaves `out` to a SplitKReduce.
struct Gemv {
  TensorView out;         // [T, N]
  TensorView x;           // [T, K]
  TensorView weight;      // [N, K], any layout of this backend
  TensorView bias{};      // [N], optional
  TensorView partials{};  // f32 [splits, T, N], when splits > 1
  int splits = 1;
};

// out = bias + sum of partials in order of the part. Reads only the parts that exist.
struct SplitKReduce {
  TensorView out;         // [T, N]
  TensorView partials{};  // f32 [splits, T, N]
  TensorView bias{};      // [N], optional
};

// out = x * rsqrt(mean(x^2) + eps) * (weight_offset + weight). weight_offset is 1 for zero-centred
// weights (Qwen3.5).
struct RmsNorm {
  TensorView out;             // [T, hidden]
  TensorView x;               // [T, hidden]
  TensorView weight;          // [hidden]
  TensorView partial_sums{};  // f32 [T, splits], when splits > 1
  float eps = 1e-6f;
  float weight_offset = 0.0f;
  int splits = 1;
};

// sum = a + b, out = RmsNorm(sum). `sum` may be `a` itself.
struct RmsNormResidualFused {
  TensorView out;     // [T, hidden]
  TensorView sum;     // [T, hidden]
  TensorView a;       // [T, hidden]
  TensorView b;       // [T, hidden]
  TensorView weight;  // [hidden]
  float eps = 1e-6f;
  float weight_offset = 0.0f;
};

// RmsNorm over each head of q and k, in place.
struct QkNorm {
  TensorView q;         // [T, H, D], in place
  TensorView k;         // [T, KH, D], in place
  TensorView q_weight;  // [D]
  TensorView k_weight;  // [D]
  float eps = 1e-6f;
  float weight_offset = 0.0f;
};

// From positions and block tables: where each row's key and value go, and how many positions it
// sees (its own included).
struct CacheMask {
  TensorView slots;    // i32 [T]: page * 64 + offset
  TensorView lengths;  // i32 [T]: position + 1
  StepSequences sequences;
};

struct KvCacheUpdate {
  TensorView k;        // [T, KH, D]
  TensorView v;        // [T, KH, D]
  TensorView k_pages;  // [P, KH, 64, D]
  TensorView v_pages;  // [P, KH, 64, D]
  TensorView slots;    // i32 [T]
};

// scores[t, h, p] = scale * q[t, h] . k[p] for p < lengths[t]; columns at and beyond lengths[t] are
// not written.
struct QkDot {
  TensorView scores;   // f32 [T, H, max_context]
  TensorView q;        // [T, H, D]
  TensorView k_pages;  // [P, KH, 64, D]
  TensorView lengths;  // i32 [T]
  StepSequences sequences;
  float scale = 1.0f;
};

// Softmax over the first lengths[t] scores, in place. What lies beyond counts as -inf and is never
// read.
struct SoftmaxMask {
  TensorView scores;   // f32 [T, H, max_context], in place
  TensorView lengths;  // i32 [T]
};

struct PvDot {
  TensorView out;      // [T, H, D]
  TensorView probs;    // f32 [T, H, max_context]
  TensorView v_pages;  // [P, KH, 64, D]
  TensorView lengths;  // i32 [T]
  StepSequences sequences;
};

// QkDot, SoftmaxMask and PvDot in one, without the score matrix in memory. Prefill uses it, and the
// fused plan.
struct Attention {
  TensorView out;      // [T, H, D]
  TensorView q;        // [T, H, D]
  TensorView k_pages;  // [P, KH, 64, D]
  TensorView v_pages;  // [P, KH, 64, D]
  TensorView lengths;  // i32 [T]
  StepSequences sequences;
  float scale = 1.0f;
};

// x *= sigmoid(gate).
struct OutputGate {
  TensorView x;     // [T, H, D], in place
  TensorView gate;  // [T, H, D]
};

struct ResidualAdd {
  TensorView out;  // [T, hidden]; may be `a`
  TensorView a;    // [T, hidden]
  TensorView b;    // [T, hidden]
};

// out = silu(gate) * up.
struct SiluMul {
  TensorView out;   // [T, I]
  TensorView gate;  // [T, I]
  TensorView up;    // [T, I]
};

// Depthwise causal convolution over time, then SiLU. weight[c, W - 1] multiplies the newest sample.
// The state holds the last W - 1 columns of x (before convolution and activation) of each slot,
// oldest first, and is brought up to date.
struct CausalConv1d {
  TensorView out;     // [T, C]
  TensorView x;       // [T, C]
  TensorView weight;  // [C, W]
  TensorView state;   // [slots, W - 1, C]
  StepSequences sequences;
};

// beta = sigmoid(b), log_decay = -exp(a_log) * softplus(a + dt_bias).
struct DeltaGates {
  TensorView beta;       // f32 [T, NV]
  TensorView log_decay;  // f32 [T, NV]
  TensorView a;          // [T, NV]
  TensorView b;          // [T, NV]
  TensorView a_log;      // f32 [NV]
  TensorView dt_bias;    // [NV]
};

// The gated delta rule, token by token within each sequence. Per value head (its key head is h /
// (NV / NK)): q and k are L2-normalised (sum, eps inside the root), q is scaled by `scale`; then S
// *= exp(log_decay); e = beta * (v - S^T k); S += k e^T; out = S^T q.
struct GatedDeltaRule {
  TensorView out;        // [T, NV, DV]
  TensorView q;          // [T, NK, DK]
  TensorView k;          // [T, NK, DK]
  TensorView v;          // [T, NV, DV]
  TensorView beta;       // f32 [T, NV]
  TensorView log_decay;  // f32 [T, NV]
  TensorView state;      // f32 [slots, NV, DK, DV], updated
  StepSequences sequences;
  float scale = 1.0f;  // 1 / sqrt(DK)
  float l2_eps = 1e-6f;
};

// out = x * rsqrt(mean(x^2) + eps) * weight * silu(z), per head; the weight is plain.
struct GatedRmsNorm {
  TensorView out;     // [T, NV, DV]
  TensorView x;       // [T, NV, DV]
  TensorView z;       // [T, NV, DV]
  TensorView weight;  // [DV]
  float eps = 1e-6f;
};

// One token per row. Greedy: the largest logit, lowest id on a tie. Otherwise temperature, then
// top_k, top_p, min_p, and a draw from a counter-based generator keyed by (seed, position). Ids at
// and above vocab_limit, and banned ids, are never sampled. A row with NaN or +inf among its logits
// yields kInvalidToken.
struct TokenSampler {
  TensorView tokens;  // i32 [T]
  TensorView logits;  // [T, V]
  TensorView rows;    // u8 [T, sizeof(SamplingRow)]
  int vocab_limit = 0;
  TensorView best{};  // u8 [T, 8], optional: what NormHead left there, taken and cleared
};

// The fused plan's operators. Each holds the operators it stands for, in their order, and gives
// what running them one after the other gives but for rounding. A backend that runs one as a single
// kernel may leave the tensors between them unwritten; the others run the parts. All are for
// decode: one row a sequence.

// One norm, and the projections that share its output.
struct NormProjections {
  static constexpr int kMax = 4;
  RmsNorm norm;
  std::array<Gemv, kMax> projections{};
  int count = 0;
};

// The MLP's first half.
struct NormGateUpSilu {
  RmsNorm norm;
  Gemv gate;
  Gemv up;
  SiluMul act;
};

// A projection whose output joins the residual stream.
struct GemvResidual {
  Gemv gemv;
  ResidualAdd add;
};

// From projected q, k, v to the attended rows: head norms, rotation, cache write, attention over
// everything cached, output gate.
struct DecodeAttention {
  CacheMask mask;
  QkNorm norm{};  // optional
  RopeEmbed rope;
  KvCacheUpdate update;
  Attention attention;
  OutputGate gate{};  // optional
};

// From projected q, k, v, z, b, a to the gated rows of a linear layer.
struct LinearAttention {
  CausalConv1d conv;
  DeltaGates gates;
  GatedDeltaRule rule;
  GatedRmsNorm norm;
};

// The final norm, the head and the greedy token. Logits are written where a row samples or keeps
// them; a greedy row's best allowed id goes to `best`, for the TokenSampler that must follow.
struct NormHead {
  RmsNorm norm;
  Gemv head;
  TensorView rows;  // u8 [T, sizeof(SamplingRow)]
  TensorView best;  // u8 [T, 8], opaque; zero before the first step
  int vocab_limit = 0;
};

}  // namespace ops

using Op =
    std::variant<ops::EmbeddingLookup, ops::RopeEmbed, ops::Gemv, ops::SplitKReduce, ops::RmsNorm,
                 ops::RmsNormResidualFused, ops::QkNorm, ops::CacheMask, ops::KvCacheUpdate,
                 ops::QkDot, ops::SoftmaxMask, ops::PvDot, ops::Attention, ops::OutputGate,
                 ops::ResidualAdd, ops::SiluMul, ops::CausalConv1d, ops::DeltaGates,
                 ops::GatedDeltaRule, ops::GatedRmsNorm, ops::TokenSampler, ops::NormProjections,
                 ops::NormGateUpSilu, ops::GemvResidual, ops::DecodeAttention, ops::LinearAttention,
                 ops::NormHead>;

// An operator in its place in a step. The tag is the name of the operator map ("down_proj";
// "prefill_down_proj" in prefill); layer is -1 outside the layers.
struct OpCall {
  Op op;
  std::string tag;
  int layer = -1;
};

}  // namespace qwend
