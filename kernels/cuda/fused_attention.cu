// The fused plan's mixer of a full-attention layer: head norms, rotation, cache write, attention
// split over the length, output gate.
#include "kernels/cuda/attention_head.cuh"
#include "kernels/cuda/math.cuh"

namespace qwend::cuda {
namespace {

constexpr int kAttentionWarps = 8;
constexpr int kSplitTokens = 64;  // positions of a split, as long as kMaxSplits suffice
constexpr int kMaxSplits = 32;
constexpr int kMergeAhead = 16;
constexpr int kMaxGroup = 16;
constexpr int kPartialHead = 4;  // before a split's values: the largest score, the sum; aligned
constexpr int64_t kCounterOffset = 4096;  // behind the sampler's

// Block (split of the positions, key-value head, row), all query heads of the group at once. Each
// warp keeps its own running softmax over every 8th position, so that no barrier stands between
// positions; warps are merged in order at the end, and the block that ends last merges the splits
// in order. How positions are split depends on the row's length alone. The first keys and values
// are requested before the kernel before has ended: earlier steps wrote them, and within a program
// nothing may write a cached position but this kernel's own. Bytes: keys and values once. Bound:
// latency for short contexts, memory bandwidth for long ones.
template <int D, int G>
__global__ void __launch_bounds__(kAttentionWarps* kWarp)
    DecodeAttentionKernel(const __grid_constant__ AttentionArguments a) {
  constexpr int kPer = D < kWarp ? 1 : D / kWarp;       // elements of a head that a lane holds
  constexpr int kBatch = G >= 16 ? 1 : G == 8 ? 2 : 4;  // positions a warp looks at together
  constexpr int kAhead =
      G * D >= 1024 ? kBatch : 2 * kBatch;              // positions whose loads are under way
  constexpr int kMerged = G == kMaxGroup ? 512 : 1024;  // elements of all heads merged at once
  constexpr int kTogether = G * D <= kMerged ? G : kMerged / D;
  __shared__ float heads[(G + 1) * D];
  __shared__ float largest[kAttentionWarps][G], sums[kAttentionWarps][G];
  __shared__ float values[kAttentionWarps][kTogether * D];
  __shared__ float factors[kMaxSplits][G];
  __shared__ float totals[G];
  __shared__ bool last;

  const int split = blockIdx.x, kv_head = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const bool active = lane * kPer < D;
  const int position = a.positions[row], length = position + 1;
  const int chunk = max(kSplitTokens, CeilDiv(length, kMaxSplits));
  const int splits = CeilDiv(length, chunk);
  if (split >= splits) return;
  const int begin = split * chunk, end = min(begin + chunk, length);
  const bool newest = end == length;  // this split holds the new position
  const int* pages = a.table.PagesOf(row);

  Packed<kPer> key[kAhead], value[kAhead];
  static_assert(kAttentionWarps % kPlacesRepeat == 0);
  const int column = PageColumn(lane * kPer, begin + warp, D);  // of all this warp's positions
  const auto load = [&](int b, int p) {
    const int64_t at = PagedOffset(pages, p, kv_head, a.kv_heads, D) + column;
    key[b].Load(a.k_pages + at);
    value[b].Load(a.v_pages + at);
  };
#pragma unroll
  for (int b = 0; b < kAhead; ++b) {
    const int p = begin + warp + b * kAttentionWarps;
    if (p < end && p < position && active) load(b, p);
  }
  const bool prepares_key = newest && warp == kAttentionWarps - 1;
  const HeadConstants<D> constants(a, prepares_key ? a.k_weight : a.q_weight, position, lane);
  const bool normed = static_cast<bool>(a.q_weight);
  WaitForPrevious();

  // Heads go round the warps that do not prepare the key.
  const int preparers = newest ? kAttentionWarps - 1 : kAttentionWarps;
  if (prepares_key) {
    float* own = heads + G * D;
    PrepareHead<D>(own, a.k.At(row, kv_head), constants, normed, a, lane);
    const int64_t to = PagedOffset(pages, position, kv_head, a.kv_heads, D);
    for (int i = lane; i < D; i += kWarp) {
      const int64_t at = to + PageColumn(i, position, D);
      a.k_pages[at] = FromFloat<bf16>(own[i]);
      a.v_pages[at] = FromFloat<bf16>(a.v.At(row, kv_head)[i]);
    }
  } else {
    for (int g = warp; g < a.group; g += preparers) {
      PrepareHead<D>(heads + g * D, a.q.At(row, kv_head * a.group + g), constants, normed, a, lane);
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
  for (int base = begin + warp; base < end; base += kAhead * kAttentionWarps) {
#pragma unroll
    for (int b = 0; b < kAhead; ++b) {
      const int p = base + b * kAttentionWarps;
      const bool loaded = base == begin + warp && p < position;
      if (p < end && !loaded && active) load(b, p);
    }
#pragma unroll
    for (int part = 0; part < kAhead; part += kBatch) {
      const int first = base + part * kAttentionWarps;
      if (first >= end) break;
      float dots[kBatch * G];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          float dot = 0.0f;
#pragma unroll
          for (int i = 0; i < kPer; ++i) dot = fmaf(query[g][i], key[part + b][i], dot);
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
            soft[g].values[i] = fmaf(weight, value[part + b][i], soft[g].values[i]);
        }
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
  const int64_t partial_size = int64_t{a.group} * (D + kPartialHead);
  float* partials = a.partials + (int64_t{row} * a.kv_heads + kv_head) * kMaxSplits * partial_size;
  float* mine = partials + split * partial_size;
  const auto finish = [&](int g, int d, float x) {
    const int head = kv_head * a.group + g;
    if (a.gate.data != nullptr) x *= Sigmoid(a.gate.At(row, head)[d]);
    a.out.At(row, head)[d] = x;
  };
#pragma unroll
  for (int g0 = 0; g0 < G; g0 += kTogether) {
    __syncthreads();
    if (g0 == 0 && threadIdx.x < G) {  // what each warp's sums count for
      const int g = threadIdx.x;
      float most = -INFINITY, sum = 0.0f;
      for (int w = 0; w < kAttentionWarps; ++w) most = fmaxf(most, largest[w][g]);
      for (int w = 0; w < kAttentionWarps; ++w) {
        factors[w][g] = expf(largest[w][g] - most);
        sum = fmaf(factors[w][g], sums[w][g], sum);
      }
      totals[g] = sum;
      if (splits > 1 && g < a.group) {
        mine[g * (D + kPartialHead)] = most;
        mine[g * (D + kPartialHead) + 1] = sum;
      }
    }
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
      float x = 0.0f;
#pragma unroll
      for (int w = 0; w < kAttentionWarps; ++w) x = fmaf(factors[w][g], values[w][i], x);
      if (splits == 1) {
        finish(g, d, x / totals[g]);
      } else {
        mine[g * (D + kPartialHead) + kPartialHead + d] = x;
      }
    }
  }
  if (splits == 1) return;

  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // what the barrier ordered before it, for every thread of the block
    unsigned* counter = a.counters + row * a.kv_heads + kv_head;
    last = atomicAdd(counter, 1u) == static_cast<unsigned>(splits) - 1;
    if (last) *counter = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  float* split_sums = &values[0][0];
  for (int i = threadIdx.x; i < splits * a.group; i += blockDim.x) {
    const float* at = partials + (i / a.group) * partial_size + (i % a.group) * (D + kPartialHead);
    factors[i / a.group][i % a.group] = __ldcg(at);
    split_sums[i] = __ldcg(at + 1);
  }
  // Four elements a thread, the parts of kMergeAhead splits requested at once.
  float4 parts[kMergeAhead];
  const auto request = [&](int i, int first) {
    const float* at =
        partials + (i / (D / 4)) * (D + kPartialHead) + kPartialHead + i % (D / 4) * 4;
#pragma unroll
    for (int s = 0; s < kMergeAhead; ++s) {
      if (first + s < splits)
        parts[s] = __ldcg(reinterpret_cast<const float4*>(at + (first + s) * partial_size));
    }
  };
  const int items = a.group * (D / 4);
  if (static_cast<int>(threadIdx.x) < items) request(threadIdx.x, 0);
  __syncthreads();
  if (threadIdx.x < a.group) {
    const int g = threadIdx.x;
    float most = -INFINITY, sum = 0.0f;
    for (int s = 0; s < splits; ++s) most = fmaxf(most, factors[s][g]);
    for (int s = 0; s < splits; ++s) {
      factors[s][g] = expf(factors[s][g] - most);
      sum = fmaf(factors[s][g], split_sums[s * a.group + g], sum);
    }
    totals[g] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < items; i += blockDim.x) {
    const int g = i / (D / 4), d = i % (D / 4) * 4;
    float4 x = make_float4(0, 0, 0, 0);
    for (int first = 0; first < splits; first += kMergeAhead) {
      if (first > 0 || i != static_cast<int>(threadIdx.x)) request(i, first);
#pragma unroll
      for (int s = 0; s < kMergeAhead; ++s) {
        if (first + s >= splits) break;
        const float f = factors[first + s][g];
        x = {fmaf(f, parts[s].x, x.x), fmaf(f, parts[s].y, x.y), fmaf(f, parts[s].z, x.z),
             fmaf(f, parts[s].w, x.w)};
      }
    }
    finish(g, d, x.x / totals[g]);
    finish(g, d + 1, x.y / totals[g]);
    finish(g, d + 2, x.z / totals[g]);
    finish(g, d + 3, x.w / totals[g]);
  }
}

template <int D, int G>
void LaunchHeads(const AttentionArguments& a, int rows, const LaunchContext& ctx) {
  const auto kernel = DecodeAttentionKernel<D, G>;
  static const bool shares = ShareProcessor(kernel);
  static_cast<void>(shares);
  Launch(ctx, kernel, dim3(kMaxSplits, a.kv_heads, rows), dim3(kAttentionWarps * kWarp), 0, a);
}

template <int D>
void LaunchGroup(const AttentionArguments& a, int rows, const LaunchContext& ctx) {
  if (a.group == 1) {
    LaunchHeads<D, 1>(a, rows, ctx);
  } else if (a.group == 2) {
    LaunchHeads<D, 2>(a, rows, ctx);
  } else if (a.group <= 4) {
    LaunchHeads<D, 4>(a, rows, ctx);
  } else if (a.group <= 8) {
    LaunchHeads<D, 8>(a, rows, ctx);
  } else {
    LaunchHeads<D, kMaxGroup>(a, rows, ctx);
  }
}

bool Fits(const ops::DecodeAttention& op) {
  const ops::Attention& a = op.attention;
  const int64_t rows = a.q.rows(), heads = a.q.dim(1), dim = a.q.dim(2);
  return a.q.dtype == DType::kF32 && a.out.dtype == DType::kF32 &&
         a.k_pages.dtype == DType::kBF16 && a.v_pages.dtype == DType::kBF16 &&
         heads / a.k_pages.dim(1) <= kMaxGroup &&
         rows <=
             kMaxDecodeRows &&  // below, by the shape alone: few rows and many give the same bits
         kMaxDecodeRows * heads * kMaxSplits * (dim + kPartialHead) * 4 <=
             kWorkspaceBytes - kCounterBytes &&
         kCounterOffset + kMaxDecodeRows * a.k_pages.dim(1) * 4 <= kCounterBytes;
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
  const int rows = static_cast<int>(op.attention.q.rows());
  DispatchSize<16, 32, 64, 128, 256>(
      op.attention.q.dim(2), "DecodeAttention: head_dim",
      [&](auto d) { LaunchGroup<decltype(d)::value>(a, rows, ctx); });
}

}  // namespace qwend::cuda
