// The fused plan's mixer of a linear layer: convolution, gates, delta rule and gated norm.
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {
namespace {

constexpr int kMixerWarps = 16;
constexpr int kMaxValueDim = kWarp * 4;  // a warp reads one row of the state, four columns a lane
constexpr int kMaxConvWidth = 8;
constexpr int kMaxHeadsPerKey = 8;

struct MixerArguments {
  View<float> out;
  View<const float> x;  // the convolution's input
  View<const float> a, b, z;
  Vector conv_weight;  // [channels, width]
  float* conv_state = nullptr;
  const float* a_log = nullptr;
  Vector dt_bias;
  Vector norm_weight;
  float* state = nullptr;
  const int* state_slot = nullptr;
  int channels = 0;
  int width = 0;
  int value_dim = 0;
  int heads_per_key = 0;
  float scale = 0.0f, l2_eps = 0.0f, eps = 0.0f;
};

// One channel of the convolution: what of it no earlier kernel of the step makes.
struct Channel {
  float columns[kMaxConvWidth], weights[kMaxConvWidth];

  __device__ __forceinline__ void Load(const MixerArguments& a, int64_t slot, int channel) {
    const float* tail = a.conv_state + slot * (a.width - 1) * a.channels + channel;
#pragma unroll
    for (int j = 0; j < kMaxConvWidth; ++j) {
      if (j < a.width - 1) columns[j] = tail[static_cast<int64_t>(j) * a.channels];
      if (j < a.width) weights[j] = a.conv_weight[static_cast<int64_t>(channel) * a.width + j];
    }
  }
  // With the newest column: SiLU of the sum; the tail in memory moves on by one.
  __device__ __forceinline__ float Mix(const MixerArguments& a, int64_t slot, int channel,
                                       float newest) {
    float* tail = a.conv_state + slot * (a.width - 1) * a.channels + channel;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxConvWidth; ++j) {
      if (j == a.width - 1) columns[j] = newest;
      if (j < a.width) sum = fmaf(weights[j], columns[j], sum);
      if (j > 0 && j < a.width) tail[static_cast<int64_t>(j - 1) * a.channels] = columns[j];
    }
    return Silu(sum);
  }
};

// Block (key head, row): everything of the head and of the value heads that share it. A warp holds
// every 16th row of the state in registers, four columns a lane, from its reading to its writing.
// State and convolution tail are requested before the kernel before has ended: earlier steps wrote
// them, and within a program nothing but this kernel may. Bytes: the state, read and written.
// Bound: latency at batch 1, memory bandwidth at large batches. Order of S^T k: a warp's rows, then
// warps.
template <int DK>
__global__ void __maxnreg__(88) LinearAttentionKernel(const __grid_constant__ MixerArguments a) {
  constexpr int kRows = DK / kMixerWarps;
  __shared__ float mixed[2 * DK + kMaxHeadsPerKey * kMaxValueDim];
  __shared__ float4 u_parts[kMixerWarps][kWarp], o_parts[kMixerWarps][kWarp];
  __shared__ float beta[kMaxHeadsPerKey], decay[kMaxHeadsPerKey];
  __shared__ float dots[3];  // q.q, k.k, k.q
  __shared__ float4 steps[kWarp];
  __shared__ float squares[kMaxValueDim / kWarp];

  const int key_head = blockIdx.x, row = blockIdx.y, key_heads = gridDim.x;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, dv = a.value_dim;
  const int first_head = key_head * a.heads_per_key, heads = key_heads * a.heads_per_key;
  const bool active = lane * 4 < dv;
  const float *queries = mixed, *keys = mixed + DK, *values = mixed + 2 * DK;
  const int64_t slot = a.state_slot[row];

  float4 s[kRows];
  float4* head_state = nullptr;
  const auto load_state = [&](int head) {
    head_state = reinterpret_cast<float4*>(a.state + (slot * heads + head) * DK * dv) + lane;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t at = static_cast<int64_t>(i * kMixerWarps + warp) * (dv / 4);
      s[i] = active ? head_state[at] : make_float4(0, 0, 0, 0);
    }
  };
  load_state(first_head);

  // q, k and v channels of the head lie apart in memory and together in `mixed`.
  const int num_channels = 2 * DK + a.heads_per_key * dv;
  const auto channel_of = [&](int i) {
    if (i < DK) return key_head * DK + i;
    if (i < 2 * DK) return (key_heads + key_head - 1) * DK + i;
    return (2 * key_heads - 2) * DK + first_head * dv + i;
  };
  Channel channel;
  if (static_cast<int>(threadIdx.x) < num_channels) channel.Load(a, slot, channel_of(threadIdx.x));
  WaitForPrevious();
  for (int i = threadIdx.x; i < num_channels; i += blockDim.x) {
    const int at = channel_of(i);
    if (i != static_cast<int>(threadIdx.x)) channel.Load(a, slot, at);
    mixed[i] = channel.Mix(a, slot, at, a.x.At(row)[at]);
  }
  if (warp == kMixerWarps - 1 && lane < a.heads_per_key) {
    const int head = first_head + lane;
    beta[lane] = Sigmoid(a.b.At(row)[head]);
    decay[lane] = expf(-expf(a.a_log[head]) * Softplus(a.a.At(row)[head] + a.dt_bias[head]));
  }
  __syncthreads();
  if (warp < 3) {
    const float* left = warp == 0 ? queries : keys;
    const float* right = warp == 1 ? keys : queries;
    float sum = 0.0f;
#pragma unroll
    for (int i = lane; i < DK; i += kWarp) sum = fmaf(left[i], right[i], sum);
    sum = WarpSum(sum);
    if (lane == 0) dots[warp] = sum;
  }
  __syncthreads();
  const float q_scale = rsqrtf(dots[0] + a.l2_eps) * a.scale, k_scale = rsqrtf(dots[1] + a.l2_eps);
  const float cross = dots[2] * k_scale * q_scale;

  for (int h = 0; h < a.heads_per_key; ++h) {
    if (h > 0) load_state(first_head + h);
    float4 u = make_float4(0, 0, 0, 0), o = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float k = keys[i * kMixerWarps + warp], q = queries[i * kMixerWarps + warp];
      s[i].x *= decay[h];
      s[i].y *= decay[h];
      s[i].z *= decay[h];
      s[i].w *= decay[h];
      u = {fmaf(s[i].x, k, u.x), fmaf(s[i].y, k, u.y), fmaf(s[i].z, k, u.z), fmaf(s[i].w, k, u.w)};
      o = {fmaf(s[i].x, q, o.x), fmaf(s[i].y, q, o.y), fmaf(s[i].z, q, o.z), fmaf(s[i].w, q, o.w)};
    }
    u_parts[warp][lane] = u;
    o_parts[warp][lane] = o;
    __syncthreads();

    const int column = threadIdx.x;
    float out = 0.0f, gate = 0.0f, weight = 0.0f;
    if (column < kMaxValueDim) {
      float u_sum = 0.0f, o_sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kMixerWarps; ++w) {
        u_sum += reinterpret_cast<const float*>(u_parts[w])[column];
        o_sum += reinterpret_cast<const float*>(o_parts[w])[column];
      }
      if (column < dv) {
        gate = a.z.At(row, first_head + h)[column];
        weight = a.norm_weight[column];
        const float e = beta[h] * (values[h * dv + column] - u_sum * k_scale);
        reinterpret_cast<float*>(steps)[column] = e * k_scale;
        out = fmaf(e, cross, o_sum * q_scale);
      }
      const float square = WarpSum(out * out);
      if (lane == 0) squares[warp] = square;
    }
    __syncthreads();
    if (active) {
      const float4 step = steps[lane];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float k = keys[i * kMixerWarps + warp];
        s[i] = {fmaf(k, step.x, s[i].x), fmaf(k, step.y, s[i].y), fmaf(k, step.z, s[i].z),
                fmaf(k, step.w, s[i].w)};
        head_state[static_cast<int64_t>(i * kMixerWarps + warp) * (dv / 4)] = s[i];
      }
    }
    if (column < dv) {
      float square = 0.0f;
#pragma unroll
      for (int w = 0; w < kMaxValueDim / kWarp; ++w) square += squares[w];
      a.out.At(row, first_head + h)[column] =
          out * rsqrtf(square / static_cast<float>(dv) + a.eps) * weight * Silu(gate);
    }
  }
}

bool Fits(const ops::LinearAttention& op) {
  const int64_t heads_per_key = op.rule.v.dim(1) / op.rule.k.dim(1), dv = op.rule.v.dim(2);
  return op.conv.x.dtype == DType::kF32 && op.conv.state.dtype == DType::kF32 &&
         op.gates.a.dtype == DType::kF32 && op.gates.b.dtype == DType::kF32 &&
         op.norm.z.dtype == DType::kF32 && op.norm.out.dtype == DType::kF32 &&
         op.conv.weight.cols() <= kMaxConvWidth && heads_per_key <= kMaxHeadsPerKey &&
         dv % 4 == 0 && dv <= kMaxValueDim && op.rule.state.contiguous() &&
         op.conv.state.contiguous();
}

}  // namespace

void Run(const ops::LinearAttention& op, const LaunchContext& ctx) {
  if (!Fits(op)) return RunParts(op, ctx);
  MixerArguments a;
  a.out = MakeView<float>(op.norm.out);
  a.x = MakeView<const float>(op.conv.x);
  a.a = MakeView<const float>(op.gates.a);
  a.b = MakeView<const float>(op.gates.b);
  a.z = MakeView<const float>(op.norm.z);
  a.conv_weight = MakeVector(op.conv.weight);
  a.conv_state = op.conv.state.As<float>();
  a.a_log = op.gates.a_log.As<const float>();
  a.dt_bias = MakeVector(op.gates.dt_bias);
  a.norm_weight = MakeVector(op.norm.weight);
  a.state = op.rule.state.As<float>();
  a.state_slot = op.conv.sequences.state_slot.As<const int>();
  a.channels = static_cast<int>(op.conv.x.cols());
  a.width = static_cast<int>(op.conv.weight.cols());
  a.value_dim = static_cast<int>(op.rule.v.dim(2));
  a.heads_per_key = static_cast<int>(op.rule.v.dim(1) / op.rule.k.dim(1));
  a.scale = op.rule.scale;
  a.l2_eps = op.rule.l2_eps;
  a.eps = op.norm.eps;
  const dim3 grid(op.rule.k.dim(1), op.conv.x.rows());
  DispatchSize<16, 32, 64, 96, 128>(op.rule.k.dim(2), "LinearAttention: key_dim", [&](auto dk) {
    const auto kernel = LinearAttentionKernel<decltype(dk)::value>;
    static const bool shares = ShareProcessor(kernel);
    static_cast<void>(shares);
    Launch(ctx, kernel, grid, dim3(kMixerWarps * kWarp), 0, a);
  });
}

}  // namespace qwend::cuda
