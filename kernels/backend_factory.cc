#include "kernels/backend.h"

namespace qwend {

#ifdef QWEND_HAS_CUDA

// Defined by the CUDA backend, with the headers that only it may include.
namespace cuda {
std::unique_ptr<Backend> MakeBackend(int device);
int DeviceCount();
}  // namespace cuda

std::unique_ptr<Backend> MakeCudaBackend(int device) { return cuda::MakeBackend(device); }
bool CudaBackendBuilt() { return true; }
int CudaDeviceCount() { return cuda::DeviceCount(); }

#else

std::unique_ptr<Backend> MakeCudaBackend(int device) {
  throw DeviceError("CUDA device " + std::to_string(device) +
                    " was asked for, but this build has no CUDA backend; use --backend cpu, or "
                    "build with -DQWEND_CUDA=ON where nvcc is installed");
}
bool CudaBackendBuilt() { return false; }
int CudaDeviceCount() { return 0; }

#endif

}  // namespace qwend
