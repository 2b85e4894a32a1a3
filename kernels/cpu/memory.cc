#include "kernels/cpu/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

#include "kernels/cpu/machine.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/memory.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Reads [from, from + bytes), a multiple of 16 cache lines, and returns a value that needs all of
// it. Prefetches as Gemv does, which is faster than without.
uint64_t ReadAll(const uint8_t* from, int64_t bytes) {
  const hn::ScalableTag<uint64_t> d;
  const int64_t n = static_cast<int64_t>(hn::Lanes(d));
  const uint64_t* p = reinterpret_cast<const uint64_t*>(from);
  const int64_t words = bytes / 8;
  auto a = hn::Zero(d);
  auto f = hn::Zero(d);
  auto c = hn::Zero(d);
  auto e = hn::Zero(d);
  constexpr int64_t kPrefetchBytes = 4096;
  for (int64_t i = 0; i < words; i += 4 * n) {
    for (int64_t b = 0; b < 32 * n; b += 64) {
      __builtin_prefetch(
          reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(p + i) + kPrefetchBytes + b));
    }
    a = hn::Xor(a, hn::Load(d, p + i));
    f = hn::Xor(f, hn::Load(d, p + i + n));
    c = hn::Xor(c, hn::Load(d, p + i + 2 * n));
    e = hn::Xor(e, hn::Load(d, p + i + 3 * n));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Xor(hn::Xor(a, f), hn::Xor(c, e))));
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(ReadAll);

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Small allocations stay in ordinary pages, so that they do not take 2 MiB each.
int64_t UnitFor(int64_t bytes) { return bytes >= kHugePageBytes / 2 ? kHugePageBytes : 4096; }

void Release(void* data, int64_t bytes) {
  munmap(data, static_cast<size_t>(RoundUp(bytes, UnitFor(bytes))));
}

}  // namespace

Buffer AllocateHuge(int64_t bytes) {
  Require(bytes >= 0, "Allocate: ", bytes, " bytes");
  if (bytes == 0) return Buffer();
  const int64_t unit = UnitFor(bytes);
  const int64_t size = RoundUp(bytes, unit);
  const int64_t free = QueryMemory().free;
  if (size > free) {
    throw DeviceError("cannot allocate " + std::to_string(size) +
                      " bytes: " + std::to_string(free) + " are available");
  }
  const bool huge = unit == kHugePageBytes;
  const int64_t reserved = huge ? size + unit : size;
  void* mapped = mmap(nullptr, static_cast<size_t>(reserved), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    throw DeviceError("cannot allocate " + std::to_string(size) +
                      " bytes: " + std::strerror(errno));
  }
  if (!huge) return Buffer(mapped, bytes, Release);
  char* begin = static_cast<char*>(mapped);
  char* aligned = reinterpret_cast<char*>(
      RoundUp(static_cast<int64_t>(reinterpret_cast<uintptr_t>(begin)), unit));
  if (aligned > begin) munmap(begin, static_cast<size_t>(aligned - begin));
  const int64_t after = reserved - (aligned - begin) - size;
  if (after > 0) munmap(aligned + size, static_cast<size_t>(after));
  // Advice only: where huge pages are switched off the memory works all the same.
  madvise(aligned, static_cast<size_t>(size), MADV_HUGEPAGE);
  return Buffer(aligned, bytes, Release);
}

double MeasureReadBandwidth(ThreadPool& pool) {
  constexpr int64_t kChunk = int64_t{1} << 20;
  constexpr int kPasses = 6;
  const int64_t chunks =
      std::max<int64_t>(1, std::min<int64_t>(int64_t{512} << 20, QueryMemory().free / 4) / kChunk);
  const Buffer buffer = AllocateHuge(chunks * kChunk);
  uint8_t* data = static_cast<uint8_t*>(buffer.data());
  // Untouched memory is one shared page of zeros, which a cache holds.
  pool.ParallelFor(chunks, 1, [&](int64_t begin, int64_t end, int) {
    std::memset(data + begin * kChunk, 0x5a, static_cast<size_t>((end - begin) * kChunk));
  });
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.ParallelFor(chunks, 1, [&](int64_t begin, int64_t end, int) {
      sink.fetch_xor(HWY_DYNAMIC_DISPATCH(ReadAll)(data + begin * kChunk, (end - begin) * kChunk),
                     std::memory_order_relaxed);
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(chunks * kChunk) / seconds.count());
  }
  return best;
}

}  // namespace qwend::cpu
#endif  // HWY_ONCE
