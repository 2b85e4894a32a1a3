#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {
namespace {

constexpr int kColumnLanes = 8;  // neighbouring value columns of a warp: one 32-byte sector
constexpr int kKeyGroups =
    kWarp / kColumnLanes;  // lanes that share a column, each with DK / 4 key rows
constexpr int kDeltaWarps = 2;
constexpr int kDeltaColumns = kColumnLanes * kDeltaWarps;  // value columns of a block

// Sum over the lanes that share a value column.
__device__ __forceinline__ float ColumnSum(float v) {
#pragma unroll
  for (int offset = kColumnLanes; offset < kWarp; offset *= 2)
    v += __shfl_xor_sync(kFullMask, v, offset);
  return v;
}

// Block (column group, value head, sequence). A warp owns 8 columns of the head's state, each lane
// DK / 4 rows of one column, in registers from the first token of the step to the last; the state
// is read and written once. Per token, with S already decayed: u = S^T k, o = S^T q + e (k . q), e
// = beta (v - u), S += k e^T. Bytes in decode: 2 * DK * DV * 4 per head. Bound: memory bandwidth in
// decode, latency of a token in prefill.
template <int DK, typename A>
__global__ void __launch_bounds__(kDeltaWarps* kWarp)
    GatedDeltaRuleKernel(View<A> out, View<const A> q, View<const A> k, View<const A> v,
                         View<const float> beta, View<const float> log_decay, float* state,
                         const int* state_slot, const int* query_start, int value_dim,
                         int heads_per_key, float scale, float l2_eps) {
  WaitForPrevious();
  constexpr int kRows = DK / kKeyGroups;
  __shared__ float keys[DK], queries[DK], norms[kDeltaWarps];

  const int head = blockIdx.y, sequence = blockIdx.z, key_head = head / heads_per_key;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int column = blockIdx.x * kDeltaColumns + warp * kColumnLanes + lane % kColumnLanes;
  const int group = lane / kColumnLanes;
  const bool active = column < value_dim;
  const int begin = query_start[sequence], end = query_start[sequence + 1];
  float* s_global =
      state + (static_cast<int64_t>(state_slot[sequence]) * gridDim.y + head) * DK * value_dim +
      column;

  // Rows are dealt out group by group, row = i * kKeyGroups + group, so that lanes of a group step
  // read shared memory at neighbouring addresses.
  float s[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    s[i] = active ? s_global[static_cast<int64_t>(i * kKeyGroups + group) * value_dim] : 0.0f;

  for (int t = begin; t < end; ++t) {
    __syncthreads();  // the previous token's keys and queries are no longer read
    for (int i = threadIdx.x; i < DK; i += blockDim.x) {
      keys[i] = ToFloat(k.At(t, key_head)[i]);
      queries[i] = ToFloat(q.At(t, key_head)[i]);
    }
    __syncthreads();
    // Warp 0 sums k.k and k.q, warp 1 q.q and k.q, each in the same order wherever it runs.
    float own = 0.0f, cross = 0.0f;
#pragma unroll
    for (int i = lane; i < DK; i += kWarp) {
      const float x = warp == 0 ? keys[i] : queries[i];
      own = fmaf(x, x, own);
      cross = fmaf(keys[i], queries[i], cross);
    }
    own = WarpSum(own);
    cross = WarpSum(cross);
    if (lane == 0) norms[warp] = own;
    __syncthreads();
    const float k_scale = rsqrtf(norms[0] + l2_eps), q_scale = rsqrtf(norms[1] + l2_eps) * scale;
    const float decay = expf(log_decay.At(t)[head]);
    const float value = active ? ToFloat(v.At(t, head)[column]) : 0.0f;

    float u = 0.0f, o = 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = i * kKeyGroups + group;
      s[i] *= decay;
      u = fmaf(s[i], keys[row], u);
      o = fmaf(s[i], queries[row], o);
    }
    u = ColumnSum(u) * k_scale;
    o = ColumnSum(o) * q_scale;
    const float e = beta.At(t)[head] * (value - u);
    const float step = e * k_scale;
#pragma unroll
    for (int i = 0; i < kRows; ++i) s[i] = fmaf(keys[i * kKeyGroups + group], step, s[i]);
    if (active && group == 0)
      out.At(t, head)[column] = FromFloat<A>(fmaf(e, cross * k_scale * q_scale, o));
  }

  if (!active || begin >= end) return;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    s_global[static_cast<int64_t>(i * kKeyGroups + group) * value_dim] = s[i];
}

}  // namespace

void Run(const ops::GatedDeltaRule& op, const LaunchContext& ctx) {
  static_assert(kDeltaWarps == 2, "the norms are summed by two warps");
  const int key_dim = static_cast<int>(op.k.dim(2)), value_dim = static_cast<int>(op.v.dim(2));
  const int value_heads = static_cast<int>(op.v.dim(1)), key_heads = static_cast<int>(op.k.dim(1));
  const int sequences = static_cast<int>(op.sequences.state_slot.rows());
  const dim3 grid(CeilDiv(value_dim, kDeltaColumns), value_heads, sequences),
      block(kDeltaWarps * kWarp);
  DispatchActivation(op.q.dtype, "GatedDeltaRule", [&](auto a) {
    using A = decltype(a);
    DispatchSize<16, 32, 64, 96, 128>(key_dim, "GatedDeltaRule: key_dim", [&](auto dk) {
      Launch(ctx, GatedDeltaRuleKernel<decltype(dk)::value, A>, grid, block, 0, MakeView<A>(op.out),
             MakeView<const A>(op.q), MakeView<const A>(op.k), MakeView<const A>(op.v),
             MakeView<const float>(op.beta), MakeView<const float>(op.log_decay),
             op.state.As<float>(), op.sequences.state_slot.As<int>(),
             op.sequences.query_start.As<int>(), value_dim, value_heads / key_heads, op.scale,
             op.l2_eps);
    });
  });
}

}  // namespace qwend::cuda
