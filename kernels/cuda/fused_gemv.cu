// The fused plan's projections: a norm in front, and a residual, SiLU or argmax behind.
#include "kernels/cuda/load8.cuh"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/prefetch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/sample_key.cuh"

namespace qwend::cuda {
namespace {

constexpr int kPiece = kWarp * 8;   // elements of K that a warp reads at once
constexpr int kMaxPassRows = 8;     // rows of x that one pass over the weights serves
constexpr int kMaxDecodeRows = 64;  // above, the parts run one by one
constexpr int kMaxSegments = ops::NormProjections::kMax;

// What becomes of a sum.
enum class Form {
  kStore,     // out = sum + bias
  kSilu,      // out = silu(sum of segment 0) * sum of segment 1
  kResidual,  // out = residual + sum + bias
  kHead,      // its best allowed id; the logit itself where a row wants it
};

// A weight [n, k] and what is made of its product; its blocks begin at first_block.
struct Segment {
  const bf16* weight = nullptr;
  View<float> out;
  Vector bias;
  int n = 0;
  int first_block = 0;
};

struct Arguments {
  Segment segments[kMaxSegments];
  int count = 0;
  View<const float> x;
  int rows = 0;
  int k = 0;
  const float* norm_weight = nullptr;
  float norm_offset = 0.0f;
  float norm_eps = 0.0f;
  View<const float> residual;
  const SamplingRow* sampling = nullptr;
  unsigned long long* best = nullptr;  // one key a row
  int vocab_limit = 0;
  Span prefetch;
};

template <int P>
constexpr int kMaxWarps = P == 1 ? 4 : 16;

// Block (R weight rows, rows of x in eights): the warps share K, each lane holds P pieces of each
// of the R rows in registers, all of them requested before the kernel before has ended. The norm
// needs no pass of its own: its sum of squares is one more sum, and scales the others at the end.
// Bytes: the weights once per eight rows of x. Bound: memory bandwidth. Order of one sum: lane
// chain, halving exchange, warps.
template <Form F, bool Normed, int T, int R, int P>
__global__ void __launch_bounds__(kMaxWarps<P>* kWarp, P == 1 ? 4 : 1)
    ProjectKernel(const __grid_constant__ Arguments a) {
  constexpr int kOutputs = F == Form::kSilu ? R / 2 : R;
  __shared__ float parts[T][kMaxWarps<P>][R];
  __shared__ float squares[T][kMaxWarps<P>];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  int segment = 0;
  if constexpr (F == Form::kStore) {
    while (segment + 1 < a.count &&
           static_cast<int>(blockIdx.x) >= a.segments[segment + 1].first_block)
      ++segment;
  }
  const Segment& s = a.segments[segment];
  const int n0 = (blockIdx.x - s.first_block) * kOutputs, t0 = blockIdx.y * T;

  uint4 w[P][R];
  Eight scale[P];
#pragma unroll
  for (int p = 0; p < P; ++p) {
    const int at = (p * warps + warp) * kPiece + lane * 8;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const int row = n0 + r % kOutputs;
      const bf16* weight = r < kOutputs ? s.weight : a.segments[1].weight;
      w[p][r] = at < a.k && row < s.n ? LoadStreaming(weight + static_cast<int64_t>(row) * a.k + at)
                                      : make_uint4(0, 0, 0, 0);
    }
    if (Normed && at < a.k) scale[p] = LoadEight(a.norm_weight + at);
  }
  PrefetchShare(a.prefetch);
  WaitForPrevious();

#pragma unroll 1
  for (int t = 0; t < T && t0 + t < a.rows; ++t) {
    float acc[R] = {};
    float square = 0.0f;
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const int at = (p * warps + warp) * kPiece + lane * 8;
      if (at >= a.k) continue;
      Eight x = LoadEight(a.x.At(t0 + t) + at);
      if constexpr (Normed) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          square = fmaf(x.v[i], x.v[i], square);
          x.v[i] *= a.norm_offset + scale[p].v[i];
        }
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const Eight ws = Widen(w[p][r]);
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[r] = fmaf(ws.v[i], x.v[i], acc[r]);
      }
    }
    const float sum = WarpSums(acc, lane);
    if (lane % (kWarp / R) == 0) parts[t][warp][lane / (kWarp / R)] = sum;
    if constexpr (Normed) {
      square = WarpSum(square);
      if (lane == 0) squares[t][warp] = square;
    }
  }
  __syncthreads();

  const auto total = [&](int t, int r) {
    float sum = 0.0f;
    for (int i = 0; i < warps; ++i) sum += parts[t][i][r];
    if constexpr (Normed) {
      float square = 0.0f;
      for (int i = 0; i < warps; ++i) square += squares[t][i];
      sum *= rsqrtf(square / static_cast<float>(a.k) + a.norm_eps);
    }
    return sum;
  };
  constexpr int kItems = CeilDiv(T * kOutputs, kWarp) * kWarp;  // whole warps: kHead exchanges
  for (int i = threadIdx.x; i < kItems; i += blockDim.x) {
    const int r = i % kOutputs, t = i / kOutputs, row = n0 + r, token = t0 + t;
    const bool live = t < T && token < a.rows && row < s.n;
    if constexpr (F == Form::kHead) {
      const float logit = live ? total(t, r) : 0.0f;
      SampleKey key = kNoKey;
      if (live) {
        const SamplingRow& sampling = a.sampling[token];
        if (sampling.temperature != 0.0f || sampling.keep_logits != 0) s.out.At(token)[row] = logit;
        key = KeyOf(logit, row, row < a.vocab_limit && !Banned(sampling, row));
      }
#pragma unroll
      for (int offset = kOutputs / 2; offset > 0; offset /= 2)
        key = max(key, __shfl_xor_sync(kFullMask, key, offset));
      if (live && r == 0 && key > *static_cast<volatile SampleKey*>(a.best + token))
        atomicMax(a.best + token, key);
    } else if (live) {
      float value = total(t, r);
      if constexpr (F == Form::kSilu) {
        value = Silu(value) * total(t, r + kOutputs);
      } else {
        if (s.bias) value += s.bias[row];
        if constexpr (F == Form::kResidual) value += a.residual.At(token)[row];
      }
      s.out.At(token)[row] = value;
    }
  }
}

template <Form F, bool Normed, int R, int P>
void LaunchForm(Arguments a, const LaunchContext& ctx) {
  constexpr int kOutputs = F == Form::kSilu ? R / 2 : R;
  int blocks = 0;
  for (int i = 0; i < (F == Form::kSilu ? 1 : a.count); ++i) {
    a.segments[i].first_block = blocks;
    blocks += CeilDiv(a.segments[i].n, kOutputs);
  }
  a.prefetch = ctx.prefetch;
  const dim3 block(CeilDiv(CeilDiv(a.k, kPiece), P) * kWarp);
  const dim3 grid(blocks, CeilDiv(a.rows, kMaxPassRows));
  if (a.rows == 1) {
    Launch(ctx, ProjectKernel<F, Normed, 1, R, P>, grid, block, 0, a);
  } else if (a.rows == 2) {
    Launch(ctx, ProjectKernel<F, Normed, 2, R, P>, grid, block, 0, a);
  } else if (a.rows <= 4) {
    Launch(ctx, ProjectKernel<F, Normed, 4, R, P>, grid, block, 0, a);
  } else {
    Launch(ctx, ProjectKernel<F, Normed, kMaxPassRows, R, P>, grid, block, 0, a);
  }
}

// Many weight rows a block where K is short, so that x is read and summed up seldom; few where the
// matrix itself has few.
template <Form F, bool Normed>
void LaunchProject(const Arguments& a, const LaunchContext& ctx) {
  if (Normed && a.k <= kMaxWarps<1> * kPiece) {
    LaunchForm<F, Normed, 16, 1>(a, ctx);
  } else {
    LaunchForm<F, Normed, 8, 2>(a, ctx);
  }
}

bool Aligned(const TensorView& v) {
  return reinterpret_cast<uintptr_t>(v.data) % 16 == 0 && v.strides[0] % 8 == 0;
}

bool Fits(const ops::Gemv& g) {
  return g.x.dtype == DType::kF32 && g.out.dtype == DType::kF32 && g.weight.dtype == DType::kBF16 &&
         g.weight.layout == Layout::kRowMajor && g.weight.cols() % 8 == 0 &&
         g.weight.cols() <= kMaxWarps<2> * 2 * kPiece && Aligned(g.x) && Aligned(g.weight) &&
         g.x.rows() <= kMaxDecodeRows;
}

bool Fits(const ops::RmsNorm& n) {
  return n.x.dtype == DType::kF32 && n.weight.dtype == DType::kF32 && Aligned(n.x) &&
         reinterpret_cast<uintptr_t>(n.weight.data) % 16 == 0;
}

Segment MakeSegment(const ops::Gemv& g, const TensorView& out) {
  return {g.weight.As<const bf16>(), MakeView<float>(out), MakeVector(g.bias),
          static_cast<int>(g.weight.rows()), 0};
}

Arguments MakeArguments(const TensorView& x) {
  Arguments a;
  a.x = MakeView<const float>(x);
  a.rows = static_cast<int>(x.rows());
  a.k = static_cast<int>(x.cols());
  return a;
}

Arguments MakeArguments(const ops::RmsNorm& norm) {
  Arguments a = MakeArguments(norm.x);
  a.norm_weight = norm.weight.As<const float>();
  a.norm_offset = norm.weight_offset;
  a.norm_eps = norm.eps;
  return a;
}

}  // namespace

void Run(const ops::NormProjections& op, const LaunchContext& ctx) {
  bool fits = Fits(op.norm);
  Arguments a = MakeArguments(op.norm);
  for (a.count = 0; a.count < op.count; ++a.count) {
    fits = fits && Fits(op.projections[a.count]);
    a.segments[a.count] = MakeSegment(op.projections[a.count], op.projections[a.count].out);
  }
  if (!fits) return RunParts(op, ctx);
  LaunchProject<Form::kStore, true>(a, ctx);
}

void Run(const ops::NormGateUpSilu& op, const LaunchContext& ctx) {
  if (!Fits(op.norm) || !Fits(op.gate) || !Fits(op.up) || op.gate.bias || op.up.bias)
    return RunParts(op, ctx);
  Arguments a = MakeArguments(op.norm);
  a.segments[0] = MakeSegment(op.gate, op.act.out);
  a.segments[1] = MakeSegment(op.up, op.act.out);
  a.count = 2;
  LaunchProject<Form::kSilu, true>(a, ctx);
}

void Run(const ops::GemvResidual& op, const LaunchContext& ctx) {
  if (!Fits(op.gemv) || op.add.a.dtype != DType::kF32) return RunParts(op, ctx);
  Arguments a = MakeArguments(op.gemv.x);
  a.segments[0] = MakeSegment(op.gemv, op.add.out);
  a.count = 1;
  a.residual = MakeView<const float>(op.add.a);
  LaunchProject<Form::kResidual, false>(a, ctx);
}

void Run(const ops::NormHead& op, const LaunchContext& ctx) {
  Arguments a = MakeArguments(op.norm);
  a.segments[0] = MakeSegment(op.head, op.head.out);
  a.count = 1;
  a.sampling = op.rows.As<const SamplingRow>();
  a.best = op.best.As<unsigned long long>();
  a.vocab_limit = op.vocab_limit;
  if (Fits(op.norm) && Fits(op.head) && !op.head.bias)
    return LaunchProject<Form::kHead, true>(a, ctx);
  RunParts(op, ctx);
  LaunchBestOfLogits(op, ctx);
}

}  // namespace qwend::cuda
