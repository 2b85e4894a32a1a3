// The CPU backend's operators. Each Run stands in the file named after its group: embedding.cc,
// norm.cc, gemv.cc, rope.cc, kv_cache.cc, attention.cc, activation.cc, causal_conv.cc,
// delta_rule.cc, sampling.cc.
//
// Activations are f32; key-value pages and convolution state f32; every operator also takes bf16
// views of them, so that the CPU can follow another backend's types operator by operator.
#pragma once

#include "kernels/cpu/thread_pool.h"
#include "kernels/op_parts.h"
#include "kernels/ops.h"

namespace qwend::cpu {

struct LaunchContext {
  ThreadPool& pool;
};

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

// Fused operators run part by part: the parts' bits, and nothing to gain on a processor whose
// caches hold what is between them.
template <FusedOp T>
void Run(const T& op, const LaunchContext& ctx) {
  ForEachPart(op, [&](const auto& part) { Run(part, ctx); });
}

}  // namespace qwend::cpu
