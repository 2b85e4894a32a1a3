// Elementwise operators: ResidualAdd, SiluMul, OutputGate.
#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/activation.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {

void AddRow(const float* a, const float* b, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    Store(Add(Load(a + i, n - i), Load(b + i, n - i)), out + i, n - i);
  }
}

void SiluMulRow(const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    Store(Mul(Silu(Load(gate + i, n - i)), Load(up + i, n - i)), out + i, n - i);
  }
}

void SigmoidMulRow(const float* x, const float* gate, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    Store(Mul(Load(x + i, n - i), Sigmoid(Load(gate + i, n - i))), out + i, n - i);
  }
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(AddRow);
HWY_EXPORT(SiluMulRow);
HWY_EXPORT(SigmoidMulRow);

// fn(a, b, n, out) over one row of each.
template <typename Fn>
void OneRow(const TensorView& out, const TensorView& a, const TensorView& b, int64_t t, int64_t h,
            const Fn& fn) {
  const int64_t n = out.cols();
  const float* in_a = ReadFloats(RowAt(a, t, h), a.dtype, n, ScratchSlot::kInA);
  const float* in_b = ReadFloats(RowAt(b, t, h), b.dtype, n, ScratchSlot::kInB);
  float* to = WriteFloats(RowAt(out, t, h), out.dtype, n, ScratchSlot::kOutA);
  fn(in_a, in_b, n, to);
  WriteBack(to, n, out.dtype, RowAt(out, t, h));
}

}  // namespace

void Run(const ops::ResidualAdd& op, const LaunchContext& ctx) {
  ctx.pool.ParallelFor(op.out.rows(), GrainFor(op.out.cols()),
                       [&](int64_t begin, int64_t end, int) {
                         for (int64_t t = begin; t < end; ++t) {
                           OneRow(op.out, op.a, op.b, t, 0, HWY_DYNAMIC_DISPATCH(AddRow));
                         }
                       });
}

void Run(const ops::SiluMul& op, const LaunchContext& ctx) {
  ctx.pool.ParallelFor(op.out.rows(), GrainFor(8 * op.out.cols()),
                       [&](int64_t begin, int64_t end, int) {
                         for (int64_t t = begin; t < end; ++t) {
                           OneRow(op.out, op.gate, op.up, t, 0, HWY_DYNAMIC_DISPATCH(SiluMulRow));
                         }
                       });
}

void Run(const ops::OutputGate& op, const LaunchContext& ctx) {
  const int64_t heads = op.x.dim(1);
  ctx.pool.ParallelFor(op.x.rows(), GrainFor(8 * heads * op.x.cols()),
                       [&](int64_t begin, int64_t end, int) {
                         for (int64_t t = begin; t < end; ++t) {
                           for (int64_t h = 0; h < heads; ++h) {
                             OneRow(op.x, op.x, op.gate, t, h, HWY_DYNAMIC_DISPATCH(SigmoidMulRow));
                           }
                         }
                       });
}

}  // namespace qwend::cpu
#endif
