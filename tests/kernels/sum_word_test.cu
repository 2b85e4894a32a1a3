// The words that the persistent step's blocks add up in, as the host computes them (the device
// rounds with an instruction of its own; cuda_model_test holds its results): the same bits
// in any order, complete only when all have added, and never a number where one part was none.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/sum_word.cuh"

namespace qwend::cuda {
namespace {

constexpr unsigned kAdders = 14;  // two groups of warps in each of seven clusters

std::vector<float> Parts(std::mt19937& random, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> parts(kAdders);
  for (float& v : parts) v = normal(random);
  return parts;
}

unsigned long long Sum(const std::vector<float>& parts) {
  unsigned long long word = 0;
  for (float v : parts) word += Contribution(v) + 1;
  return word;
}

TEST(SumWord, HasTheSameBitsInAnyOrder) {
  std::mt19937 random(1);
  for (float scale : {1e-4f, 1.0f, 300.0f, 1e5f}) {
    std::vector<float> parts = Parts(random, scale);
    double exact = 0;
    for (float v : parts) exact += v;
    const unsigned long long word = Sum(parts);
    for (int i = 0; i < 20; ++i) {
      std::shuffle(parts.begin(), parts.end(), random);
      EXPECT_EQ(Sum(parts), word);
    }
    const double error = std::abs(SumOf(word, kAdders) - exact);
    EXPECT_LE(error, kAdders / 134217728.0 + std::abs(exact) * 6e-8) << scale;
  }
}

TEST(SumWord, IsCompleteOnlyWhenAllHaveAdded) {
  std::mt19937 random(2);
  unsigned long long word = 0;
  std::vector<float> before(kAdders, 0.0f);
  for (unsigned use = 1; use <= 40; ++use) {  // more often than a step does, past every carry
    const std::vector<float> parts = Parts(random, 10.0f);
    for (unsigned i = 0; i < kAdders; ++i) {
      EXPECT_FALSE(HasAll(word, kAdders * use)) << use << ", " << i;
      word += Contribution(parts[i]) - Contribution(before[i]) + 1;
    }
    EXPECT_TRUE(HasAll(word, kAdders * use)) << use;
    // What was withdrawn leaves nothing behind.
    EXPECT_EQ(SumOf(word, kAdders * use), SumOf(Sum(parts), kAdders)) << use;
    before = parts;
  }
}

TEST(SumWord, IsNoNumberWhereAPartIsNone) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::mt19937 random(3);
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity,
                    kContributionLimit, -kContributionLimit, 3e38f}) {
    for (unsigned count = 1; count <= 16; ++count) {
      for (float beside : {1.0f, 4194303.0f, -4194303.0f}) {
        std::vector<float> parts(16, beside);
        std::fill(parts.begin(), parts.begin() + count, bad);
        const unsigned long long word = Sum(parts);
        EXPECT_TRUE(HasAll(word, 16));
        EXPECT_TRUE(std::isnan(SumOf(word, 16))) << bad << ", " << count << ", " << beside;
        // And a number again, when it is withdrawn.
        unsigned long long next = word;
        for (float v : parts) next += Contribution(1.0f) - Contribution(v) + 1;
        EXPECT_EQ(SumOf(next, 32), 16.0f) << bad << ", " << count << ", " << beside;
      }
    }
  }
  EXPECT_EQ(SumOf(Sum(std::vector<float>(16, 4194303.0f)), 16), 16 * 4194303.0f);
  EXPECT_EQ(SumOf(Sum(std::vector<float>(16, -4194303.0f)), 16), -16 * 4194303.0f);
}

}  // namespace
}  // namespace qwend::cuda
