// The persistent plan as a Program. Host code only.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kernels/backend.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/step_port.h"

namespace qwend::cuda {

// Null, and why, where the device or the list is not made for it. `port` may be null. `allocate`
// gives zeroed memory.
std::unique_ptr<Program> MakePersistentProgram(std::span<const OpCall> calls,
                                               const LaunchContext& ctx, CudaStepPort* port,
                                               const std::function<Buffer(int64_t)>& allocate,
                                               std::string& why_not);

}  // namespace qwend::cuda
