// Every operator once more, as the plainest loops over doubles that say what it means. Nothing here
// shares code with a backend. Inputs and outputs may have any type and strides; a result is rounded
// once, when it is stored.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/ops.h"

namespace qwend::reference {

void Run(const ops::EmbeddingLookup& op);
void Run(const ops::RopeEmbed& op);
void Run(const ops::Gemv& op);  // row-major weights; ignores splits and writes `out`
void Run(const ops::SplitKReduce& op);
void Run(const ops::RmsNorm& op);  // ignores splits
void Run(const ops::RmsNormResidualFused& op);
void Run(const ops::QkNorm& op);
void Run(const ops::CacheMask& op);
void Run(const ops::KvCacheUpdate& op);
void Run(const ops::QkDot& op);
void Run(const ops::SoftmaxMask& op);
void Run(const ops::PvDot& op);
void Run(const ops::Attention& op);
void Run(const ops::OutputGate& op);
void Run(const ops::ResidualAdd& op);
void Run(const ops::SiluMul& op);
void Run(const ops::CausalConv1d& op);
void Run(const ops::DeltaGates& op);
void Run(const ops::GatedDeltaRule& op);
void Run(const ops::GatedRmsNorm& op);

// What TokenSampler may sample from one row, in its order of candidates, with probabilities that
// sum to 1. Empty when the row must yield kInvalidToken. Greedy rows have one candidate.
std::vector<std::pair<int, double>> Candidates(const TensorView& logits, int64_t row,
                                               int vocab_limit, const SamplingRow& params);

}  // namespace qwend::reference
