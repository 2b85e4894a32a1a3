// Small copies to the device by a kernel of their own. The copy engine would take 4 to 5 us between
// two kernels, most of it the change from one engine to the other and back.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/cuda/runtime.h"

namespace qwend::cuda {

// Whether a copy is one for a kernel: of few whole words.
bool IsSmallCopy(const void* to, const void* from, int64_t bytes);

// What goes to the device waits in page-locked memory, in one of a few places by turns, until its
// kernel has run; the caller's own memory is free again at once. The event recorded behind each
// kernel also keeps kernels that are launched with programmatic overlap, and read what was uploaded
// before they wait, from following it directly. Not thread safe.
class Uploads {
 public:
  explicit Uploads(cudaStream_t stream);
  // Of a small copy alone.
  void Copy(void* to, const void* from_host, int64_t bytes);

 private:
  struct Place {
    HostMemory memory;
    Event read;
  };
  cudaStream_t stream_;
  std::array<Place, 4> places_;
  size_t next_ = 0;
};

}  // namespace qwend::cuda
