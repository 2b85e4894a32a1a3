// The fused plan's mixer of a full-attention layer: head norms, rotation, cache write, attention
// split over the length, output gate.
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/paged.cuh"
#include "kernels/cuda/prefetch.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {
namespace {

constexpr int kAttentionWarps = 8;
constexpr int kSplitTokens = 64;  // positions of a split, as long as kMaxSplits suffice
constexpr int kMaxSplits = 32;
constexpr int kMaxGroup = 16;
constexpr int64_t kCounterOffset = 4096;  // behind the sampler's

struct AttentionArguments {
  View<float> out;
  View<const float> q, k, v, gate;
  Vector q_weight, k_weight;  // none: no head norms
  float norm_offset = 0.0f, norm_eps = 0.0f;
  const float* cos = nullptr;
  const float* sin = nullptr;
  int half = 0;  // rotated pairs
  bf16* k_pages = nullptr;
  bf16* v_pages = nullptr;
  const int* positions = nullptr;
  BlockTable table;
  int group = 0, kv_heads = 0;
  float scale = 0.0f;
  float* partials = nullptr;  // [rows, kv_heads, kMaxSplits, group, D + 2]
  unsigned* counters = nullptr;
  Span prefetch;
};

// One head's vector into shared memory, normed and rotated. One warp.
template <int D>
__device__ __forceinline__ void PrepareHead(float* to, const float* from, const Vector& weight,
                                            const AttentionArguments& a, int position, int lane) {
  constexpr int kPer = CeilDiv(D, kWarp);
  float x[kPer], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int at = i * kWarp + lane;
    x[i] = at < D ? from[at] : 0.0f;
    square = fmaf(x[i], x[i], square);
  }
  const float inverse = weight ? rsqrtf(WarpSum(square) / D + a.norm_eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int at = i * kWarp + lane;
    if (at < D) to[at] = weight ? x[i] * inverse * (a.norm_offset + weight[at]) : x[i];
  }
  __syncwarp();
  const int64_t angle = static_cast<int64_t>(position) * a.half;
  for (int j = lane; j < a.half; j += kWarp) {
    const float c = a.cos[angle + j], s = a.sin[angle + j];
    const float first = to[j], second = to[j + a.half];
    to[j] = first * c - second * s;
    to[j + a.half] = second * c + first * s;
  }
  __syncwarp();
}

// N consecutive bf16, widened, in one load.
template <int N>
__device__ __forceinline__ void LoadWide(float (&to)[N], const bf16* from) {
  if constexpr (N == 8) {
    const uint4 w = *reinterpret_cast<const uint4*>(from);
    const uint32_t pairs[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = LowBf16(pairs[i]);
      to[2 * i + 1] = HighBf16(pairs[i]);
    }
  } else if constexpr (N == 4) {
    const uint2 w = *reinterpret_cast<const uint2*>(from);
    to[0] = LowBf16(w.x);
    to[1] = HighBf16(w.x);
    to[2] = LowBf16(w.y);
    to[3] = HighBf16(w.y);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = ToFloat(from[i]);
  }
}

// Largest score, sum of exponentials and weighted values of some positions.
template <int N>
struct Softmax {
  float largest = -INFINITY;
  float sum = 0.0f;
  float values[N] = {};
};

// Block (split of the positions, key-value head, row), all query heads of the group at once. Each
// warp keeps its own running softmax over every 8th position, so that no barrier stands between
// positions; warps are merged in order at the end, and the block that ends last merges the splits
// in order. How positions are split depends on the row's length alone. Bytes: keys and values once.
// Bound: latency for short contexts, memory bandwidth for long ones.
template <int D, int G>
__global__ void __launch_bounds__(kAttentionWarps* kWarp)
    DecodeAttentionKernel(const __grid_constant__ AttentionArguments a) {
  constexpr int kPer = D < kWarp ? 1 : D / kWarp;        // elements of a head that a lane holds
  constexpr int kBatch = G >= 16 ? 1 : G == 8 ? 2 : 4;   // positions a warp looks at together
  constexpr int kTogether = G * D <= 512 ? G : 512 / D;  // heads merged at once
  __shared__ float heads[(G + 1) * D];
  __shared__ float largest[kAttentionWarps][G], sums[kAttentionWarps][G];
  __shared__ float values[kAttentionWarps][kTogether * D];
  __shared__ float factors[kMaxSplits][G];
  __shared__ float totals[G];
  __shared__ bool last;

  const int split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool active = lane * kPer < D;
  PrefetchShare(a.prefetch);
  WaitForPrevious();
  const int position = a.positions[row], length = position + 1;
  const int chunk = max(kSplitTokens, CeilDiv(length, kMaxSplits));
  const int splits = CeilDiv(length, chunk);
  if (split >= splits) return;
  const int begin = split * chunk, end = min(begin + chunk, length);
  const int* pages = a.table.PagesOf(row);

  for (int g = warp; g < a.group; g += kAttentionWarps)
    PrepareHead<D>(heads + g * D, a.q.At(row, kv_head * a.group + g), a.q_weight, a, position,
                   lane);
  if (end == length && warp == kAttentionWarps - 1) {  // this split holds the new position
    float* key = heads + G * D;
    PrepareHead<D>(key, a.k.At(row, kv_head), a.k_weight, a, position, lane);
    const int64_t at = PagedOffset(pages, position, kv_head, a.kv_heads, D);
    for (int i = lane; i < D; i += kWarp) {
      a.k_pages[at + i] = FromFloat<bf16>(key[i]);
      a.v_pages[at + i] = FromFloat<bf16>(a.v.At(row, kv_head)[i]);
    }
  }
  __syncthreads();

  float query[G][kPer];
#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      query[g][i] = active && g < a.group ? heads[g * D + lane * kPer + i] * a.scale : 0.0f;
  }
  Softmax<kPer> soft[G];
  for (int first = begin + warp; first < end; first += kBatch * kAttentionWarps) {
    float key[kBatch][kPer] = {}, value[kBatch][kPer] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int p = first + b * kAttentionWarps;
      if (p >= end || !active) continue;
      const int64_t at = PagedOffset(pages, p, kv_head, a.kv_heads, D) + lane * kPer;
      LoadWide<kPer>(key[b], a.k_pages + at);
      LoadWide<kPer>(value[b], a.v_pages + at);
    }
    float dots[kBatch * G];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int g = 0; g < G; ++g) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < kPer; ++i) dot = fmaf(query[g][i], key[b][i], dot);
        dots[b * G + g] = dot;
      }
    }
    const float own = WarpSums(dots, lane);
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float score[kBatch], most = soft[g].largest;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        score[b] = __shfl_sync(kFullMask, own, (b * G + g) * (kWarp / (kBatch * G)));
        if (first + b * kAttentionWarps >= end) score[b] = -INFINITY;
        most = fmaxf(most, score[b]);
      }
      const float keep = expf(soft[g].largest - most);
      soft[g].largest = most;
      soft[g].sum *= keep;
#pragma unroll
      for (int i = 0; i < kPer; ++i) soft[g].values[i] *= keep;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float weight = expf(score[b] - most);
        soft[g].sum += weight;
#pragma unroll
        for (int i = 0; i < kPer; ++i)
          soft[g].values[i] = fmaf(weight, value[b][i], soft[g].values[i]);
      }
    }
  }

  // Warps in order.
  if (lane == 0) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      largest[warp][g] = soft[g].largest;
      sums[warp][g] = soft[g].sum;
    }
  }
  const int64_t partial_size = int64_t{a.group} * (D + 2);
  float* partials = a.partials + (int64_t{row} * a.kv_heads + kv_head) * kMaxSplits * partial_size;
  float* mine = partials + split * partial_size;
  const auto finish = [&](int g, int d, float value, float sum) {
    const int head = kv_head * a.group + g;
    float x = value / sum;
    if (a.gate.data != nullptr) x *= Sigmoid(a.gate.At(row, head)[d]);
    a.out.At(row, head)[d] = x;
  };
#pragma unroll
  for (int g0 = 0; g0 < G; g0 += kTogether) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int i = 0; i < kPer; ++i)
        if (active) values[warp][j * D + lane * kPer + i] = soft[g0 + j].values[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTogether * D; i += blockDim.x) {
      const int g = g0 + i / D, d = i % D;
      if (g >= a.group) continue;
      float most = -INFINITY, sum = 0.0f, value = 0.0f;
      for (int w = 0; w < kAttentionWarps; ++w) most = fmaxf(most, largest[w][g]);
      for (int w = 0; w < kAttentionWarps; ++w) {
        const float factor = expf(largest[w][g] - most);
        sum = fmaf(factor, sums[w][g], sum);
        value = fmaf(factor, values[w][i], value);
      }
      if (splits == 1) {
        finish(g, d, value, sum);
      } else {
        mine[g * (D + 2) + 2 + d] = value;
        if (d == 0) {
          mine[g * (D + 2)] = most;
          mine[g * (D + 2) + 1] = sum;
        }
      }
    }
  }
  if (splits == 1) return;

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* counter = a.counters + row * a.kv_heads + kv_head;
    last = atomicAdd(counter, 1u) == static_cast<unsigned>(splits) - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = threadIdx.x; i < splits * a.group; i += blockDim.x)
    factors[i / a.group][i % a.group] =
        __ldcg(partials + (i / a.group) * partial_size + (i % a.group) * (D + 2));
  __syncthreads();
  if (threadIdx.x < a.group) {
    const int g = threadIdx.x;
    float most = -INFINITY, sum = 0.0f;
    for (int s = 0; s < splits; ++s) most = fmaxf(most, factors[s][g]);
    for (int s = 0; s < splits; ++s) {
      factors[s][g] = expf(factors[s][g] - most);
      sum = fmaf(factors[s][g], __ldcg(partials + s * partial_size + g * (D + 2) + 1), sum);
    }
    totals[g] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < a.group * D; i += blockDim.x) {
    const int g = i / D, d = i % D;
    float value = 0.0f;
#pragma unroll 8
    for (int s = 0; s < splits; ++s)
      value = fmaf(factors[s][g], __ldcg(partials + s * partial_size + g * (D + 2) + 2 + d), value);
    finish(g, d, value, totals[g]);
  }
}

template <int D>
void LaunchGroup(const AttentionArguments& a, int rows, const LaunchContext& ctx) {
  const dim3 grid(kMaxSplits, a.kv_heads, rows), block(kAttentionWarps * kWarp);
  if (a.group == 1) {
    Launch(ctx, DecodeAttentionKernel<D, 1>, grid, block, 0, a);
  } else if (a.group == 2) {
    Launch(ctx, DecodeAttentionKernel<D, 2>, grid, block, 0, a);
  } else if (a.group <= 4) {
    Launch(ctx, DecodeAttentionKernel<D, 4>, grid, block, 0, a);
  } else if (a.group <= 8) {
    Launch(ctx, DecodeAttentionKernel<D, 8>, grid, block, 0, a);
  } else {
    Launch(ctx, DecodeAttentionKernel<D, kMaxGroup>, grid, block, 0, a);
  }
}

bool Fits(const ops::DecodeAttention& op) {
  const ops::Attention& a = op.attention;
  const int64_t rows = a.q.rows(), heads = a.q.dim(1), dim = a.q.dim(2);
  return a.q.dtype == DType::kF32 && a.out.dtype == DType::kF32 &&
         a.k_pages.dtype == DType::kBF16 && a.v_pages.dtype == DType::kBF16 &&
         heads / a.k_pages.dim(1) <= kMaxGroup &&
         rows * heads * kMaxSplits * (dim + 2) * 4 <= kWorkspaceBytes - kCounterBytes &&
         kCounterOffset + rows * a.k_pages.dim(1) * 4 <= kCounterBytes;
}

}  // namespace

void Run(const ops::DecodeAttention& op, const LaunchContext& ctx) {
  if (!Fits(op)) return RunParts(op, ctx);
  AttentionArguments a;
  a.out = MakeView<float>(op.attention.out);
  a.q = MakeView<const float>(op.attention.q);
  a.k = MakeView<const float>(op.update.k);
  a.v = MakeView<const float>(op.update.v);
  if (op.gate.x) a.gate = MakeView<const float>(op.gate.gate);
  if (op.norm.q) {
    a.q_weight = MakeVector(op.norm.q_weight);
    a.k_weight = MakeVector(op.norm.k_weight);
    a.norm_offset = op.norm.weight_offset;
    a.norm_eps = op.norm.eps;
  }
  a.cos = op.rope.cos.As<const float>();
  a.sin = op.rope.sin.As<const float>();
  a.half = static_cast<int>(op.rope.cos.cols());
  a.k_pages = op.update.k_pages.As<bf16>();
  a.v_pages = op.update.v_pages.As<bf16>();
  a.positions = op.rope.positions.As<const int>();
  a.table = MakeBlockTable(op.attention.sequences);
  a.kv_heads = static_cast<int>(op.attention.k_pages.dim(1));
  a.group = static_cast<int>(op.attention.q.dim(1)) / a.kv_heads;
  a.scale = op.attention.scale;
  a.partials = static_cast<float*>(ctx.workspace);
  a.counters = reinterpret_cast<unsigned*>(static_cast<char*>(Counters(ctx)) + kCounterOffset);
  a.prefetch = ctx.prefetch;
  const int rows = static_cast<int>(op.attention.q.rows());
  DispatchSize<16, 32, 64, 128, 256>(
      op.attention.q.dim(2), "DecodeAttention: head_dim",
      [&](auto d) { LaunchGroup<decltype(d)::value>(a, rows, ctx); });
}

}  // namespace qwend::cuda
