// The CUDA backend's operators. Each Run stands in the file named after its group, beside its
// kernels: embedding.cu, norm.cu, gemv.cu, rope.cu, kv_cache.cu, attention.cu, activation.cu,
// causal_conv.cu, delta_rule.cu, sampling.cu.
//
// Every Run only launches: nothing is allocated, nothing waits, so that each may stand inside a
// capture. Activations are f32 or bf16, key-value pages bf16 or f32, recurrent state f32. The
// workspace is shared by all operators of a stream, which is safe because they run in order.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/ops.h"

namespace qwend::cuda {

struct LaunchContext {
  cudaStream_t stream = nullptr;
  int sm_count = 0;
  bool overlap =
      false;  // the device knows programmatic dependent launch (compute capability 9.0 on)
  void* workspace = nullptr;  // kWorkspaceBytes of device memory
};

constexpr int64_t kWorkspaceBytes = 8 << 20;

// Raises the kernels' shared-memory limits. Once per process and device, before anything is
// captured.
void PrepareAttentionKernels();

// How many parts along K the Gemv of this shape runs fastest with (batch 1, cold L2). From
// `qwend-bench --sweep splitk`.
int GemvSplits(int64_t rows, int64_t cols);

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

}  // namespace qwend::cuda
