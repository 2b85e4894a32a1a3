// The order of a port's steps and what its caller may ask for when, the same on every backend.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/backend.h"
#include "kernels/tensor.h"

namespace qwend {

// Steps are numbered from 1 on; step n has place n % StepPort::kPlaces of a backend's rings.
class StepOrder {
 public:
  StepOrder(const void* inputs, int64_t input_bytes, const void* outputs, int64_t output_bytes)
      : input_bytes_(input_bytes) {
    Require(reinterpret_cast<uintptr_t>(inputs) % 16 == 0 && input_bytes % 16 == 0 &&
                input_bytes <= std::numeric_limits<uint32_t>::max(),
            "StepPort: ", input_bytes, " bytes of inputs must be 16-byte words below 4 GiB");
    Require(
        reinterpret_cast<uintptr_t>(outputs) % 4 == 0 && output_bytes % 4 == 0 && output_bytes > 0,
        "StepPort: ", output_bytes, " bytes of outputs must be 4-byte words");
  }

  uint64_t Put(int64_t begin, int64_t end) {
    Require(begin >= 0 && begin <= end && end <= input_bytes_ && begin % 16 == 0 && end % 16 == 0,
            "StepPort::Put: bytes ", begin, " to ", end, " of ", input_bytes_,
            "; both must be multiples of 16");
    Require(put_ - collected_ < StepPort::kPlaces, "StepPort::Put: ", put_ - collected_,
            " steps are not collected yet, and no more are possible");
    return ++put_;
  }
  // 0 when nothing was put for this run.
  uint64_t Run() { return run_ == put_ ? 0 : ++run_; }
  uint64_t Collect() {
    Require(collected_ < run_, "StepPort::Collect: every step that was put and run is collected");
    return ++collected_;
  }

 private:
  const int64_t input_bytes_;
  uint64_t put_ = 0, run_ = 0, collected_ = 0;  // steps so far
};

}  // namespace qwend
