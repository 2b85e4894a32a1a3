// The gated delta rule and its gates.
//
// Columns of the state (value elements) never meet, so a worker takes some columns of one head
// through all tokens of all sequences. With a = S^T k and b = S^T q of the state before a token,
//   e = beta * (v - g a),   out = g b + (k . q) e,   S <- g S + k e^T
// equals updating first and reading after. While a token's update passes over the state, the
// products with the next token's k and q are summed in the same pass: the state is read and written
// once per token. Decode runs the two halves one after the other, with the same operations on the
// same numbers in the same order, hence with the same bits.
#include <algorithm>
#include <cmath>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/delta_rule_head.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/delta_rule.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {

// out = x * scale / sqrt(sum x^2 + eps).
void L2Normalise(const float* x, int64_t n, float eps, float scale, float* out) {
  const F16 factor = Splat(scale * (1.0f / std::sqrt(Dot(x, x, n) + eps)));
  for (int64_t i = 0; i < n; i += 16) Store(Mul(Load(x + i, n - i), factor), out + i, n - i);
}

float DotProduct(const float* a, const float* b, int64_t n) { return Dot(a, b, n); }

// NV vectors of 16 columns, of which the last holds `tail` columns when kPartial.
template <int NV, bool kPartial>
struct Columns {
  F16 v[NV];

  static HWY_INLINE Columns Zeros() {
    Columns c;
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) c.v[i] = Zero();
    return c;
  }
  static HWY_INLINE Columns From(const float* p, int64_t tail) {
    Columns c;
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) {
      c.v[i] = kPartial && i == NV - 1 ? Load(p + 16 * i, tail) : Load(p + 16 * i);
    }
    return c;
  }
  HWY_INLINE void To(float* p, int64_t tail) const {
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) {
      if (kPartial && i == NV - 1) {
        Store(v[i], p + 16 * i, tail);
      } else {
        Store(v[i], p + 16 * i);
      }
    }
  }
};

// a = S^T k, b = S^T q. One chain per column, in order of the key element.
template <int NV, bool kPartial>
void ReadState(const float* state, int64_t stride, int64_t dk, int64_t tail, const float* k,
               const float* q, Columns<NV, kPartial>& a, Columns<NV, kPartial>& b) {
  a = b = Columns<NV, kPartial>::Zeros();
  for (int64_t d = 0; d < dk; ++d) {
    const auto s = Columns<NV, kPartial>::From(state + d * stride, tail);
    const F16 kd = Splat(k[d]);
    const F16 qd = Splat(q[d]);
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) {
      a.v[i] = MulAdd(s.v[i], kd, a.v[i]);
      b.v[i] = MulAdd(s.v[i], qd, b.v[i]);
    }
  }
}

// S <- g S + k e^T, and with kNext also a = S^T next_k, b = S^T next_q of the new S.
template <int NV, bool kPartial, bool kNext>
void UpdateState(float* state, int64_t stride, int64_t dk, int64_t tail, float g, const float* k,
                 const Columns<NV, kPartial>& e, const float* next_k, const float* next_q,
                 Columns<NV, kPartial>& a, Columns<NV, kPartial>& b) {
  a = b = Columns<NV, kPartial>::Zeros();
  const F16 decay = Splat(g);
  for (int64_t d = 0; d < dk; ++d) {
    auto s = Columns<NV, kPartial>::From(state + d * stride, tail);
    const F16 kd = Splat(k[d]);
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) s.v[i] = MulAdd(kd, e.v[i], Mul(decay, s.v[i]));
    s.To(state + d * stride, tail);
    if constexpr (kNext) {
      const F16 nk = Splat(next_k[d]);
      const F16 nq = Splat(next_q[d]);
#pragma GCC unroll 8
      for (int i = 0; i < NV; ++i) {
        a.v[i] = MulAdd(s.v[i], nk, a.v[i]);
        b.v[i] = MulAdd(s.v[i], nq, b.v[i]);
      }
    }
  }
}

template <int NV, bool kPartial>
void RunColumns(const DeltaHead& h, int64_t column, int64_t tail) {
  using Cols = Columns<NV, kPartial>;
  float* state = h.state + column;
  Cols a, b;
  ReadState<NV, kPartial>(state, h.state_stride, h.dk, tail, h.qk + h.dk, h.qk, a, b);
  for (int64_t t = 0; t < h.tokens; ++t) {
    const float g = h.decay[t];
    const F16 decay = Splat(g);
    const F16 beta = Splat(h.beta[t]);
    const F16 dot = Splat(h.qk_dot[t]);
    const Cols v = Cols::From(h.v + t * h.v_stride + column, tail);
    Cols e, o;
#pragma GCC unroll 8
    for (int i = 0; i < NV; ++i) {
      e.v[i] = Mul(beta, NegMulAdd(decay, a.v[i], v.v[i]));
      o.v[i] = MulAdd(dot, e.v[i], Mul(decay, b.v[i]));
    }
    o.To(h.out + t * h.out_stride + column, tail);
    const float* k = h.qk + (2 * t + 1) * h.dk;
    if (t + 1 < h.tokens) {
      UpdateState<NV, kPartial, true>(state, h.state_stride, h.dk, tail, g, k, e, k + 2 * h.dk,
                                      k + h.dk, a, b);
    } else {
      UpdateState<NV, kPartial, false>(state, h.state_stride, h.dk, tail, g, k, e, nullptr, nullptr,
                                       a, b);
    }
  }
}

// Columns [begin, end) of the head.
void RunHead(const DeltaHead& h, int64_t begin, int64_t end) {
  constexpr int kWide = kLanes == 16 ? 4 : 2;  // what a, b, s and e leave in registers
  int64_t c = begin;
  for (; c + 16 * kWide <= end; c += 16 * kWide) RunColumns<kWide, false>(h, c, 0);
  for (; c + 16 <= end; c += 16) RunColumns<1, false>(h, c, 0);
  if (c < end) RunColumns<1, true>(h, c, end - c);
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(L2Normalise);
HWY_EXPORT(DotProduct);
HWY_EXPORT(RunHead);

// Tokens whose normalised q and k wait in scratch memory at a time.
constexpr int64_t kChunkTokens = 64;

float Softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Value columns [begin, end) of head `h` for rows [row_begin, row_end) of one sequence.
void RunSequenceHead(const ops::GatedDeltaRule& op, int64_t h, int64_t begin, int64_t end,
                     int64_t row_begin, int64_t row_end, int32_t slot) {
  const int64_t dk = op.q.cols();
  const int64_t dv = op.v.cols();
  const int64_t key_head = h / (op.v.dim(1) / op.q.dim(1));
  float* qk = Scratch(ScratchSlot::kWork, kChunkTokens * (2 * dk + 3));
  float* qk_dot = qk + kChunkTokens * 2 * dk;
  float* beta = qk_dot + kChunkTokens;
  float* decay = beta + kChunkTokens;
  for (int64_t first = row_begin; first < row_end; first += kChunkTokens) {
    DeltaHead head{.tokens = std::min(kChunkTokens, row_end - first),
                   .dk = dk,
                   .qk = qk,
                   .qk_dot = qk_dot,
                   .beta = beta,
                   .decay = decay,
                   .v = static_cast<const float*>(RowAt(op.v, first, h)),
                   .v_stride = op.v.strides[0],
                   .out = static_cast<float*>(RowAt(op.out, first, h)),
                   .out_stride = op.out.strides[0],
                   .state = static_cast<float*>(RowAt(op.state, slot, h)),
                   .state_stride = op.state.strides[2]};
    for (int64_t t = 0; t < head.tokens; ++t) {
      float* q = qk + 2 * t * dk;
      float* k = q + dk;
      const float* q_in =
          ReadFloats(RowAt(op.q, first + t, key_head), op.q.dtype, dk, ScratchSlot::kInA);
      HWY_DYNAMIC_DISPATCH(L2Normalise)(q_in, dk, op.l2_eps, op.scale, q);
      const float* k_in =
          ReadFloats(RowAt(op.k, first + t, key_head), op.k.dtype, dk, ScratchSlot::kInA);
      HWY_DYNAMIC_DISPATCH(L2Normalise)(k_in, dk, op.l2_eps, 1.0f, k);
      qk_dot[t] = HWY_DYNAMIC_DISPATCH(DotProduct)(q, k, dk);
      beta[t] = static_cast<const float*>(RowAt(op.beta, first + t))[h];
      decay[t] = std::exp(static_cast<const float*>(RowAt(op.log_decay, first + t))[h]);
    }
    if (op.v.dtype != DType::kF32) {
      float* v = Scratch(ScratchSlot::kInB, kChunkTokens * dv);
      for (int64_t t = 0; t < head.tokens; ++t) {
        ToFloats(RowAt(op.v, first + t, h), op.v.dtype, dv, v + t * dv);
      }
      head.v = v;
      head.v_stride = dv;
    }
    if (op.out.dtype != DType::kF32) {
      head.out = Scratch(ScratchSlot::kOutA, kChunkTokens * dv);
      head.out_stride = dv;
    }
    HWY_DYNAMIC_DISPATCH(RunHead)(head, begin, end);
    if (op.out.dtype != DType::kF32) {
      for (int64_t t = 0; t < head.tokens; ++t) {
        void* to = static_cast<char*>(RowAt(op.out, first + t, h)) + begin * SizeOf(op.out.dtype);
        FromFloats(head.out + t * dv + begin, end - begin, op.out.dtype, to);
      }
    }
  }
}

}  // namespace

void Run(const ops::DeltaGates& op, const LaunchContext& ctx) {
  const int64_t heads = op.a.cols();
  const float* a_log = op.a_log.As<float>();
  ctx.pool.ParallelFor(op.a.rows(), GrainFor(64 * heads), [&](int64_t begin, int64_t end, int) {
    const float* bias = ReadFloats(op.dt_bias.data, op.dt_bias.dtype, heads, ScratchSlot::kWeight);
    for (int64_t t = begin; t < end; ++t) {
      const float* a = ReadFloats(RowAt(op.a, t), op.a.dtype, heads, ScratchSlot::kInA);
      const float* b = ReadFloats(RowAt(op.b, t), op.b.dtype, heads, ScratchSlot::kInB);
      float* beta = static_cast<float*>(RowAt(op.beta, t));
      float* log_decay = static_cast<float*>(RowAt(op.log_decay, t));
      for (int64_t h = 0; h < heads; ++h) {
        beta[h] = 1.0f / (1.0f + std::exp(-b[h]));
        log_decay[h] = -std::exp(a_log[h]) * Softplus(a[h] + bias[h]);
      }
    }
  });
}

// Parallel over heads and, when there are few, halves of their columns; never over sequences,
// because padded rows share a dummy slot and a state must be written by one thread.
void Run(const ops::GatedDeltaRule& op, const LaunchContext& ctx) {
  const int64_t heads = op.v.dim(1);
  const int64_t dv = op.v.cols();
  const int32_t* query_start = op.sequences.query_start.As<int32_t>();
  const int32_t* slots = op.sequences.state_slot.As<int32_t>();
  const int64_t parts = heads < 4 * ctx.pool.size() && dv % 128 == 0 ? 2 : 1;
  const int64_t columns = dv / parts;
  const int64_t work = 4 * op.v.rows() * op.q.cols() * columns;
  ctx.pool.ParallelFor(heads * parts, GrainFor(work), [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t column = item % parts * columns;
      for (int64_t s = 0; s < op.sequences.state_slot.rows(); ++s) {
        RunSequenceHead(op, item / parts, column, column + columns, query_start[s],
                        query_start[s + 1], slots[s]);
      }
    }
  });
}

}  // namespace qwend::cpu
#endif
