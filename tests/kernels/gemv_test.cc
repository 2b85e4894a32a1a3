// Gemv and SplitKReduce against one plain chain of fused multiply-adds per output: not within a
// tolerance but bit for bit, since that chain is what the operator promises.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "hwy/targets.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_types.h"
#include "kernels/cpu/panels.h"

namespace qwend::cpu {
namespace {

// Of these instruction sets each test runs those that this machine has.
constexpr int64_t kWithoutFma = HWY_SSSE3 | HWY_SSE4 | HWY_EMU128 | HWY_SCALAR;

// Runs `body` once under every instruction set that Gemv dispatches to.
template <typename Body>
void ForEachTarget(const Body& body) {
  hwy::SetSupportedTargetsForTest(0);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body((target & kWithoutFma) == 0);
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

uint16_t ToF16ForTest(float value) {
  // Random test values are multiples of 2^-8 below 4: exact in f16.
  if (value == 0) return 0;
  int exponent = 0;
  const float mantissa = std::frexp(std::abs(value), &exponent);
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (exponent + 14) << 10 |
                               (static_cast<int>(mantissa * 2048) & 0x3ff));
}

void Put(void* data, DType type, int64_t index, float value) {
  if (type == DType::kF32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] =
        type == DType::kBF16 ? FloatToBf16(value) : ToF16ForTest(value);
  }
}

// A matrix with gaps between its rows; gaps and a band on both sides hold NaN.
struct Matrix {
  static constexpr int64_t kBand = 64;
  Matrix(DType type, int64_t rows, int64_t cols, int64_t gap)
      : type(type), rows(rows), cols(cols), stride(cols + gap) {
    storage.assign(static_cast<size_t>((2 * kBand + rows * stride) * SizeOf(type)), '\xff');
  }
  void* data() { return storage.data() + kBand * SizeOf(type); }
  TensorView view() {
    TensorView v = TensorView::Of(data(), type, {rows, cols});
    v.strides[0] = stride;
    return v;
  }
  float at(int64_t r, int64_t c) { return LoadElement(data(), type, r * stride + c); }
  // f32 elements use their whole mantissa, so that a product rounded before it is added shows.
  void FillRandom(std::mt19937& random) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const float value = static_cast<float>(static_cast<int>(random() % 1023) - 511) / 256.0f;
        const float finer = static_cast<float>(random()) * 0x1p-42f;
        Put(data(), type, r * stride + c, type == DType::kF32 ? value + finer : value);
      }
    }
  }
  // True when all bytes outside the elements still are 0xff.
  bool GuardsIntact() {
    std::vector<char> copy = storage;
    for (int64_t r = 0; r < rows; ++r) {
      std::memset(copy.data() + (kBand + r * stride) * SizeOf(type), 0xff,
                  static_cast<size_t>(cols * SizeOf(type)));
    }
    return std::all_of(copy.begin(), copy.end(), [](char c) { return c == '\xff'; });
  }

  DType type;
  int64_t rows;
  int64_t cols;
  int64_t stride;
  std::vector<char> storage;
};

struct Case {
  int64_t rows = 1;
  int64_t n = 1;
  int64_t k = 1;
  DType weight = DType::kBF16;
  bool packed = true;
  DType x = DType::kF32;
  DType out = DType::kF32;
  DType bias = DType::kI32;  // kI32: none
  int splits = 1;

  std::string Name() const {
    return std::to_string(rows) + "x" + std::to_string(k) + " * " + std::to_string(n) + " weight " +
           qwend::Name(weight) + (packed ? " packed" : " row-major") + " x " + qwend::Name(x) +
           " out " + qwend::Name(out) + " bias " + qwend::Name(bias) + " splits " +
           std::to_string(splits);
  }
};

// Fills a case's matrices once, runs it under any pool and instruction set, and checks the result.
struct Harness {
  Harness(const Case& c, uint32_t seed)
      : c(c),
        x(c.x, c.rows, c.k, 5),
        weight(c.weight, c.n, c.k, c.packed ? 0 : 3),
        bias(c.bias == DType::kI32 ? DType::kF32 : c.bias, 1, c.n, 0) {
    std::mt19937 random(seed);
    x.FillRandom(random);
    weight.FillRandom(random);
    bias.FillRandom(random);
    if (c.packed) {
      const DType type = PackedType(c.weight);
      panels.resize(static_cast<size_t>(PanelBytes(type, c.n, c.k)));
      PackPanels(weight.view(), type, panels.data());
      weight_view = TensorView::Of(panels.data(), type, {c.n, c.k});
      weight_view.layout = Layout::kCpuPanels;
    } else {
      weight_view = weight.view();
    }
  }

  Matrix RunOnce(ThreadPool& pool) {
    Matrix out(c.out, c.rows, c.n, 7);
    ops::Gemv gemv;
    gemv.out = out.view();
    gemv.x = x.view();
    gemv.weight = weight_view;
    TensorView bias_view;
    if (c.bias != DType::kI32) {
      bias_view = TensorView::Of(bias.data(), c.bias, {c.n});
      gemv.bias = bias_view;
    }
    gemv.splits = c.splits;
    const LaunchContext ctx{pool};
    if (c.splits > 1) {
      Matrix partials(DType::kF32, c.splits * c.rows, c.n, 0);
      gemv.partials = TensorView::Of(partials.data(), DType::kF32, {c.splits, c.rows, c.n});
      gemv.bias = TensorView();
      Run(gemv, ctx);
      EXPECT_TRUE(partials.GuardsIntact());
      Run(ops::SplitKReduce{.out = out.view(), .partials = gemv.partials, .bias = bias_view}, ctx);
    } else {
      Run(gemv, ctx);
    }
    EXPECT_TRUE(out.GuardsIntact()) << "written outside the output";
    return out;
  }

  // `fused`: the instruction set has fused multiply-add, and bits must agree.
  void Check(Matrix out, bool fused) {
    const int64_t pairs = ((c.k + 1) / 2 + c.splits - 1) / c.splits;
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t n = 0; n < c.n; ++n) {
        float chain = 0;
        double exact = 0;
        double magnitude = 0;
        for (int s = 0; s < c.splits; ++s) {
          float part = 0;
          for (int64_t k = s * pairs * 2; k < std::min(c.k, (s + 1) * pairs * 2); ++k) {
            part = std::fma(weight.at(n, k), x.at(t, k), part);
            const double product = static_cast<double>(weight.at(n, k)) * x.at(t, k);
            exact += product;
            magnitude += std::abs(product);
          }
          chain = s == 0 ? part : chain + part;
        }
        if (c.bias != DType::kI32) {
          chain += bias.at(0, n);
          exact += bias.at(0, n);
          magnitude += std::abs(bias.at(0, n));
        }
        if (c.out == DType::kBF16) chain = Bf16ToFloat(FloatToBf16(chain));
        const float got = out.at(t, n);
        if (fused) {
          ASSERT_EQ(got, chain) << "row " << t << " output " << n;
        }
        const double rounding = c.out == DType::kBF16 ? 1.0 / 256 : 0;
        const double sum_error = static_cast<double>(c.k + c.splits + 1) * 0x1p-24 * magnitude;
        ASSERT_NEAR(got, exact, sum_error + rounding * std::abs(exact))
            << "row " << t << " output " << n;
      }
    }
  }

  Case c;
  Matrix x;
  Matrix weight;
  Matrix bias;
  std::vector<char> panels;
  TensorView weight_view;
};

void RunCase(const Case& c, ThreadPool& pool) {
  SCOPED_TRACE(c.Name());
  Harness harness(c, std::random_device{}());
  ForEachTarget([&](bool fused) { harness.Check(harness.RunOnce(pool), fused); });
}

TEST(Gemv, OddShapes) {
  ThreadPool pool(3);
  for (const int64_t n : {1, 15, 16, 17, 31, 32, 33, 48, 100}) {
    for (const int64_t k : {1, 2, 3, 31, 64}) {
      for (const int64_t rows : {1, 2, 5, 12, 13}) RunCase({.rows = rows, .n = n, .k = k}, pool);
    }
  }
}

TEST(Gemv, EveryNumberOfRows) {
  ThreadPool pool(2);
  for (int64_t rows = 1; rows <= 40; ++rows) RunCase({.rows = rows, .n = 49, .k = 37}, pool);
  RunCase({.rows = 130, .n = 65, .k = 130}, pool);
}

TEST(Gemv, LongRows) {
  ThreadPool pool(2);
  for (const int64_t rows : {1, 3, 16}) RunCase({.rows = rows, .n = 160, .k = 3584}, pool);
}

TEST(Gemv, TypesBiasAndLayouts) {
  ThreadPool pool(2);
  for (const DType weight : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const bool packed : {true, false}) {
      for (const DType x : {DType::kF32, DType::kBF16}) {
        for (const DType out : {DType::kF32, DType::kBF16}) {
          for (const DType bias : {DType::kI32, DType::kF32, DType::kBF16, DType::kF16}) {
            for (const int64_t rows : {1, 14}) {
              RunCase({.rows = rows,
                       .n = 50,
                       .k = 33,
                       .weight = weight,
                       .packed = packed,
                       .x = x,
                       .out = out,
                       .bias = bias},
                      pool);
            }
          }
        }
      }
    }
  }
}

TEST(Gemv, Splits) {
  ThreadPool pool(2);
  for (const int splits : {2, 3, 4, 7}) {
    for (const int64_t k : {1, 5, 64, 131}) {
      for (const int64_t rows : {1, 14}) {
        RunCase({.rows = rows, .n = 50, .k = k, .splits = splits}, pool);
        RunCase({.rows = rows,
                 .n = 20,
                 .k = k,
                 .x = DType::kBF16,
                 .out = DType::kBF16,
                 .bias = DType::kBF16,
                 .splits = splits},
                pool);
      }
    }
  }
}

// A row alone, in any batch, under any number of threads and any instruction set with fused
// multiply-add has the same bits.
TEST(Gemv, BitsDependOnTheRowAlone) {
  for (const DType type : {DType::kBF16, DType::kF32}) {
    const Case all{.rows = 64, .n = 80, .k = 515, .weight = type};
    Harness harness(all, 11);
    ThreadPool one(1);
    Matrix want = harness.RunOnce(one);
    for (const int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      for (const int64_t rows : {1, 2, 7, 8, 33, 64}) {
        Harness part(all, 11);
        part.c.rows = rows;
        part.x.rows = rows;
        ForEachTarget([&](bool fused) {
          if (!fused) return;
          Matrix got = part.RunOnce(pool);
          for (int64_t t = 0; t < rows; ++t) {
            ASSERT_EQ(std::memcmp(got.view().As<float>() + t * got.stride,
                                  want.view().As<float>() + t * want.stride, sizeof(float) * 80),
                      0)
                << "row " << t << " of " << rows << ", " << threads << " threads";
          }
        });
      }
    }
  }
}

// NaN and infinity in one row stay there; padding never turns them into NaN elsewhere.
TEST(Gemv, NonFiniteRowsStayAlone) {
  ThreadPool pool(2);
  Harness harness({.rows = 3, .n = 17, .k = 31}, 5);
  float* x = harness.x.view().As<float>();
  x[harness.x.stride * 1 + 30] = std::numeric_limits<float>::quiet_NaN();
  x[harness.x.stride * 2 + 30] = std::numeric_limits<float>::infinity();
  ForEachTarget([&](bool) {
    Matrix out = harness.RunOnce(pool);
    for (int64_t n = 0; n < 17; ++n) {
      EXPECT_TRUE(std::isfinite(out.at(0, n)));
      EXPECT_TRUE(std::isnan(out.at(1, n)));
      EXPECT_FALSE(std::isfinite(out.at(2, n)));
      EXPECT_EQ(std::isnan(out.at(2, n)), harness.weight.at(n, 30) == 0.0f) << n;
    }
  });
}

}  // namespace
}  // namespace qwend::cpu
