// The read bandwidth that every kernel's share of the peak is measured against.
#pragma once

#include "kernels/cuda/cuda_ops.h"

namespace qwend::cuda {

// Bytes per second of a plain read of memory far larger than the L2 cache; the best of several
// passes.
double MeasureReadBandwidth(const LaunchContext& ctx);

}  // namespace qwend::cuda
