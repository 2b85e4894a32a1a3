// The persistent step's linear layers: projection, convolution, gates, delta rule and gated norm,
// in one cluster from its key heads' projections to their part of the output.
#pragma once

#include "kernels/cuda/math.cuh"
#include "kernels/cuda/persistent_block.cuh"

namespace qwend::cuda {

constexpr int kConvWidth = 4;

template <int B, int DK, int DV>
struct LinearMixer {
  StepBlock<B>& block;
  const ClusterShare& share;
  const StepShape& shape = block.a.shape;
  StepShared<B>& shared = block.shared;

  static constexpr int kQueryRows = DK / kRanks,
                       kValueRows = DV / kRanks;  // of a head, this rank's
  const int value_heads = share.heads * shape.heads_per_key;
  const int value_rows = shape.heads_per_key * kValueRows;  // of a key head
  const int head_rows = 2 * kQueryRows + 2 * value_rows;    // q, k, v, z
  const int rows = share.heads * head_rows;
  const int channels = 2 * shape.key_heads * DK + shape.key_heads * shape.heads_per_key * DV;

  enum class Role { kQuery, kKey, kValue, kGate };

  // What two neighbouring rows of this rank's projection are for one row of x. The same in all
  // layers.
  struct Place {
    Role role = Role::kGate;
    int b = 0;
    float* to = nullptr;  // in shared memory
    int channel = -1;     // of the convolution; -1: none
  };
  __device__ __forceinline__ Place Locate(int pair) const {
    Place p;
    if (rows == 0) return p;
    p.b = B == 1 ? 0 : pair / (rows / 2);
    const int b = p.b, row = (pair - b * (rows / 2)) * 2;
    if (b >= B || row >= rows) return p;
    const int local_head = row / head_rows, head = share.first_head + local_head;
    int i = row - local_head * head_rows, channel = 0;
    if (i < 2 * kQueryRows) {
      p.role = i < kQueryRows ? Role::kQuery : Role::kKey;
      const int at = block.rank * kQueryRows + i % kQueryRows;
      channel = ((p.role == Role::kQuery ? 0 : shape.key_heads) + head) * DK + at;
      p.to = &shared.mixer[b][(2 * local_head + (p.role == Role::kQuery ? 0 : 1)) * DK + at];
    } else {
      i -= 2 * kQueryRows;
      p.role = i < value_rows ? Role::kValue : Role::kGate;
      i -= p.role == Role::kValue ? 0 : value_rows;
      channel = 2 * shape.key_heads * DK + (head * shape.heads_per_key + i / kValueRows) * DV +
                block.rank * kValueRows + i % kValueRows;
      p.to = &shared.own[b][(p.role == Role::kValue ? 0 : value_heads * kValueRows) +
                            local_head * value_rows + i];
    }
    if (p.role != Role::kGate) p.channel = channel;
    return p;
  }

  // The convolution's state before the step, and its weights, for a pair of channels.
  struct Channels {
    float2 samples[kConvWidth - 1];
    float4 weights[2];
  };
  __device__ __forceinline__ float* TailOf(const StepLayer& layer, const Place& p) const {
    return layer.conv_state + static_cast<int64_t>(shared.slot[p.b]) * (kConvWidth - 1) * channels +
           p.channel;
  }
  __device__ __forceinline__ Channels Load(const StepLayer& layer, const Place& p) const {
    Channels c{};
    if (p.channel < 0) return c;
    const float* tail = TailOf(layer, p);
#pragma unroll
    for (int j = 0; j < kConvWidth - 1; ++j)
      c.samples[j] = *reinterpret_cast<const float2*>(tail + static_cast<int64_t>(j) * channels);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      c.weights[j] = reinterpret_cast<const float4*>(layer.conv_weight)[p.channel + j];
    return c;
  }

  // The convolution of both channels with their newest samples; the state moves on by one.
  __device__ __forceinline__ float2 Convolve(const StepLayer& layer, const Place& p,
                                             const Channels& c, float2 newest) const {
    const float2* s = c.samples;
    const float4* w = c.weights;
    __syncwarp(block.half_mask);  // all sixteen lanes have read the state
    if (block.half_lane < kConvWidth - 1) {
      const float2 v = block.half_lane == 0 ? s[1] : block.half_lane == 1 ? s[2] : newest;
      *reinterpret_cast<float2*>(TailOf(layer, p) +
                                 static_cast<int64_t>(block.half_lane) * channels) = v;
    }
    const float x =
        fmaf(w[0].w, newest.x, fmaf(w[0].z, s[2].x, fmaf(w[0].y, s[1].x, w[0].x * s[0].x)));
    const float y =
        fmaf(w[1].w, newest.y, fmaf(w[1].z, s[2].y, fmaf(w[1].y, s[1].y, w[1].x * s[0].y)));
    return make_float2(QuickSilu(x), QuickSilu(y));
  }

  // One pair of sums: queries and keys to every rank, values and gates kept.
  __device__ __forceinline__ void Finish(const StepLayer& layer, const float* parts, int local,
                                         const Place& p, const Channels& c) {
    const float factor = block.Inverse(p.b);
    float2 v = block.SumPair(parts, local, p.b);
    v = make_float2(v.x * factor, v.y * factor);
    if (p.role != Role::kGate) v = Convolve(layer, p, c, v);
    if (p.role == Role::kQuery || p.role == Role::kKey || block.half_lane == block.rank)
      Send(block.Peer(p.to), block.Peer(&shared.mixer_ready), __float_as_uint(v.x),
           __float_as_uint(v.y));
  }

  // This rank's 64 columns of the gates' rows, b above a, to every rank.
  __device__ __forceinline__ void SendGates(const char* weights,
                                            const uint32_t (&x)[kBlocksOfWarp][4][2]) {
    if (block.warp != block.rank % kStepWarps || block.rank >= block.k_blocks) return;
    uint32_t mine[4][2];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      mine[i / 2][i % 2] = block.rank < kStepWarps ? x[0][i / 2][i % 2] : x[1][i / 2][i % 2];
    const float2 sums = block.MultiplyTile(weights + block.lane % kTile * 128, mine);
#pragma unroll
    for (int b = 0; b < B; ++b) {
      uint32_t v[kMaxValueHeads];
#pragma unroll
      for (int i = 0; i < kMaxValueHeads; ++i) {
        const float beta = __shfl_sync(kFullMask, sums.x, i * 4 + b);
        const float decay = __shfl_sync(kFullMask, sums.y, i * 4 + b);
        v[i] = __float_as_uint(block.lane < kRanks ? beta : decay);
      }
      const uint32_t to =
          block.Peer(&shared.gates[b][block.rank][block.lane / kRanks * kMaxValueHeads]);
      Send(to, block.Peer(&shared.mixer_ready), make_uint4(v[0], v[1], v[2], v[3]));
      Send(to + 16, block.Peer(&shared.mixer_ready), make_uint4(v[4], v[5], v[6], v[7]));
    }
  }

  // Four columns of the state of one value head: a warp's work for one row. `item` counts them:
  // quads of this rank's columns, value heads, rows of x.
  static constexpr int kQuads = kValueRows / 4, kLoads = DK / kWarp;
  struct Item {
    int quad, head, b;  // the head is one of the cluster's
  };
  __device__ __forceinline__ Item ItemAt(int item) const {
    const int head = item / kQuads;
    return {item % kQuads, B == 1 ? head : head / B, B == 1 ? 0 : head % B};
  }
  __device__ __forceinline__ int Items() const { return kQuads * value_heads * B; }

  struct State {
    float4 s[kLoads];  // rows lane, lane + 32 and so on
    float a_log, dt_bias;
    float4 norm;
  };
  __device__ __forceinline__ float* StateOf(const StepLayer& layer, const Item& item) const {
    const int64_t head = share.first_head * shape.heads_per_key + item.head;
    const int64_t heads = static_cast<int64_t>(shape.key_heads) * shape.heads_per_key;
    return layer.state + (shared.slot[item.b] * heads + head) * DK * DV + block.rank * kValueRows +
           item.quad * 4;
  }
  __device__ __forceinline__ State LoadState(const StepLayer& layer, int index) const {
    State state{};
    if (index >= Items()) return state;
    const Item item = ItemAt(index);
    const float* from = StateOf(layer, item) + block.lane * DV;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      state.s[i] = *reinterpret_cast<const float4*>(from + i * kWarp * DV);
    const int head = share.first_head * shape.heads_per_key + item.head;
    state.a_log = layer.a_log[head];
    state.dt_bias = layer.dt_bias[head];
    state.norm = *reinterpret_cast<const float4*>(layer.gated_norm + block.rank * kValueRows +
                                                  item.quad * 4);
    return state;
  }

  // One token of the delta rule for one item, then the norm's weight and the gate; the result goes
  // to every rank, with its share of the norm's sum of squares.
  __device__ __forceinline__ void Delta(const StepLayer& layer, const Item& item, State& state) {
    const int b = item.b, lane = block.lane;
    const float* q = shared.mixer[b] + item.head / shape.heads_per_key * 2 * DK;
    const float* k = q + DK;
    float ks[kLoads], qs[kLoads], qq = 0.0f, kk = 0.0f, kq = 0.0f;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      ks[i] = k[i * kWarp + lane];
      qs[i] = q[i * kWarp + lane];
      qq = fmaf(qs[i], qs[i], qq);
      kk = fmaf(ks[i], ks[i], kk);
      kq = fmaf(ks[i], qs[i], kq);
    }
    float beta = 0.0f, decay = 0.0f;
    if (lane < block.k_blocks) {
      beta = shared.gates[b][lane][item.head];
      decay = shared.gates[b][lane][kMaxValueHeads + item.head];
    }
    float4 u = make_float4(0, 0, 0, 0), o = u;  // of the state before its decay
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float4 s = state.s[i];
      u = {fmaf(s.x, ks[i], u.x), fmaf(s.y, ks[i], u.y), fmaf(s.z, ks[i], u.z),
           fmaf(s.w, ks[i], u.w)};
      o = {fmaf(s.x, qs[i], o.x), fmaf(s.y, qs[i], o.y), fmaf(s.z, qs[i], o.z),
           fmaf(s.w, qs[i], o.w)};
    }
    // Thirteen sums over the warp, in two loops so that their code stays short.
    float sums[13] = {qq, kk, kq, beta, decay, u.x, u.y, u.z, u.w, o.x, o.y, o.z, o.w};
#pragma unroll 1
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (float& sum : sums) sum += __shfl_xor_sync(kFullMask, sum, offset);
    }
    beta = QuickSigmoid(sums[3] * block.Inverse(b));
    decay = __expf(-expf(state.a_log) * Softplus(sums[4] * block.Inverse(b) + state.dt_bias));
    const float q_scale = rsqrtf(sums[0] + shape.l2_eps) * shape.delta_scale;
    const float k_scale = rsqrtf(sums[1] + shape.l2_eps);
    const float cross = sums[2] * k_scale * q_scale;
    const int column = item.head * kValueRows + item.quad * 4;  // of this rank's
    const float4 values = *reinterpret_cast<const float4*>(&shared.own[b][column]);
    const float4 z =
        *reinterpret_cast<const float4*>(&shared.own[b][value_heads * kValueRows + column]);
    const float v[4] = {values.x, values.y, values.z, values.w}, gate[4] = {z.x, z.y, z.z, z.w};
    const float weight[4] = {state.norm.x, state.norm.y, state.norm.z, state.norm.w};
    float e[4], out[4], square = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      e[i] = beta * (v[i] - sums[5 + i] * decay * k_scale);
      out[i] = fmaf(e[i], cross, sums[9 + i] * decay * q_scale);
      square = fmaf(out[i], out[i], square);
      e[i] *= k_scale;
      out[i] *= weight[i] * QuickSilu(gate[i]);
    }
    if (lane < kRanks) {
      const SplitPair first = SplitTwo(out[0], out[1]), second = SplitTwo(out[2], out[3]);
      const int at = item.head * DV + block.rank * kValueRows + item.quad * 4;
      const uint32_t ready = block.Peer(&shared.slice_ready);
      Send(block.Peer(&shared.slice[2 * b][at]), ready, first.high, second.high);
      Send(block.Peer(&shared.slice[2 * b + 1][at]), ready, first.low, second.low);
      Send(block.Peer(&shared.head_squares[b][item.head][block.rank * kQuads + item.quad]), ready,
           __float_as_uint(square));
    }
    float* to = StateOf(layer, item) + lane * DV;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float4 s = state.s[i];
      *reinterpret_cast<float4*>(to + i * kWarp * DV) = {
          fmaf(ks[i], e[0], s.x * decay), fmaf(ks[i], e[1], s.y * decay),
          fmaf(ks[i], e[2], s.z * decay), fmaf(ks[i], e[3], s.w * decay)};
    }
  }

  // One row of x has at most so many pairs for a half warp.
  static constexpr int kEarly = 4;
  Place places[kEarly] = {Locate(block.half_warp), Locate(block.half_warp + kHalfWarps),
                          Locate(block.half_warp + 2 * kHalfWarps),
                          Locate(block.half_warp + 3 * kHalfWarps)};

  // Asks for what a layer reads of earlier steps.
  __device__ __forceinline__ void Prefetch(const StepLayer& layer) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < value_heads * B * DK; i += kStepThreads)
      PrefetchLine(StateOf(layer, ItemAt(i / DK * kQuads)) + i % DK * DV);
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      if (places[i].channel >= 0 && block.half_lane < kConvWidth - 1)
        PrefetchLine(TailOf(layer, places[i]) + static_cast<int64_t>(block.half_lane) * channels);
    }
  }

  __device__ __forceinline__ void Project(const StepLayer& layer) {
    Channels early[kEarly];
    if constexpr (B == 1) {
#pragma unroll
      for (int i = 0; i < kEarly; ++i) early[i] = Load(layer, places[i]);
    }
    block.AwaitStream();
    if (share.heads == 0) return;
    block.template MultiplyStream<4>(
        rows,
        [&](const char* gates, const uint32_t(&x)[kBlocksOfWarp][4][2]) { SendGates(gates, x); },
        [&](const float* parts, int first, int count) {
          if constexpr (B == 1) {
#pragma unroll
            for (int i = 0; i < kEarly; ++i) {
              const int pair = block.half_warp + i * kHalfWarps;
              if (pair < count / 2) Finish(layer, parts, pair * 2, places[i], early[i]);
            }
          } else {
#pragma unroll 1
            for (int i = block.half_warp; i < count / 2 * B; i += kHalfWarps) {
              const int b = i / (count / 2), local = (i - b * (count / 2)) * 2;
              const Place place = Locate(b * (rows / 2) + (first + local) / 2);
              Finish(layer, parts, local, place, Load(layer, place));
            }
          }
        });
  }

  __device__ __forceinline__ void Mix(const StepLayer& layer) {
    if (share.heads == 0) return;
    State state = LoadState(layer, block.warp);
    block.Await(&shared.mixer_ready, block.mixer_parity,
                B * (share.heads * 2 * DK * 4 + 2 * value_heads * kValueRows * 4 +
                     block.k_blocks * 2 * kMaxValueHeads * 4));
#pragma unroll 1
    for (int item = block.warp; item < Items(); item += kStepWarps) {
      if (item != block.warp) state = LoadState(layer, item);
      Delta(layer, ItemAt(item), state);
    }
    block.Await(&shared.slice_ready, block.slice_parity,
                B * value_heads * (DV * 4 + kRanks * kQuads * 4));
  }

  __device__ __forceinline__ void Output() {
    if (share.heads == 0) return block.PublishNothing();
    block.MultiplySlice(value_heads * DV / kBoxK, [&](int b, int k_block) {
      const float* squares = shared.head_squares[b][k_block * kBoxK / DV];
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) sum += squares[block.half_lane * kQuads + i];
      return rsqrtf(HalfSum(sum, block.half_mask) / static_cast<float>(DV) + shape.gated_eps);
    });
  }
};

}  // namespace qwend::cuda
