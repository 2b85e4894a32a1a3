// Which weights each kernel of a program asks L2 to fetch ahead.
#pragma once

#include <span>
#include <vector>

#include "kernels/cuda/cuda_ops.h"

namespace qwend::cuda {

// One span for each call, empty for most plain operators. A fused operator's weights are asked for
// by the earliest kernel before it such that what is asked for and not yet read stays within the
// part of L2 that holds it; the step after this one counts as following.
std::vector<Span> PlanPrefetches(std::span<const OpCall> calls);

}  // namespace qwend::cuda
