// Sixteen floats at a time, whatever the register width: the one vector type of the operators.
// Sixteen partial sums and one fixed tree make a result the same with AVX2 and with AVX-512.
//
// Compiled once per instruction set; include after hwy/foreach_target.h.
#include <cmath>
#include <cstddef>
#include <utility>

#include "hwy/highway.h"

#if defined(QWEND_KERNELS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef QWEND_KERNELS_CPU_SIMD_INL_H_
#undef QWEND_KERNELS_CPU_SIMD_INL_H_
#else
#define QWEND_KERNELS_CPU_SIMD_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, 16>;
using FloatVec = hn::Vec<FloatTag>;
using IntTag = hn::RebindToSigned<FloatTag>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));
constexpr int kVectors = 16 / kLanes;
using VectorIndex = std::make_index_sequence<kVectors>;

struct F16 {
  FloatVec v[kVectors];
};

template <typename Fn, size_t... I>
HWY_INLINE F16 Generate(const Fn& fn, std::index_sequence<I...>) {
  return F16{{fn(I)...}};
}

HWY_INLINE F16 Splat(float x) {
  return Generate([x](size_t) HWY_ATTR { return hn::Set(FloatTag(), x); }, VectorIndex());
}
HWY_INLINE F16 Zero() { return Splat(0.0f); }

HWY_INLINE F16 Load(const float* p) {
  return Generate([p](size_t i) HWY_ATTR { return hn::LoadU(FloatTag(), p + i * kLanes); },
                  VectorIndex());
}
HWY_INLINE void Store(const F16& a, float* p) {
  for (int i = 0; i < kVectors; ++i) hn::StoreU(a.v[i], FloatTag(), p + i * kLanes);
}

// The first min(n, 16) elements; lanes beyond are zero, and memory beyond is not touched.
HWY_INLINE F16 Load(const float* p, int64_t n) {
  if (n >= 16) return Load(p);
  float padded[16] = {};
  for (int64_t i = 0; i < n; ++i) padded[i] = p[i];
  return Load(padded);
}
HWY_INLINE void Store(const F16& a, float* p, int64_t n) {
  if (n >= 16) return Store(a, p);
  float padded[16];
  Store(a, padded);
  for (int64_t i = 0; i < n; ++i) p[i] = padded[i];
}

HWY_INLINE F16 Add(const F16& a, const F16& b) {
  return Generate([&](size_t i) HWY_ATTR { return hn::Add(a.v[i], b.v[i]); }, VectorIndex());
}
HWY_INLINE F16 Sub(const F16& a, const F16& b) {
  return Generate([&](size_t i) HWY_ATTR { return hn::Sub(a.v[i], b.v[i]); }, VectorIndex());
}
HWY_INLINE F16 Mul(const F16& a, const F16& b) {
  return Generate([&](size_t i) HWY_ATTR { return hn::Mul(a.v[i], b.v[i]); }, VectorIndex());
}
HWY_INLINE F16 Div(const F16& a, const F16& b) {
  return Generate([&](size_t i) HWY_ATTR { return hn::Div(a.v[i], b.v[i]); }, VectorIndex());
}
HWY_INLINE F16 Max(const F16& a, const F16& b) {
  return Generate([&](size_t i) HWY_ATTR { return hn::Max(a.v[i], b.v[i]); }, VectorIndex());
}
// a * b + c
HWY_INLINE F16 MulAdd(const F16& a, const F16& b, const F16& c) {
  return Generate([&](size_t i) HWY_ATTR { return hn::MulAdd(a.v[i], b.v[i], c.v[i]); },
                  VectorIndex());
}

// c - a * b
HWY_INLINE F16 NegMulAdd(const F16& a, const F16& b, const F16& c) {
  return Generate([&](size_t i) HWY_ATTR { return hn::NegMulAdd(a.v[i], b.v[i], c.v[i]); },
                  VectorIndex());
}

// Lane i with lane i + 8, then + 4, + 2, + 1.
#if HWY_TARGET == HWY_SCALAR
template <class D, typename Fold>
HWY_INLINE float FoldLanes(D /*d*/, hn::Vec<D> v, const Fold& /*fold*/) {
  return hn::GetLane(v);
}
#else
template <class D, typename Fold>
HWY_INLINE float FoldLanes(D d, hn::Vec<D> v, const Fold& fold) {
  if constexpr (hn::MaxLanes(d) == 1) {
    return hn::GetLane(v);
  } else {
    const hn::Half<D> half;
    return FoldLanes(half, fold(hn::LowerHalf(half, v), hn::UpperHalf(half, v)), fold);
  }
}
#endif
template <typename Fold>
HWY_INLINE float FoldAll(F16 a, const Fold& fold) {
  for (int n = kVectors / 2; n >= 1; n /= 2) {
    for (int i = 0; i < n; ++i) a.v[i] = fold(a.v[i], a.v[i + n]);
  }
  return FoldLanes(FloatTag(), a.v[0], fold);
}
HWY_INLINE float Sum(const F16& a) {
  return FoldAll(a, [](auto x, auto y) HWY_ATTR { return hn::Add(x, y); });
}
HWY_INLINE float MaxLane(const F16& a) {
  return FoldAll(a, [](auto x, auto y) HWY_ATTR { return hn::Max(x, y); });
}

// sum a[i] * b[i] in 64 partial sums.
HWY_INLINE float Dot(const float* a, const float* b, int64_t n) {
  F16 s0 = Zero(), s1 = Zero(), s2 = Zero(), s3 = Zero();
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    s0 = MulAdd(Load(a + i), Load(b + i), s0);
    s1 = MulAdd(Load(a + i + 16), Load(b + i + 16), s1);
    s2 = MulAdd(Load(a + i + 32), Load(b + i + 32), s2);
    s3 = MulAdd(Load(a + i + 48), Load(b + i + 48), s3);
  }
  for (; i < n; i += 16) s0 = MulAdd(Load(a + i, n - i), Load(b + i, n - i), s0);
  return Sum(Add(Add(s0, s1), Add(s2, s3)));
}

// e^x to about one unit in the last place, subnormal results included; e^-inf is 0 and NaN stays
// NaN. x = n ln 2 + r, |r| <= ln 2 / 2, and the Taylor series of e^r to r^7, whose remainder is
// below 2^-27.
HWY_INLINE FloatVec Exp(FloatVec x) {
  const FloatTag d;
  const IntTag di;
  const FloatVec clamped = hn::Min(hn::Max(x, hn::Set(d, -104.0f)), hn::Set(d, 89.0f));
  const FloatVec n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504088896341f)));
  FloatVec r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  FloatVec p = hn::Set(d, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(hn::Mul(r, r), p, r);
  p = hn::Add(p, hn::Set(d, 1.0f));
  const auto exponent = hn::ConvertTo(di, n);
  const auto low = hn::ShiftRight<1>(exponent);
  const auto high = hn::Sub(exponent, low);
  const auto bias = hn::Set(di, 127);
  p = hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(low, bias))));
  p = hn::Mul(p, hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(high, bias))));
  return hn::IfThenElse(hn::Eq(x, x), p, x);
}
HWY_INLINE F16 Exp(const F16& a) {
  return Generate([&](size_t i) HWY_ATTR { return Exp(a.v[i]); }, VectorIndex());
}

// 1 / (1 + e^-x) and x / (1 + e^-x).
HWY_INLINE F16 Sigmoid(const F16& x) {
  return Div(Splat(1.0f), Add(Splat(1.0f), Exp(Sub(Zero(), x))));
}
HWY_INLINE F16 Silu(const F16& x) { return Div(x, Add(Splat(1.0f), Exp(Sub(Zero(), x)))); }

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
