#include <cfloat>

#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/sample_key.cuh"
#include "kernels/philox.h"

namespace qwend::cuda {
namespace {

constexpr int kSampleThreads = 1024;
constexpr int kBestBlocks = 128;  // blocks that share a row's logits

__device__ __forceinline__ SampleKey BlockMaxKey(SampleKey key, SampleKey* scratch) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    key = max(key, __shfl_xor_sync(kFullMask, key, offset));
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (lane == 0) scratch[warp] = key;
  __syncthreads();
  key = lane < warps ? scratch[lane] : kNoKey;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    key = max(key, __shfl_xor_sync(kFullMask, key, offset));
  return key;
}

// Block (share, row): the best allowed logit of the share. NaN and +inf are looked for among all V
// logits. Bytes: T * V * 4. Bound: L2, where lm_head left the logits.
template <typename L>
__global__ void __launch_bounds__(kSampleThreads)
    BestKernel(SampleKey* best, View<const L> logits, const SamplingRow* rows, int vocab,
               int limit) {
  WaitForPrevious();
  __shared__ SampleKey scratch[kWarp];
  const SamplingRow& row = rows[blockIdx.y];
  const L* x = logits.At(blockIdx.y);
  SampleKey key = kNoKey;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += gridDim.x * blockDim.x) {
    const SampleKey one = KeyOf(ToFloat(x[i]), i, i < limit);
    if (one > key && (one == kPoisonKey || !Banned(row, i))) key = one;
  }
  key = BlockMaxKey(key, scratch);
  if (threadIdx.x == 0) atomicMax(best + blockIdx.y, key);
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

// Block per row: greedy takes the best, which is cleared for the next step. Otherwise the threshold
// below which top_k, top_p and min_p cut is found, and a position in the remaining mass is drawn
// and looked up in order of id. Logits equal to the threshold all stay, so ties never depend on
// order.
template <typename L>
__global__ void __launch_bounds__(kSampleThreads)
    SampleKernel(int* tokens, SampleKey* best, View<const L> logits, const SamplingRow* rows,
                 int limit) {
  WaitForPrevious();
  __shared__ float scratch[kWarp];
  __shared__ float prefix[kSampleThreads];
  __shared__ int chosen;

  const SamplingRow& params = rows[blockIdx.x];
  const SampleKey key_of_best = best[blockIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) best[blockIdx.x] = kNoKey;
  const bool poisoned = key_of_best == kPoisonKey;
  const int best_id = key_of_best == kNoKey ? -1 : IdOf(key_of_best);
  if (poisoned || best_id < 0 || params.temperature == 0.0f) {
    if (threadIdx.x == 0) tokens[blockIdx.x] = poisoned ? kInvalidToken : best_id;
    return;
  }
  const float best_logit = ToFloat(logits.At(blockIdx.x)[best_id]);

  const Row<L> row{logits.At(blockIdx.x), &params, limit, best_logit, 1.0f / params.temperature};
  uint32_t key = OrderKey(-FLT_MAX);
  if (params.top_k > 0) {
    key = LargestKey(row, key, scratch, [&](Totals t) { return t.count >= params.top_k; });
  }
  if (params.top_p < 1.0f) {
    const float target = AtLeast(row, key, scratch).mass * params.top_p;
    key = LargestKey(row, key, scratch, [&](Totals t) { return t.mass >= target; });
  }
  if (params.min_p > 0.0f) {
    key = max(key, OrderKey(best_logit + logf(params.min_p) * params.temperature));
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
  if (threadIdx.x == 0) chosen = best_id;  // stands when rounding carries the draw past the end
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

template <typename L>
void LaunchBest(SampleKey* best, View<const L> logits, const SamplingRow* rows, int count,
                int vocab, int limit, const LaunchContext& ctx) {
  Launch(ctx, BestKernel<L>, dim3(kBestBlocks, count), dim3(kSampleThreads), 0, best, logits, rows,
         vocab, limit);
}

}  // namespace

void LaunchBestOfLogits(const ops::NormHead& op, const LaunchContext& ctx) {
  DispatchActivation(op.head.out.dtype, "NormHead", [&](auto t) {
    using L = decltype(t);
    LaunchBest<L>(op.best.As<SampleKey>(), MakeView<const L>(op.head.out),
                  op.rows.As<const SamplingRow>(), static_cast<int>(op.head.out.rows()),
                  static_cast<int>(op.head.out.cols()), op.vocab_limit, ctx);
  });
}

void Run(const ops::TokenSampler& op, const LaunchContext& ctx) {
  const int rows = static_cast<int>(op.logits.rows()), vocab = static_cast<int>(op.logits.cols());
  const auto* params = op.rows.As<const SamplingRow>();
  auto* best = op.best ? op.best.As<SampleKey>() : static_cast<SampleKey*>(Counters(ctx));
  Require(rows * static_cast<int64_t>(sizeof(SampleKey)) <= kCounterBytes, "TokenSampler: ", rows,
          " rows do not fit the counters");
  DispatchActivation(op.logits.dtype, "TokenSampler", [&](auto t) {
    using L = decltype(t);
    const auto logits = MakeView<const L>(op.logits);
    if (!op.best) LaunchBest<L>(best, logits, params, rows, vocab, op.vocab_limit, ctx);
    Launch(ctx, SampleKernel<L>, dim3(rows), dim3(kSampleThreads), 0, op.tokens.As<int>(), best,
           logits, params, op.vocab_limit);
  });
}

}  // namespace qwend::cuda
