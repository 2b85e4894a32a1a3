// Words in which blocks add up a float each, in any order with the same result: the sum in fixed
// point above, how many have added below. Contributions of 2^22 and more, infinities and NaN make
// the sum NaN; each smaller one is exact to 2^-27, and the sum is rounded once more to a float. At
// most kMaxAdders add between two readings.
#pragma once

#include <cmath>

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

constexpr int kCountBits = 5, kMaxAdders = 16;
constexpr float kFixedPoint = 67108864.0f;        // 2^26
constexpr float kContributionLimit = 4194304.0f;  // 2^22
constexpr long long kPoison = 1ll << 53, kLegal = 1ll << 52;

__host__ __device__ __forceinline__ unsigned long long Contribution(float v) {
#ifdef __CUDA_ARCH__
  const long long fixed = fabsf(v) < kContributionLimit ? __float2ll_rn(v * kFixedPoint) : kPoison;
#else
  const long long fixed =
      std::fabs(v) < kContributionLimit ? std::llrint(v * kFixedPoint) : kPoison;
#endif
  return static_cast<unsigned long long>(fixed) << kCountBits;
}

// Whether a word has been added to `added` times since it was zero.
__host__ __device__ __forceinline__ bool HasAll(unsigned long long word, unsigned added) {
  return (static_cast<unsigned>(word) - added) % (1u << kCountBits) == 0;
}

// The sum of what is not withdrawn, of a word that has been added to `added` times.
__host__ __device__ __forceinline__ float SumOf(unsigned long long word, unsigned added) {
  const long long fixed = static_cast<long long>(word - added) >> kCountBits;
  if (fixed >= kLegal || fixed <= -kLegal) return NAN;
  return static_cast<float>(fixed) * (1.0f / kFixedPoint);
}

}  // namespace qwend::cuda
