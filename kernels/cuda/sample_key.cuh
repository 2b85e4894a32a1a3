// A candidate for the greedy token as one integer, so that the best of many is their maximum
// whatever the order in which they are compared.
#pragma once

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

using SampleKey = unsigned long long;
constexpr SampleKey kNoKey = 0;          // no candidate yet
constexpr SampleKey kPoisonKey = ~0ull;  // a logit was NaN or +inf

// The order-preserving integer of a float.
__device__ __forceinline__ uint32_t OrderKey(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ bool Banned(const SamplingRow& row, int id) {
  for (int i = 0; i < row.num_banned; ++i) {
    if (row.banned[i] == id) return true;
  }
  return false;
}

__device__ __forceinline__ bool Poisoned(float logit) { return isnan(logit) || logit == INFINITY; }

// The larger logit, the lower id on a tie. Forbidden ids are no candidates, but poison all the
// same.
__device__ __forceinline__ SampleKey KeyOf(float logit, int id, bool allowed) {
  if (Poisoned(logit)) return kPoisonKey;
  if (!allowed || logit == -INFINITY) return kNoKey;
  // Adding zero makes -0 and +0 one.
  return static_cast<SampleKey>(OrderKey(logit + 0.0f)) << 32 | ~static_cast<uint32_t>(id);
}

__device__ __forceinline__ int IdOf(SampleKey key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

}  // namespace qwend::cuda
