// Every root-mean-square norm. A row's sum of squares is taken in 64 partial sums and one fixed
// tree, or, when the operator is split, one such sum per part, added in order of the part.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/norm.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {

float SumOfSquares(const float* x, int64_t n) { return Dot(x, x, n); }

// sum = a + b. sum may be a.
void AddResidualRow(const float* a, const float* b, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; i += 16) {
    Store(Add(Load(a + i, n - i), Load(b + i, n - i)), sum + i, n - i);
  }
}

// out = x * inv * (offset + weight). out may be x.
void ScaleRow(const float* x, float inv, float offset, const float* weight, int64_t n, float* out) {
  const F16 scale = Splat(inv);
  const F16 add = Splat(offset);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 w = Add(add, Load(weight + i, n - i));
    Store(Mul(Mul(Load(x + i, n - i), scale), w), out + i, n - i);
  }
}

// out = x * inv * weight * silu(z).
void ScaleGatedRow(const float* x, float inv, const float* weight, const float* z, int64_t n,
                   float* out) {
  const F16 scale = Splat(inv);
  for (int64_t i = 0; i < n; i += 16) {
    const F16 normed = Mul(Mul(Load(x + i, n - i), scale), Load(weight + i, n - i));
    Store(Mul(normed, Silu(Load(z + i, n - i))), out + i, n - i);
  }
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(AddResidualRow);
HWY_EXPORT(SumOfSquares);
HWY_EXPORT(ScaleRow);
HWY_EXPORT(ScaleGatedRow);

float InverseRms(float sum_of_squares, int64_t n, float eps) {
  return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(n) + eps);
}

// RmsNorm over each of the `heads` rows of x[t], in place.
void NormHeads(const TensorView& x, const TensorView& weight, float eps, float offset, int64_t t) {
  const int64_t dim = x.cols();
  const float* w = ReadFloats(weight.data, weight.dtype, dim, ScratchSlot::kWeight);
  for (int64_t h = 0; h < x.dim(1); ++h) {
    void* at = RowAt(x, t, h);
    const float* in = ReadFloats(at, x.dtype, dim, ScratchSlot::kInA);
    float* out = WriteFloats(at, x.dtype, dim, ScratchSlot::kOutA);
    const float inv = InverseRms(HWY_DYNAMIC_DISPATCH(SumOfSquares)(in, dim), dim, eps);
    HWY_DYNAMIC_DISPATCH(ScaleRow)(in, inv, offset, w, dim, out);
    WriteBack(out, dim, x.dtype, at);
  }
}

}  // namespace

void Run(const ops::RmsNorm& op, const LaunchContext& ctx) {
  const int64_t n = op.x.cols();
  ctx.pool.ParallelFor(op.x.rows(), GrainFor(2 * n), [&](int64_t begin, int64_t end, int) {
    const float* w = ReadFloats(op.weight.data, op.weight.dtype, n, ScratchSlot::kWeight);
    for (int64_t t = begin; t < end; ++t) {
      const float* x = ReadFloats(RowAt(op.x, t), op.x.dtype, n, ScratchSlot::kInA);
      float sum = 0.0f;
      if (op.splits == 1) {
        sum = HWY_DYNAMIC_DISPATCH(SumOfSquares)(x, n);
      } else {
        float* parts = static_cast<float*>(RowAt(op.partial_sums, t));
        const int64_t share = (n + op.splits - 1) / op.splits;
        for (int p = 0; p < op.splits; ++p) {
          const int64_t from = std::min(n, p * share);
          const int64_t to = std::min(n, from + share);
          parts[p] = HWY_DYNAMIC_DISPATCH(SumOfSquares)(x + from, to - from);
          sum += parts[p];
        }
      }
      float* out = WriteFloats(RowAt(op.out, t), op.out.dtype, n, ScratchSlot::kOutA);
      HWY_DYNAMIC_DISPATCH(ScaleRow)(x, InverseRms(sum, n, op.eps), op.weight_offset, w, n, out);
      WriteBack(out, n, op.out.dtype, RowAt(op.out, t));
    }
  });
}

void Run(const ops::RmsNormResidualFused& op, const LaunchContext& ctx) {
  const int64_t n = op.a.cols();
  ctx.pool.ParallelFor(op.a.rows(), GrainFor(3 * n), [&](int64_t begin, int64_t end, int) {
    const float* w = ReadFloats(op.weight.data, op.weight.dtype, n, ScratchSlot::kWeight);
    for (int64_t t = begin; t < end; ++t) {
      const float* a = ReadFloats(RowAt(op.a, t), op.a.dtype, n, ScratchSlot::kInA);
      const float* b = ReadFloats(RowAt(op.b, t), op.b.dtype, n, ScratchSlot::kInB);
      void* sum_at = RowAt(op.sum, t);
      float* sum = WriteFloats(sum_at, op.sum.dtype, n, ScratchSlot::kWork);
      HWY_DYNAMIC_DISPATCH(AddResidualRow)(a, b, n, sum);
      WriteBack(sum, n, op.sum.dtype, sum_at);
      // The norm sees the sum as it was stored, so that it equals ResidualAdd and RmsNorm apart.
      const float* x = ReadFloats(sum_at, op.sum.dtype, n, ScratchSlot::kWork);
      float* out = WriteFloats(RowAt(op.out, t), op.out.dtype, n, ScratchSlot::kOutA);
      const float inv = InverseRms(HWY_DYNAMIC_DISPATCH(SumOfSquares)(x, n), n, op.eps);
      HWY_DYNAMIC_DISPATCH(ScaleRow)(x, inv, op.weight_offset, w, n, out);
      WriteBack(out, n, op.out.dtype, RowAt(op.out, t));
    }
  });
}

void Run(const ops::QkNorm& op, const LaunchContext& ctx) {
  const int64_t work = 2 * (op.q.dim(1) + op.k.dim(1)) * op.q.cols();
  ctx.pool.ParallelFor(op.q.rows(), GrainFor(work), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      NormHeads(op.q, op.q_weight, op.eps, op.weight_offset, t);
      NormHeads(op.k, op.k_weight, op.eps, op.weight_offset, t);
    }
  });
}

void Run(const ops::GatedRmsNorm& op, const LaunchContext& ctx) {
  const int64_t heads = op.x.dim(1);
  const int64_t n = op.x.cols();
  ctx.pool.ParallelFor(op.x.rows(), GrainFor(8 * heads * n), [&](int64_t begin, int64_t end, int) {
    const float* w = ReadFloats(op.weight.data, op.weight.dtype, n, ScratchSlot::kWeight);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const float* x = ReadFloats(RowAt(op.x, t, h), op.x.dtype, n, ScratchSlot::kInA);
        const float* z = ReadFloats(RowAt(op.z, t, h), op.z.dtype, n, ScratchSlot::kInB);
        float* out = WriteFloats(RowAt(op.out, t, h), op.out.dtype, n, ScratchSlot::kOutA);
        const float inv = InverseRms(HWY_DYNAMIC_DISPATCH(SumOfSquares)(x, n), n, op.eps);
        HWY_DYNAMIC_DISPATCH(ScaleGatedRow)(x, inv, w, z, n, out);
        WriteBack(out, n, op.out.dtype, RowAt(op.out, t, h));
      }
    }
  });
}

}  // namespace qwend::cpu
#endif
