#include "tests/support/tensors.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>

namespace qwend::test {
namespace {

constexpr int64_t kGuardBytes = 256;
constexpr uint16_t kPoison = 0xffa5;  // NaN as bf16, and twice over as f32

int64_t Offset(const TensorView& v, const std::array<int64_t, 4>& index) {
  int64_t offset = 0;
  for (int d = 0; d < v.rank; ++d) offset += index[d] * v.strides[d];
  return offset;
}

// An f16 close to the value: tests need some f16, not a rounding rule.
uint16_t ToFp16(float value) {
  if (value == 0.0f) return 0;
  int exponent = 0;
  const float fraction = std::frexp(std::fabs(value), &exponent);
  const int biased = exponent + 14;
  const uint16_t sign = value < 0 ? 0x8000 : 0;
  if (biased <= 0) return static_cast<uint16_t>(sign | std::lround(std::fabs(value) * 0x1p24f));
  const auto mantissa = static_cast<uint32_t>(fraction * 2048.0f) - 1024u;
  return static_cast<uint16_t>(sign | (biased << 10) | mantissa);
}

void SetElement(const TensorView& v, int64_t offset, double value) {
  switch (v.dtype) {
    case DType::kF32:
      v.As<float>()[offset] = static_cast<float>(value);
      return;
    case DType::kBF16:
      v.As<uint16_t>()[offset] = FloatToBf16(static_cast<float>(value));
      return;
    case DType::kF16:
      v.As<uint16_t>()[offset] = ToFp16(static_cast<float>(value));
      return;
    case DType::kI32:
      v.As<int32_t>()[offset] = static_cast<int32_t>(value);
      return;
    case DType::kU8:
      v.As<uint8_t>()[offset] = static_cast<uint8_t>(value);
      return;
  }
}

void ForEach(const TensorView& v, const std::function<void(const std::array<int64_t, 4>&)>& fn) {
  std::array<int64_t, 4> i{};
  const auto size = [&](int d) { return d < v.rank ? v.shape[d] : 1; };
  for (i[0] = 0; i[0] < size(0); ++i[0]) {
    for (i[1] = 0; i[1] < size(1); ++i[1]) {
      for (i[2] = 0; i[2] < size(2); ++i[2]) {
        for (i[3] = 0; i[3] < size(3); ++i[3]) fn(i);
      }
    }
  }
}

std::string IndexString(const TensorView& v, const std::array<int64_t, 4>& index) {
  std::string s = "[";
  for (int d = 0; d < v.rank; ++d) s += (d ? ", " : "") + std::to_string(index[d]);
  return s + "]";
}

uint64_t FreshSeed() {
  if (const char* given = std::getenv("QWEND_TEST_SEED")) return std::strtoull(given, nullptr, 10);
  return std::random_device()();
}

}  // namespace

Rng::Rng() : Rng(FreshSeed()) {}

void Put(const TensorView& v, double value, int64_t i, int64_t j, int64_t k, int64_t l) {
  SetElement(v, Offset(v, {i, j, k, l}), value);
}

TestTensor::TestTensor(DType dtype, std::vector<int64_t> shape, int64_t gap) {
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int d = view_.rank - 1; d >= 0; --d) {
    view_.shape[d] = shape[d];
    view_.strides[d] = stride;
    stride *= shape[d];
    if (d == view_.rank - 1) stride += gap;
  }
  const int64_t bytes = (stride * SizeOf(dtype) + 7) / 8 * 8 + 2 * kGuardBytes;
  memory_.resize(bytes / 8);
  auto* words = reinterpret_cast<unsigned char*>(memory_.data());
  for (int64_t b = 0; b < bytes; b += 2) std::memcpy(words + b, &kPoison, 2);
  view_.data = words + kGuardBytes;
}

TestTensor TestTensor::Copy() const {
  TestTensor t;
  t.memory_ = memory_;
  t.view_ = view_;
  t.view_.data = reinterpret_cast<unsigned char*>(t.memory_.data()) + kGuardBytes;
  return t;
}

TestTensor&& TestTensor::Normal(Rng& rng, float scale) && {
  ForEach(view_, [&](const auto& i) { SetElement(view_, Offset(view_, i), rng.Normal(scale)); });
  return std::move(*this);
}

TestTensor&& TestTensor::Uniform(Rng& rng, float low, float high) && {
  ForEach(view_,
          [&](const auto& i) { SetElement(view_, Offset(view_, i), rng.Uniform(low, high)); });
  return std::move(*this);
}

TestTensor&& TestTensor::Values(const std::vector<double>& values) && {
  size_t n = 0;
  ForEach(view_, [&](const auto& i) { SetElement(view_, Offset(view_, i), values.at(n++)); });
  return std::move(*this);
}

void TestTensor::Poison() {
  const int size = SizeOf(view_.dtype);
  ForEach(view_, [&](const auto& i) {
    char* at = view_.As<char>() + Offset(view_, i) * size;
    const char bytes[4] = {'\xa5', '\xff', '\xa5', '\xff'};
    std::memcpy(at, bytes, size);
  });
}

::testing::AssertionResult TestTensor::GuardsIntact() const {
  TestTensor copy = Copy();
  copy.Poison();  // what is left besides the elements must all be poison
  const auto* bytes = reinterpret_cast<const unsigned char*>(copy.memory_.data());
  for (size_t b = 0; b < copy.memory_.size() * 8; b += 2) {
    if (std::memcmp(bytes + b, &kPoison, 2) != 0) {
      return ::testing::AssertionFailure()
             << "a guard of " << view_.ShapeString() << " was overwritten at byte "
             << static_cast<int64_t>(b) - kGuardBytes << " from its first element";
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult Close(const TensorView& actual, const TensorView& expected, double rtol,
                                 double atol) {
  if (actual.rank != expected.rank || actual.shape != expected.shape) {
    return ::testing::AssertionFailure()
           << actual.ShapeString() << " against " << expected.ShapeString();
  }
  double worst = -1;
  std::array<int64_t, 4> where{};
  ForEach(actual, [&](const auto& i) {
    const double a = Element(actual, Offset(actual, i));
    const double e = Element(expected, Offset(expected, i));
    const double allowed = atol + rtol * std::fabs(e);
    double excess = std::fabs(a - e) / allowed;
    if (a == e) excess = 0;
    if (std::isnan(a) || std::isnan(e)) excess = HUGE_VAL;
    if (excess > worst) {
      worst = excess;
      where = i;
    }
  });
  if (worst <= 1) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << actual.ShapeString() << " at " << IndexString(actual, where) << " is "
         << Element(actual, Offset(actual, where)) << ", expected "
         << Element(expected, Offset(expected, where)) << ", " << worst << " times the tolerance";
}

::testing::AssertionResult SameBits(const TensorView& a, const TensorView& b) {
  if (a.rank != b.rank || a.shape != b.shape || a.dtype != b.dtype) {
    return ::testing::AssertionFailure() << a.ShapeString() << " against " << b.ShapeString();
  }
  const int size = SizeOf(a.dtype);
  ::testing::AssertionResult result = ::testing::AssertionSuccess();
  ForEach(a, [&](const auto& i) {
    if (!result) return;
    const char* pa = a.As<char>() + Offset(a, i) * size;
    const char* pb = b.As<char>() + Offset(b, i) * size;
    if (std::memcmp(pa, pb, size) != 0) {
      result = ::testing::AssertionFailure()
               << a.ShapeString() << " differs first at " << IndexString(a, i) << ": "
               << Element(a, Offset(a, i)) << " and " << Element(b, Offset(b, i));
    }
  });
  return result;
}

}  // namespace qwend::test
