// Launching the persistent step (persistent_step.cu).
#pragma once

#include "kernels/cuda/persistent_step.h"

namespace qwend::cuda {

// How many clusters the device runs at once with this many layers, at most kMaxClusters; prepares
// the kernels. Once before the first launch, outside of captures.
int CountClusters(const StepArguments& a);

// One pass of 1, 2 or 4 rows.
void LaunchStep(const StepArguments& a, cudaStream_t stream);

}  // namespace qwend::cuda
