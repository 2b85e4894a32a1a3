// What backend_factory.cc needs of the CUDA backend.
#pragma once

#include <memory>

#include "kernels/backend.h"

namespace qwend::cuda {

// Throws DeviceError when there is no such device.
std::unique_ptr<Backend> MakeBackend(int device);

// 0 without a driver or a device.
int DeviceCount();

}  // namespace qwend::cuda
