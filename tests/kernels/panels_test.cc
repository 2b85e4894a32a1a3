#include "kernels/cpu/panels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/float_types.h"

namespace qwend::cpu {
namespace {

TEST(FloatTypes, EveryBF16SurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Bf16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(value))));
    } else {
      EXPECT_EQ(FloatToBf16(value), bits);
    }
  }
}

TEST(FloatTypes, BF16RoundsToNearestEven) {
  EXPECT_EQ(FloatToBf16(1.0f), 0x3f80);
  EXPECT_EQ(FloatToBf16(std::nextafter(1.00390625f, 2.0f)), 0x3f81);  // above half way
  EXPECT_EQ(FloatToBf16(1.00390625f), 0x3f80);                        // half way, to even
  EXPECT_EQ(FloatToBf16(1.01171875f), 0x3f82);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7f80);  // to infinity
  EXPECT_EQ(FloatToBf16(-0.0f), 0x8000);
}

TEST(FloatTypes, F16AgreesWithItsDefinition) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const int exponent = static_cast<int>(bits >> 10 & 0x1f);
    const double mantissa = static_cast<double>(bits & 0x3ff);
    double want =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    if (exponent == 31) {
      want = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
    }
    if (bits & 0x8000) want = -want;
    const float got = Fp16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << bits;
    } else {
      EXPECT_EQ(got, static_cast<float>(want)) << bits;
      EXPECT_EQ(std::signbit(got), std::signbit(want)) << bits;
    }
  }
}

struct Shape {
  int64_t rows;
  int64_t cols;
};

class Panels : public testing::TestWithParam<std::tuple<Shape, DType>> {};

TEST_P(Panels, EveryElementIsFoundAgainAndNothingElseIsWritten) {
  const auto [shape, dtype] = GetParam();
  const auto [rows, cols] = shape;
  constexpr int64_t kGap = 3;  // between host rows
  std::mt19937 random(static_cast<uint32_t>(rows * 1000 + cols));
  std::vector<char> host(static_cast<size_t>(rows * (cols + kGap) * SizeOf(dtype)));
  for (char& c : host) c = static_cast<char>(random() & 0x3b);  // finite in every type
  TensorView view = TensorView::Of(host.data(), dtype, {rows, cols});
  view.strides[0] = cols + kGap;

  const DType packed_type = PackedType(dtype);
  const int64_t bytes = PanelBytes(packed_type, rows, cols);
  constexpr int kGuard = 64;
  std::vector<uint8_t> packed(static_cast<size_t>(bytes + kGuard), 0xa5);
  PackPanels(view, packed_type, packed.data());
  for (int i = 0; i < kGuard; ++i) ASSERT_EQ(packed[bytes + i], 0xa5);

  TensorView panels = TensorView::Of(packed.data(), packed_type, {rows, cols});
  panels.layout = Layout::kCpuPanels;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols; ++k) {
      ASSERT_EQ(PanelElement(panels, r, k), LoadElement(host.data(), dtype, r * (cols + kGap) + k))
          << r << ", " << k;
    }
  }

  // Padding is zero, so that all bytes together hold the matrix's and nothing else.
  double sum = 0;
  double want = 0;
  if (packed_type == DType::kBF16) {
    for (int64_t i = 0; i < bytes / 2; ++i) sum += LoadElement(packed.data(), packed_type, i);
  } else {
    for (int64_t i = 0; i < bytes / 4; ++i) sum += LoadElement(packed.data(), packed_type, i);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < cols; ++k) {
      want += LoadElement(host.data(), dtype, r * (cols + kGap) + k);
    }
  }
  EXPECT_NEAR(sum, want, 1e-9 * std::abs(want));
}

TEST_P(Panels, RangesEqualTheWhole) {
  const auto [shape, dtype] = GetParam();
  const auto [rows, cols] = shape;
  std::mt19937 random(7);
  std::vector<char> host(static_cast<size_t>(rows * cols * SizeOf(dtype)));
  for (char& c : host) c = static_cast<char>(random() & 0x3b);
  const TensorView view = TensorView::Of(host.data(), dtype, {rows, cols});
  const DType packed_type = PackedType(dtype);
  const int64_t bytes = PanelBytes(packed_type, rows, cols);
  std::vector<uint8_t> whole(static_cast<size_t>(bytes), 1);
  std::vector<uint8_t> pieces(static_cast<size_t>(bytes), 2);
  PackPanels(view, packed_type, whole.data());
  for (int64_t p = 0; p < PanelCount(rows); ++p) {
    PackPanelRange(view, packed_type, p, p + 1, pieces.data() + PanelOffset(packed_type, cols, p));
  }
  EXPECT_EQ(whole, pieces);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Panels,
                         testing::Combine(testing::Values(Shape{1, 1}, Shape{1, 64}, Shape{15, 3},
                                                          Shape{16, 32}, Shape{17, 33},
                                                          Shape{31, 2}, Shape{32, 100},
                                                          Shape{33, 31}, Shape{100, 65}),
                                          testing::Values(DType::kBF16, DType::kF16, DType::kF32)));

}  // namespace
}  // namespace qwend::cpu
