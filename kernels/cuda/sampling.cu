#include <cfloat>

#include "kernels/cuda/reduce.cuh"
#include "kernels/philox.h"

namespace qwend::cuda {
namespace {

constexpr int kSampleThreads = 1024;
constexpr int kArgmaxBlocks = 128;  // blocks that share a row's logits

struct Best {
  float logit;
  int id;
};

// The larger logit, the lower id on a tie; -1 stands for none yet.
__device__ __forceinline__ Best Better(Best a, Best b) {
  if (b.id < 0) return a;
  if (a.id < 0 || b.logit > a.logit || (b.logit == a.logit && b.id < a.id)) return b;
  return a;
}

__device__ __forceinline__ bool Banned(const SamplingRow& row, int id) {
  for (int i = 0; i < row.num_banned; ++i) {
    if (row.banned[i] == id) return true;
  }
  return false;
}

__device__ __forceinline__ bool Poisoned(float logit) { return isnan(logit) || logit == INFINITY; }

__device__ __forceinline__ Best BlockBest(Best best, Best* scratch) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    best = Better(best, {__shfl_xor_sync(kFullMask, best.logit, offset),
                         __shfl_xor_sync(kFullMask, best.id, offset)});
  }
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (lane == 0) scratch[warp] = best;
  __syncthreads();
  best = lane < warps ? scratch[lane] : Best{-INFINITY, -1};
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    best = Better(best, {__shfl_xor_sync(kFullMask, best.logit, offset),
                         __shfl_xor_sync(kFullMask, best.id, offset)});
  }
  __syncthreads();
  return best;
}

// What a block found in its share of a row: its best candidate, or `poisoned`.
struct RowShare {
  Best best;
  int poisoned;
};

// Block (share, row): the best allowed logit of the share. NaN and +inf are looked for among all V
// logits. Bytes: T * V * 4. Bound: L2, where lm_head left the logits.
template <typename L>
__global__ void __launch_bounds__(kSampleThreads)
    ArgmaxShareKernel(RowShare* shares, View<const L> logits, const SamplingRow* rows, int vocab,
                      int limit) {
  WaitForPrevious();
  __shared__ Best scratch[kWarp];
  const SamplingRow& row = rows[blockIdx.y];
  const L* x = logits.At(blockIdx.y);
  Best best{-INFINITY, -1};
  bool poisoned = false;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x) {
    const float logit = ToFloat(x[i]);
    poisoned |= Poisoned(logit);
    if (i < limit && logit > -INFINITY && (best.id < 0 || logit > best.logit) && !Banned(row, i))
      best = {logit, i};
  }
  const int any = __syncthreads_or(poisoned);
  best = BlockBest(best, scratch);
  if (threadIdx.x == 0) shares[blockIdx.y * gridDim.x + blockIdx.x] = {best, any};
}

// The order-preserving integer of a float, so that thresholds can be found bit by bit.
__device__ __forceinline__ uint32_t OrderKey(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// One row's allowed logits as the sampler walks them.
template <typename L>
struct Row {
  const L* logits;
  const SamplingRow* params;
  int limit;
  float largest, inverse_temperature;
  __device__ bool Allowed(int i, float logit) const {
    return logit > -INFINITY && !Banned(*params, i);
  }
  __device__ float Mass(float logit) const { return expf((logit - largest) * inverse_temperature); }
};

struct Totals {
  float mass;
  int count;
};

// Mass and number of the allowed logits whose key is at least `key`; every thread gets both. Fixed
// order.
template <typename L>
__device__ Totals AtLeast(const Row<L>& row, uint32_t key, float* scratch) {
  float mass = 0.0f;
  int count = 0;
  for (int i = threadIdx.x; i < row.limit; i += blockDim.x) {
    const float logit = ToFloat(row.logits[i]);
    if (OrderKey(logit) < key || !row.Allowed(i, logit)) continue;
    mass += row.Mass(logit);
    ++count;
  }
  const float total = BlockSum(mass, scratch);
  // Counts stay below 2^24 and so are exact as floats.
  return {total, static_cast<int>(BlockSum(static_cast<float>(count), scratch))};
}

// The largest key for which `enough(totals at or above it)` holds. 32 passes over the row, out of
// L2.
template <typename L, typename Enough>
__device__ uint32_t LargestKey(const Row<L>& row, uint32_t floor_key, float* scratch,
                               Enough enough) {
  uint32_t key = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t candidate = key | (1u << bit);
    if (enough(AtLeast(row, max(candidate, floor_key), scratch))) key = candidate;
  }
  return max(key, floor_key);
}

// Block per row: greedy takes the best of the shares. Otherwise the threshold below which top_k,
// top_p and min_p cut is found, and a position in the remaining mass is drawn and looked up in
// order of id. Logits equal to the threshold all stay, so ties never depend on order.
template <typename L>
__global__ void __launch_bounds__(kSampleThreads)
    SampleKernel(int* tokens, const RowShare* shares, int num_shares, View<const L> logits,
                 const SamplingRow* rows, int limit) {
  WaitForPrevious();
  __shared__ Best best_scratch[kWarp];
  __shared__ float scratch[kWarp];
  __shared__ float prefix[kSampleThreads];
  __shared__ int chosen;

  const SamplingRow& params = rows[blockIdx.x];
  RowShare share{{-INFINITY, -1}, 0};
  if (threadIdx.x < num_shares) share = shares[blockIdx.x * num_shares + threadIdx.x];
  const int poisoned = __syncthreads_or(share.poisoned);
  const Best best = BlockBest(share.best, best_scratch);
  if (poisoned || best.id < 0 || params.temperature == 0.0f) {
    if (threadIdx.x == 0) tokens[blockIdx.x] = poisoned ? kInvalidToken : best.id;
    return;
  }

  const Row<L> row{logits.At(blockIdx.x), &params, limit, best.logit, 1.0f / params.temperature};
  uint32_t key = OrderKey(-FLT_MAX);
  if (params.top_k > 0) {
    key = LargestKey(row, key, scratch, [&](Totals t) { return t.count >= params.top_k; });
  }
  if (params.top_p < 1.0f) {
    const float target = AtLeast(row, key, scratch).mass * params.top_p;
    key = LargestKey(row, key, scratch, [&](Totals t) { return t.mass >= target; });
  }
  if (params.min_p > 0.0f) {
    key = max(key, OrderKey(best.logit + logf(params.min_p) * params.temperature));
  }

  // Each thread sums a contiguous share of ids; the prefix over threads then says whose share holds
  // the draw.
  const int width = CeilDiv(limit, static_cast<int>(blockDim.x));
  const int begin = min(static_cast<int>(threadIdx.x) * width, limit),
            end = min(begin + width, limit);
  float mass = 0.0f;
  for (int i = begin; i < end; ++i) {
    const float logit = ToFloat(row.logits[i]);
    if (OrderKey(logit) >= key && row.Allowed(i, logit)) mass += row.Mass(logit);
  }
  prefix[threadIdx.x] = mass;
  if (threadIdx.x == 0) chosen = best.id;  // stands when rounding carries the draw past the end
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int t = 0; t < static_cast<int>(blockDim.x); ++t) {
      const float own = prefix[t];
      prefix[t] = total;
      total += own;
    }
    scratch[0] = total;
  }
  __syncthreads();
  const float draw = static_cast<float>(SamplingUniform(params.seed, params.position) * scratch[0]);
  float running = prefix[threadIdx.x];
  if (draw >= running && draw < running + mass) {
    for (int i = begin; i < end; ++i) {
      const float logit = ToFloat(row.logits[i]);
      if (OrderKey(logit) < key || !row.Allowed(i, logit)) continue;
      running += row.Mass(logit);
      chosen = i;
      if (draw < running) break;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) tokens[blockIdx.x] = chosen;
}

}  // namespace

void Run(const ops::TokenSampler& op, const LaunchContext& ctx) {
  const int rows = static_cast<int>(op.logits.rows()), vocab = static_cast<int>(op.logits.cols());
  const auto* params = op.rows.As<const SamplingRow>();
  auto* shares = static_cast<RowShare*>(ctx.workspace);
  static_assert(kArgmaxBlocks <= kSampleThreads);
  Require(static_cast<int64_t>(rows) * kArgmaxBlocks * static_cast<int64_t>(sizeof(RowShare)) <=
              kWorkspaceBytes,
          "TokenSampler: ", rows, " rows do not fit the workspace");
  DispatchActivation(op.logits.dtype, "TokenSampler", [&](auto t) {
    using L = decltype(t);
    const auto logits = MakeView<const L>(op.logits);
    Launch(ctx, ArgmaxShareKernel<L>, dim3(kArgmaxBlocks, rows), dim3(kSampleThreads), 0, shares,
           logits, params, vocab, op.vocab_limit);
    Launch(ctx, SampleKernel<L>, dim3(rows), dim3(kSampleThreads), 0, op.tokens.As<int>(),
           static_cast<const RowShare*>(shares), kArgmaxBlocks, logits, params, op.vocab_limit);
  });
}

}  // namespace qwend::cuda
