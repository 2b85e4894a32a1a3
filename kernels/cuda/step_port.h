// A step's way in and out through page-locked host memory, by two kernels that stand inside the
// step's graph: the host makes one call a step, and nothing stands between two graphs.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/runtime.h"
#include "kernels/step_order.h"

namespace qwend::cuda {

// What is put lies at the beginning of one of kPlaces places by turns, under a header with the
// step's number. The graph's first kernel takes the step after the last one that it took, if that
// is there. Its last kernel writes each word of the outputs together with the step's number, in one
// store of 8 bytes, so that the host knows each word by itself and the kernel needs no fence.
class CudaStepPort : public StepPort {
 public:
  struct Header {
    uint64_t step;
    uint32_t begin, end;  // of the inputs, in bytes
  };
  struct State {           // on the device
    uint64_t taken, left;  // steps so far
  };

  // `state` is sizeof(State) zeroed bytes of device memory.
  CudaStepPort(const LaunchContext& ctx, void* inputs, int64_t input_bytes, const void* outputs,
               int64_t output_bytes, Buffer state);

  void Put(const void* image, int64_t begin, int64_t end) override;
  const void* Collect() override;

  // Before each launch of a program with this port.
  void BeforeRun() {
    if (order_.Run() == 0) ran_without_inputs_ = true;
  }
  // The first kernel of such a program. What follows it directly must either start when it has
  // ended, or wait for it before reading inputs.
  void LaunchTake() const;
  // And the last.
  void LaunchLeave() const;

 private:
  // Whether the stream has nothing left to do. Throws what the device has failed with.
  bool Idle() const;

  const LaunchContext ctx_;
  char* const inputs_;
  const int64_t input_bytes_;
  const uint32_t* const outputs_;
  const int64_t output_words_;
  StepOrder order_;
  const Buffer state_;
  HostMemory headers_;           // [kPlaces] Header
  HostMemory in_;                // [kPlaces, input_bytes]
  HostMemory out_;               // u64 [kPlaces, output_words]: the step's number, then the word
  std::vector<uint32_t> words_;  // [kPlaces, output_words], what was collected
  bool ran_without_inputs_ = false;  // and such a run may still be queued
};

}  // namespace qwend::cuda
