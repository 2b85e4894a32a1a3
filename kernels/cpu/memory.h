// Memory in huge pages, and the speed at which this machine reads it.
#pragma once

#include <cstdint>

#include "kernels/backend.h"
#include "kernels/cpu/thread_pool.h"

namespace qwend::cpu {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// Zero-filled memory, backed by transparent huge pages where the system grants them: aligned to one
// and a whole number of them, from half a huge page up. Pages come into being when first touched.
// Throws DeviceError when the machine or the container has less available.
Buffer AllocateHuge(int64_t bytes);

// Bytes per second of a plain read of memory that no cache holds by all of the pool's threads, best
// of several passes, about half a second: the first touch of the memory it reads is most of that.
double MeasureReadBandwidth(ThreadPool& pool);

}  // namespace qwend::cpu
