// Rotary position embedding: pairs (i, i + half) inside the first 2 * half elements of each head.
#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/rope.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {

void RotateHalf(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i;
    const F16 c = Load(cos + i, n);
    const F16 s = Load(sin + i, n);
    const F16 a = Load(x + i, n);
    const F16 b = Load(x + half + i, n);
    Store(NegMulAdd(b, s, Mul(a, c)), x + i, n);
    Store(MulAdd(a, s, Mul(b, c)), x + half + i, n);
  }
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(RotateHalf);

void RotateHeads(const TensorView& x, int64_t t, const float* cos, const float* sin, int64_t half) {
  for (int64_t h = 0; h < x.dim(1); ++h) {
    void* at = RowAt(x, t, h);
    if (x.dtype == DType::kF32) {
      HWY_DYNAMIC_DISPATCH(RotateHalf)(static_cast<float*>(at), cos, sin, half);
      continue;
    }
    float* work = Scratch(ScratchSlot::kWork, 2 * half);
    ToFloats(at, x.dtype, 2 * half, work);
    HWY_DYNAMIC_DISPATCH(RotateHalf)(work, cos, sin, half);
    FromFloats(work, 2 * half, x.dtype, at);
  }
}

}  // namespace

void Run(const ops::RopeEmbed& op, const LaunchContext& ctx) {
  const int64_t half = op.cos.cols();
  const int32_t* positions = op.positions.As<int32_t>();
  const int64_t work = 4 * (op.q.dim(1) + op.k.dim(1)) * half;
  ctx.pool.ParallelFor(op.q.rows(), GrainFor(work), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos = static_cast<const float*>(RowAt(op.cos, positions[t]));
      const float* sin = static_cast<const float*>(RowAt(op.sin, positions[t]));
      RotateHeads(op.q, t, cos, sin, half);
      RotateHeads(op.k, t, cos, sin, half);
    }
  });
}

}  // namespace qwend::cpu
#endif
