#include <cstring>

#include "kernels/cuda/host_copy.h"
#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {
namespace {

constexpr int64_t kMaxBytes = 64 << 10;
constexpr int kThreads = 256;

// One word a thread; the bus sees whole lines.
__global__ void CopyKernel(uint32_t* to, const uint32_t* from, int words) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < words) to[i] = from[i];
}

// From page-locked host memory.
void CopyByKernel(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  const int words = static_cast<int>(bytes / int64_t{sizeof(uint32_t)});
  CopyKernel<<<CeilDiv(words, kThreads), kThreads, 0, stream>>>(
      static_cast<uint32_t*>(to), static_cast<const uint32_t*>(from), words);
  Check(cudaGetLastError(), "launching a copy");
}

}  // namespace

bool IsSmallCopy(const void* to, const void* from, int64_t bytes) {
  const auto odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                   static_cast<uintptr_t>(bytes);
  return bytes > 0 && bytes <= kMaxBytes && odd % sizeof(uint32_t) == 0;
}

Uploads::Uploads(cudaStream_t stream) : stream_(stream) {
  for (Place& place : places_) {
    void* memory = nullptr;
    Check(cudaMallocHost(&memory, kMaxBytes), "page-locking host memory");
    place.memory = HostMemory(memory);
    place.read = MakeEvent(cudaEventDisableTiming);
  }
}

void Uploads::Copy(void* to, const void* from_host, int64_t bytes) {
  Place& place = places_[next_++ % places_.size()];
  Check(cudaEventSynchronize(place.read.get()), "waiting for an upload");
  std::memcpy(place.memory.get(), from_host, static_cast<size_t>(bytes));
  CopyByKernel(to, place.memory.get(), bytes, stream_);
  Check(cudaEventRecord(place.read.get(), stream_), "recording an event");
}

}  // namespace qwend::cuda
