// Owners of CUDA handles, and the check that every runtime call goes through. Host code only.
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>
#include <string>
#include <utility>

#include "kernels/backend.h"

namespace qwend::cuda {

// Throws DeviceError with the place and CUDA's own words unless `status` is success.
inline void Check(cudaError_t status, const char* what = "",
                  std::source_location at = std::source_location::current()) {
  if (status == cudaSuccess) return;
  std::string message = std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": ";
  if (*what != '\0') message += std::string(what) + ": ";
  throw DeviceError(message + cudaGetErrorName(status) + ": " + cudaGetErrorString(status));
}

// One CUDA handle with one owner. `Destroy` is the runtime's own function for its type.
template <typename Handle, cudaError_t (*Destroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  explicit Owned(Handle handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_ != nullptr) Destroy(handle_);
  }
  Handle get() const { return handle_; }

 private:
  Handle handle_ = nullptr;
};

using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using Graph = Owned<cudaGraph_t, cudaGraphDestroy>;
using GraphExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;
using HostMemory = Owned<void*, cudaFreeHost>;  // page-locked

inline Stream MakeStream() {
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  return Stream(stream);
}

inline Event MakeEvent(unsigned flags = cudaEventDefault) {
  cudaEvent_t event = nullptr;
  Check(cudaEventCreateWithFlags(&event, flags), "creating an event");
  return Event(event);
}

}  // namespace qwend::cuda
