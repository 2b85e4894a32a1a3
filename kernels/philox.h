// Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011): ten rounds of two 32 x 32 multiplications. The same key
// and counter give the same four words everywhere, on the host and in kernels.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace qwend {

struct PhiloxWords {
  uint32_t w[4];
  bool operator==(const PhiloxWords&) const = default;
};

QWEND_HOST_DEVICE inline PhiloxWords Philox4x32(uint64_t key, PhiloxWords counter) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53u;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u;
  constexpr uint32_t kWeyl1 = 0xBB67AE85u;
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = kMultiplier0 * counter.w[0];
    const uint64_t b = kMultiplier1 * counter.w[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.w[1] ^ k0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.w[3] ^ k1, static_cast<uint32_t>(a)}};
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return counter;
}

// Uniform in [0, 1), 53 bits.
QWEND_HOST_DEVICE inline double SamplingUniform(uint64_t seed, int32_t position) {
  const PhiloxWords r = Philox4x32(seed, {{static_cast<uint32_t>(position), 0, 0, 0}});
  const uint64_t bits = (static_cast<uint64_t>(r.w[0]) << 32) | r.w[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace qwend
