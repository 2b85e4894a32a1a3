#include <atomic>
#include <cstring>
#include <utility>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/step_port.h"

namespace qwend::cuda {
namespace {

using Header = CudaStepPort::Header;
using State = CudaStepPort::State;

constexpr int kPlaces = StepPort::kPlaces;
constexpr int kTakeThreads = 512;
constexpr int kInFlight = 4;  // loads of a thread
constexpr int kLeaveThreads = 64;
constexpr unsigned kLooksBetweenQueries = 1024;

// 16 bytes of host memory, written before the launch. A plain load: lanes share whole lines. With
// volatile ones the 4 KB below took a step 10 us more.
__device__ __forceinline__ uint4 LoadHost(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// One block. Bytes: what was put. Bound: one read over the bus, of the step's header together with
// the first 4 KB of its place, which hold a few rows' inputs; a second one for the rest.
__global__ void __launch_bounds__(kTakeThreads)
    TakeKernel(State* state, const Header* headers, const char* places, int64_t place_bytes,
               char* inputs) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
  constexpr int64_t kWord = sizeof(uint4), kStride = kTakeThreads * kWord;
  constexpr int64_t kFirst = 4096;
  const uint64_t next = state->taken + 1;
  const char* from = places + static_cast<int64_t>(next % kPlaces) * place_bytes;
  const uint4 header = LoadHost(headers + next % kPlaces);
  const int64_t at = threadIdx.x * kWord;
  const bool early = at < min(kFirst, place_bytes);
  const uint4 first = early ? LoadHost(from + at) : uint4{};
  if ((static_cast<uint64_t>(header.y) << 32 | header.x) != next) return;  // nothing was put
  const int64_t bytes = header.w - header.z;
  char* to = inputs + header.z;
  if (early && at < bytes) *reinterpret_cast<uint4*>(to + at) = first;
  for (int64_t rest = kFirst + at; rest < bytes; rest += kInFlight * kStride) {
    uint4 words[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (rest + i * kStride < bytes) words[i] = LoadHost(from + rest + i * kStride);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (rest + i * kStride < bytes) *reinterpret_cast<uint4*>(to + rest + i * kStride) = words[i];
    }
  }
  __syncthreads();  // every thread has read the state
  if (threadIdx.x == 0) state->taken = next;
}

// One block. Bytes: the outputs, twice as many over the bus. Bound: its launch.
__global__ void __launch_bounds__(kLeaveThreads)
    LeaveKernel(State* state, const uint32_t* outputs, uint64_t* places, int64_t output_words) {
  WaitForPrevious();
  const uint64_t step = state->taken;
  if (state->left == step) return;
  volatile uint64_t* to = places + static_cast<int64_t>(step % kPlaces) * output_words;
  for (int64_t i = threadIdx.x; i < output_words; i += kLeaveThreads) {
    to[i] = step << 32 | outputs[i];
  }
  __syncthreads();  // every thread has read the state
  if (threadIdx.x == 0) state->left = step;
}

// Page-locked, at the same address on the device, zeroed.
HostMemory AllocateHost(int64_t bytes) {
  void* memory = nullptr;
  Check(cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocMapped),
        "page-locking host memory");
  std::memset(memory, 0, static_cast<size_t>(bytes));
  return HostMemory(memory);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

CudaStepPort::CudaStepPort(const LaunchContext& ctx, void* inputs, int64_t input_bytes,
                           const void* outputs, int64_t output_bytes, Buffer state)
    : ctx_(ctx),
      inputs_(static_cast<char*>(inputs)),
      input_bytes_(input_bytes),
      outputs_(static_cast<const uint32_t*>(outputs)),
      output_words_(output_bytes / int64_t{sizeof(uint32_t)}),
      order_(inputs, input_bytes, outputs, output_bytes),
      state_(std::move(state)),
      headers_(AllocateHost(kPlaces * int64_t{sizeof(Header)})),
      in_(AllocateHost(kPlaces * input_bytes)),
      out_(AllocateHost(kPlaces * output_words_ * int64_t{sizeof(uint64_t)})),
      words_(static_cast<size_t>(kPlaces * output_words_)) {
  static_assert(sizeof(Header) == sizeof(uint4));
  ShareProcessor(TakeKernel);
  ShareProcessor(LeaveKernel);
}

void CudaStepPort::Put(const void* image, int64_t begin, int64_t end) {
  const uint64_t step = order_.Put(begin, end);
  if (std::exchange(ran_without_inputs_, false)) {
    // It would take what was meant for the run after it.
    Check(cudaStreamSynchronize(ctx_.stream), "waiting for a step without new inputs");
  }
  const auto place = static_cast<int64_t>(step % kPlaces);
  std::memcpy(static_cast<char*>(in_.get()) + place * input_bytes_,
              static_cast<const char*>(image) + begin, static_cast<size_t>(end - begin));
  Header& header = static_cast<Header*>(headers_.get())[place];
  header.begin = static_cast<uint32_t>(begin);
  header.end = static_cast<uint32_t>(end);
  std::atomic_ref(header.step).store(step, std::memory_order_release);
}

const void* CudaStepPort::Collect() {
  const uint64_t step = order_.Collect();
  const int64_t first = static_cast<int64_t>(step % kPlaces) * output_words_;
  uint64_t* const from = static_cast<uint64_t*>(out_.get()) + first;
  uint32_t* const to = words_.data() + first;
  bool idle = false;
  unsigned looks = 0;
  for (int64_t i = 0; i < output_words_;) {
    const uint64_t word = std::atomic_ref(from[i]).load(std::memory_order_acquire);
    if (word >> 32 == (step & 0xffffffffu)) {
      to[i++] = static_cast<uint32_t>(word);
      continue;
    }
    if (idle) throw DeviceError("waiting for a step's outputs: the step ended without them");
    if (++looks % kLooksBetweenQueries == 0) idle = Idle();
    Pause();
  }
  return to;
}

bool CudaStepPort::Idle() const {
  const cudaError_t status = cudaStreamQuery(ctx_.stream);
  if (status != cudaErrorNotReady) {
    Check(status, "waiting for a step's outputs");
    return true;
  }
  cudaGetLastError();  // not an error
  return false;
}

void CudaStepPort::LaunchTake() const {
  TakeKernel<<<1, kTakeThreads, 0, ctx_.stream>>>(
      static_cast<State*>(state_.data()), static_cast<const Header*>(headers_.get()),
      static_cast<const char*>(in_.get()), input_bytes_, inputs_);
  Check(cudaGetLastError(), "launching a kernel");
}

void CudaStepPort::LaunchLeave() const {
  Launch(ctx_, LeaveKernel, dim3(1), dim3(kLeaveThreads), 0, static_cast<State*>(state_.data()),
         outputs_, static_cast<uint64_t*>(out_.get()), output_words_);
}

}  // namespace qwend::cuda
