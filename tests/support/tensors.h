// Tensors for kernel tests: memory with guard bands round it and between its rows, poison where an
// operator must write, random contents, and comparisons.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/tensor.h"

namespace qwend::test {

// A generator with a fresh seed, or QWEND_TEST_SEED when that is set. Put Trace() in a SCOPED_TRACE
// so that a failure names the seed.
class Rng {
 public:
  Rng();
  explicit Rng(uint64_t seed) : seed_(seed), engine_(seed) {}
  std::string Trace() const { return "QWEND_TEST_SEED=" + std::to_string(seed_); }
  float Normal(float scale) { return std::normal_distribution<float>(0.0f, scale)(engine_); }
  float Uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(engine_);
  }
  int Int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  std::mt19937_64& engine() { return engine_; }

 private:
  uint64_t seed_;
  std::mt19937_64 engine_;
};

// Element access by index in double, for any float or integer type and any strides. Writing rounds
// to nearest even.
inline double Element(const TensorView& v, int64_t offset) {
  switch (v.dtype) {
    case DType::kF32:
      return v.As<float>()[offset];
    case DType::kBF16:
      return Bf16ToFloat(v.As<uint16_t>()[offset]);
    case DType::kF16:
      return Fp16ToFloat(v.As<uint16_t>()[offset]);
    case DType::kI32:
      return v.As<int32_t>()[offset];
    case DType::kU8:
      return v.As<uint8_t>()[offset];
  }
  return 0;
}
inline double At(const TensorView& v, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0) {
  return Element(v, i * v.strides[0] + j * v.strides[1] + k * v.strides[2] + l * v.strides[3]);
}
void Put(const TensorView& v, double value, int64_t i, int64_t j = 0, int64_t k = 0, int64_t l = 0);

// Owns the memory of one tensor. Every byte that belongs to no element is a guard, and every
// element starts as poison; both read as NaN (or a large negative integer).
class TestTensor {
 public:
  TestTensor() = default;
  // `gap`: guard elements after each innermost row, so that outer dimensions are strided.
  TestTensor(DType dtype, std::vector<int64_t> shape, int64_t gap = 0);
  TestTensor(TestTensor&&) = default;
  TestTensor& operator=(TestTensor&&) = default;

  const TensorView& view() const { return view_; }
  operator const TensorView&() const { return view_; }  // NOLINT: tests pass tensors for views
  TestTensor Copy() const;  // same shape, gaps and contents in other memory

  TestTensor&& Normal(Rng& rng, float scale = 1.0f) &&;
  TestTensor&& Uniform(Rng& rng, float low, float high) &&;
  TestTensor&& Values(const std::vector<double>& values) &&;  // in row-major order
  void Poison();

  // Whether all guards are as they were.
  ::testing::AssertionResult GuardsIntact() const;

 private:
  std::vector<uint64_t> memory_;
  TensorView view_;
};

// Every element within atol + rtol * |expected|. NaN is never close; names the worst element.
::testing::AssertionResult Close(const TensorView& actual, const TensorView& expected, double rtol,
                                 double atol);
// Same shape, same type, same bits.
::testing::AssertionResult SameBits(const TensorView& a, const TensorView& b);

}  // namespace qwend::test
