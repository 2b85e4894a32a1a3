// The CUDA backend's operators. Each Run stands in the file named after its group, beside its
// kernels: embedding.cu, norm.cu, gemv.cu, rope.cu, kv_cache.cu, attention.cu, activation.cu,
// causal_conv.cu, delta_rule.cu, sampling.cu.
//
// Every Run only launches: nothing is allocated, nothing waits, so that each may stand inside a
// capture. Activations are f32 or bf16, key-value pages bf16 or f32, recurrent state f32. The
// workspace is shared by all operators of a stream, which is safe because they run in order.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "kernels/backend.h"
#include "kernels/op_parts.h"
#include "kernels/ops.h"

namespace qwend::cuda {

struct LaunchContext {
  cudaStream_t stream = nullptr;
  int sm_count = 0;
  bool overlap =
      false;  // the device knows programmatic dependent launch (compute capability 9.0 on)
  void* workspace = nullptr;  // kWorkspaceBytes of device memory
  bool begin_early = true;    // of the next launch, with `overlap`: beside the kernel before it
};

// The last kCounterBytes are counters, zero between kernels; the rest is any kernel's to use.
constexpr int64_t kWorkspaceBytes = 72 << 20;
constexpr int kMaxDecodeRows = 64;  // above, fused operators run as their parts
constexpr int64_t kCounterBytes = 64 << 10;
inline void* Counters(const LaunchContext& ctx) {
  return static_cast<char*>(ctx.workspace) + kWorkspaceBytes - kCounterBytes;
}

// Raises the kernels' shared-memory limits. Once per process and device, before anything is
// captured.
void PrepareAttentionKernels();

// The matrices whose Gemv runs faster in several parts along K (batch 1, cold L2).
std::vector<SplitK> SplitKTable();

void Run(const ops::EmbeddingLookup& op, const LaunchContext& ctx);
void Run(const ops::RopeEmbed& op, const LaunchContext& ctx);
void Run(const ops::Gemv& op, const LaunchContext& ctx);
void Run(const ops::SplitKReduce& op, const LaunchContext& ctx);
void Run(const ops::RmsNorm& op, const LaunchContext& ctx);
void Run(const ops::RmsNormResidualFused& op, const LaunchContext& ctx);
void Run(const ops::QkNorm& op, const LaunchContext& ctx);
void Run(const ops::CacheMask& op, const LaunchContext& ctx);
void Run(const ops::KvCacheUpdate& op, const LaunchContext& ctx);
void Run(const ops::QkDot& op, const LaunchContext& ctx);
void Run(const ops::SoftmaxMask& op, const LaunchContext& ctx);
void Run(const ops::PvDot& op, const LaunchContext& ctx);
void Run(const ops::Attention& op, const LaunchContext& ctx);
void Run(const ops::OutputGate& op, const LaunchContext& ctx);
void Run(const ops::ResidualAdd& op, const LaunchContext& ctx);
void Run(const ops::SiluMul& op, const LaunchContext& ctx);
void Run(const ops::CausalConv1d& op, const LaunchContext& ctx);
void Run(const ops::DeltaGates& op, const LaunchContext& ctx);
void Run(const ops::GatedDeltaRule& op, const LaunchContext& ctx);
void Run(const ops::GatedRmsNorm& op, const LaunchContext& ctx);
void Run(const ops::TokenSampler& op, const LaunchContext& ctx);
void Run(const ops::NormProjections& op, const LaunchContext& ctx);
void Run(const ops::NormGateUpSilu& op, const LaunchContext& ctx);
void Run(const ops::GemvResidual& op, const LaunchContext& ctx);
void Run(const ops::DecodeAttention& op, const LaunchContext& ctx);
void Run(const ops::LinearAttention& op, const LaunchContext& ctx);
void Run(const ops::NormHead& op, const LaunchContext& ctx);

// NormHead's keys from logits that were written in full.
void LaunchBestOfLogits(const ops::NormHead& op, const LaunchContext& ctx);

// Part by part: for shapes that no fused kernel is built for.
template <FusedOp T>
void RunParts(const T& op, const LaunchContext& ctx) {
  ForEachPart(op, [&](const auto& part) { Run(part, ctx); });
}

}  // namespace qwend::cuda
