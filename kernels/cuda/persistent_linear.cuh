// The persistent step's linear layers: projection, convolution, gates, delta rule and gated norm,
// in one cluster from its key heads' projections to their part of the output.
#pragma once

#include "kernels/cuda/persistent_block.cuh"

namespace qwend::cuda {

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

  // This thread's outputs of the projection are of one row of x; the same in all layers. For each
  // of them its channel of the convolution, kNoChannel for gates and where there is none, and above
  // it its place among this rank's channels: in one register.
  static constexpr uint32_t kNoChannel = 0xffff;
  const int b = static_cast<int>(threadIdx.x) % B;
  __device__ __forceinline__ static int RowAt(int i) {
    return (static_cast<int>(threadIdx.x) + i * kStepThreads) / B;
  }
  static_assert(kMaxClusters * (kMixerFloats + kMaxLinearSliceK) < kNoChannel);
  uint32_t located[kItems<B>];
  __device__ __forceinline__ int ChannelOf(int i) const { return located[i] & kNoChannel; }
  __device__ __forceinline__ int PlaceOf(int i) const { return located[i] >> 16; }
  __device__ __forceinline__ void Locate() {
    const int head_channels = 2 * kQueryRows + value_rows;
#pragma unroll
    for (int item = 0; item < kItems<B>; ++item) {
      const int row = RowAt(item), local_head = row / head_rows;
      const int i = row - local_head * head_rows, head = share.first_head + local_head;
      const int value = i - 2 * kQueryRows;
      const int place = (local_head * head_channels + i) * B + b;
      int channel;
      if (row >= rows || value >= value_rows) {
        channel = kNoChannel;
      } else if (value < 0) {
        channel = (i / kQueryRows * shape.key_heads + head) * DK + block.rank * kQueryRows +
                  i % kQueryRows;
      } else {
        channel = 2 * shape.key_heads * DK +
                  (head * shape.heads_per_key + value / kValueRows) * DV + block.rank * kValueRows +
                  value % kValueRows;
      }
      located[item] = channel | static_cast<uint32_t>(place) << 16;
    }
  }

  // A channel's state: three samples, `channels` apart.
  __device__ __forceinline__ float* TailOf(const StepLayer& layer, int i) const {
    return Global(layer.conv_state) +
           static_cast<int64_t>(shared.slot[b]) * (kConvWidth - 1) * channels + ChannelOf(i);
  }
  // What a layer reads besides weights and recurrent states, asked for while the stream is on its
  // way: the convolution's state and weights of these rows, which lie in the slice, which must be
  // free; and what the heads have besides.
  __device__ __forceinline__ void Fetch(const StepLayer& layer) const {
    if (share.heads == 0) return;
#pragma unroll
    for (int i = 0; i < kItems<B>; ++i) {
      if (ChannelOf(i) == kNoChannel) continue;
      const float* tail = TailOf(layer, i);
#pragma unroll
      for (int j = 0; j < kConvWidth - 1; ++j)
        FetchAsync<4>(&shared.conv.samples[j][PlaceOf(i)],
                      tail + static_cast<int64_t>(j) * channels);
      FetchAsync<16>(&shared.conv.weights[PlaceOf(i)],
                     layer.conv_weight + ChannelOf(i) * kConvWidth);
    }
    const int i = threadIdx.x, first_head = share.first_head * shape.heads_per_key;
    if (i < value_heads) {
      FetchAsync<4>(&shared.linear.a_log[i], layer.a_log + first_head + i);
      FetchAsync<4>(&shared.linear.dt_bias[i], layer.dt_bias + first_head + i);
    }
    if (i < kQuads)
      FetchAsync<16>(&shared.linear.norm[i * 4],
                     layer.gated_norm + block.rank * kValueRows + i * 4);
  }
  // The convolution with its newest sample; the state moves on by one.
  __device__ __forceinline__ float Convolve(const StepLayer& layer, int i, float newest) const {
    const auto& samples = shared.conv.samples;
    const int at = PlaceOf(i);
    const float first = samples[0][at], second = samples[1][at], third = samples[2][at];
    const float4 w = shared.conv.weights[at];
    float* tail = TailOf(layer, i);
    tail[0] = second;
    tail[channels] = third;
    tail[2 * static_cast<int64_t>(channels)] = newest;
    return QuickSilu(fmaf(w.w, newest, fmaf(w.z, third, fmaf(w.y, second, w.x * first))));
  }

  // This rank's 64 columns of the gates' rows, b above a. The last warp of the group that never has
  // more tiles; of each group when both have all.
  __device__ __forceinline__ void MultiplyGates() {
    if (block.quarter != kGroupWarps - 1 || (kTakeTurns<B> && block.group != kGroups - 1) ||
        block.rank >= block.k_blocks)
      return;
    Patience patience;
    while (!TryBarrier(&shared.gates_full, block.phases >> kGatesPhase & 1)) patience.Try();
    __syncwarp();
    block.phases ^= 1 << kGatesPhase;
    Columns x;
    Weights64 w;
    Sums c = {};
    LoadColumns<B>(x, shared.stream[0], kMaxStepHidden + 8, block.first_column, block.rank * kBoxK);
    LoadTile(w, reinterpret_cast<const char*>(shared.gate_weights) + block.lane % kTile * 128);
    __syncwarp();
    if (block.lane < kArrivers) Arrive(&shared.gates_empty);
    MultiplyTile(c, w, x);
    if (block.row_of_x >= B) return;
    const float2 sums = Total(c);
    shared.linear.own_gates[block.row_of_x][block.lane / 4] = sums.x;
    shared.linear.own_gates[block.row_of_x][block.lane / 4 + kMaxValueHeads] = sums.y;
  }
  // This rank's part of queries and keys, [heads][2][kQueryRows], and of the gates, to every rank.
  __device__ __forceinline__ void SendHeads() const {
    constexpr int kVectors = 2 * kQueryRows / 4, kGateVectors = 2 * kMaxValueHeads / 4;
    const int heads = share.heads * kVectors;
    const int all = heads + (block.rank < block.k_blocks ? kGateVectors : 0);
    const uint32_t ready = block.ToRank(&shared.ready[kMixerReady]);
    const int row = block.half_lane % B;
    const float* const kept = shared.kept[row];
    const float* const gates = shared.linear.own_gates[row] - heads * 4;
    const uint32_t to = block.ToRank(&shared.mixer[row][block.rank * heads * 4]);
    const uint32_t to_gates = block.ToRank(&shared.linear.gates[row][block.rank][0]) - heads * 16;
#pragma unroll 1
    for (int i = block.half_lane / B; i < all; i += kRanks / B) {
      const float* const from =
          i < heads ? kept + i / kVectors * head_rows + i % kVectors * 4 : gates + i * 4;
      Send((i < heads ? to : to_gates) + i * 16, ready, *reinterpret_cast<const uint4*>(from));
    }
  }

  // This rank's columns of one value head's state, [DK, kValueRows]. A warp has four of them for
  // one row of x, a lane every 32nd row.
  static constexpr int kQuads = kValueRows / 4, kLoads = DK / kWarp;
  static_assert(kValueRows <= kMaxRankValues);

  // One token of the delta rule, then the norm's weight and the gate; the result goes to every
  // rank, with its share of the norm's sum of squares.
  __device__ __forceinline__ void Delta(int b, int head, int quad, float4* state) const {
    const int lane = block.lane, key_head = head / shape.heads_per_key;
    // A rank's part of queries and keys after another's.
    const int part = share.heads * 2 * kQueryRows;
    const float* q =
        shared.mixer[b] + lane / kQueryRows * part + key_head * 2 * kQueryRows + lane % kQueryRows;
    const float* k = q + kQueryRows;
    float4 s[kLoads];
    float ks[kLoads];
    // Sums over the rows: of the state before its decay with k and with q, columns 0 to 3; q q, k
    // k, k q; the gates' parts.
    float sums[16] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = i * (kWarp / kQueryRows) * part;
      s[i] = state[(i * kWarp + lane) * kQuads + quad];
      ks[i] = k[at];
      const float qs = q[at], column[4] = {s[i].x, s[i].y, s[i].z, s[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[j] = fmaf(column[j], ks[i], sums[j]);
        sums[4 + j] = fmaf(column[j], qs, sums[4 + j]);
      }
      sums[8] = fmaf(qs, qs, sums[8]);
      sums[9] = fmaf(ks[i], ks[i], sums[9]);
      sums[10] = fmaf(ks[i], qs, sums[10]);
    }
    if (lane < block.k_blocks) {
      sums[11] = shared.linear.gates[b][lane][head];
      sums[12] = shared.linear.gates[b][lane][kMaxValueHeads + head];
    }
    const float sum = WarpSums<16>(sums, lane);
    float* all = shared.linear.sums[block.warp];
    __syncwarp();  // the item before has been read
    all[lane / 2] = sum;
    __syncwarp();
    const float4 u = *reinterpret_cast<const float4*>(all),
                 o = *reinterpret_cast<const float4*>(all + 4),
                 heads = *reinterpret_cast<const float4*>(all + 8);
    const float factor = shared.norm_factor[b];
    const float beta = QuickSigmoid(heads.w * factor);
    const float decay = __expf(-__expf(shared.linear.a_log[head]) *
                               QuickSoftplus(fmaf(all[12], factor, shared.linear.dt_bias[head])));
    const float q_scale = rsqrtf(heads.x + shape.l2_eps) * shape.delta_scale;
    const float k_scale = rsqrtf(heads.y + shape.l2_eps);
    const float cross = heads.z * k_scale * q_scale;
    const float* kept = shared.kept[b] + key_head * head_rows + 2 * kQueryRows +
                        head % shape.heads_per_key * kValueRows + quad * 4;
    float v[4], gate[4], weight[4];
    LoadFloats(v, kept);
    LoadFloats(gate, kept + value_rows);
    LoadFloats(weight, shared.linear.norm + quad * 4);
    const float us[4] = {u.x, u.y, u.z, u.w}, os[4] = {o.x, o.y, o.z, o.w};
    float e[4], out[4], square = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      e[i] = beta * fmaf(-us[i] * decay, k_scale, v[i]);
      out[i] = fmaf(e[i], cross, os[i] * decay * q_scale);
      square = fmaf(out[i], out[i], square);
      e[i] *= k_scale;
      out[i] = __fmul_rn(out[i], weight[i] * QuickSilu(gate[i]));
    }
    if (lane < kRanks) {
      const SplitPair first = SplitTwo(out[0], out[1]), second = SplitTwo(out[2], out[3]);
      const int at = head * DV + block.rank * kValueRows + quad * 4;
      const uint32_t ready = block.ToLane(&shared.ready[kSliceReady]);
      Send(block.ToLane(&shared.slice[2 * b][at]), ready, first.high, second.high);
      Send(block.ToLane(&shared.slice[2 * b + 1][at]), ready, first.low, second.low);
      Send(block.ToLane(&shared.head_squares[b][head][block.rank * kQuads + quad]), ready,
           __float_as_uint(square));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      state[(i * kWarp + lane) * kQuads + quad] = {
          fmaf(ks[i], e[0], s[i].x * decay), fmaf(ks[i], e[1], s[i].y * decay),
          fmaf(ks[i], e[2], s[i].z * decay), fmaf(ks[i], e[3], s[i].w * decay)};
  }

  // Queries and keys to every rank; values and gates stay.
  __device__ __forceinline__ void TakeProducts(const StepLayer& layer, const float* parts,
                                               int count) const {
    const float factor = shared.norm_factor[b];
    AwaitFetches();
#pragma unroll
    for (int i = 0; i < kItems<B>; ++i) {
      const int item = threadIdx.x + i * kStepThreads;
      if (item >= count * B) continue;
      const float v = __fmul_rn(block.SumParts(parts, item), factor);
      shared.kept[b][RowAt(i)] = ChannelOf(i) == kNoChannel ? v : Convolve(layer, i, v);
    }
    block.Sync();
    SendHeads();
  }

  // A slot goes back when its states have been stored: the last one by all warps when nobody waits
  // any more, for which the output matrix's slots must fit beside it, and those before it by the
  // warp that was the last to work on them, which then stores them.
  static_assert(CeilDiv(kMaxLinearSliceK / kBoxK, SlotBlocks(B)) < kRingSlots<B>);
  const int rows_at_once = RowsOfStates<B>(max(value_heads, 1), kStateBytes<DK, DV>);
  int held_slot = -1;
  __device__ __forceinline__ void GiveBack() {
    if (held_slot < 0) return;
    if (block.lane == 0) AwaitStoresRead();
    block.ReleaseSlot(held_slot, 1);
    held_slot = -1;
  }

  // The state of a head of the rows from `first` on, from a slot to where it belongs.
  __device__ __forceinline__ void StoreState(const StepLayer& layer, int first, int item,
                                             const char* states) const {
    StoreTile(
        block.a.maps + layer.state_map, block.rank * kValueRows,
        StateRow(block.a, shared.slot[first + item / value_heads], share, item % value_heads) * DK,
        SharedAddress(states + item * kStateBytes<DK, DV>));
  }

  // This warp's items of the rows from `first` on, from `next` on; how many.
  __device__ __forceinline__ int DeltaOf(int first, int items, int& next, char* states) const {
    int count = 0;
#pragma unroll 1
    for (; next < items; next += kStepWarps, ++count) {
      const int item = next / kQuads;
      Delta(first + item / value_heads, item % value_heads, next % kQuads,
            reinterpret_cast<float4*>(states + item * kStateBytes<DK, DV>));
    }
    FenceForCopies();
    next -= items;
    return count;
  }

  // The delta rule of all rows but those in the last slot: warps take items by turns, slot after
  // slot, and wait for nobody.
  __device__ __forceinline__ void DeltaBeforeLast(const StepLayer& layer, int last, int& next) {
    const int heads = rows_at_once * value_heads;
#pragma unroll 1
    for (int first = 0; first < last; first += rows_at_once) {
      GiveBack();
      char* const states = block.AwaitSlot();
      const int count = DeltaOf(first, heads * kQuads, next, states);
      __syncwarp();
      int done = 0;
      if (block.lane == 0) {
        __threadfence_block();
        done = atomicAdd(&shared.states_done[first], count) + count;
      }
      if (__shfl_sync(kFullMask, done, 0) == heads * kQuads && count > 0) {
        __threadfence_block();
        FenceForCopies();
        if (block.lane == 0) {
          shared.states_done[first] = 0;
#pragma unroll 1
          for (int i = 0; i < heads; ++i) StoreState(layer, first, i, states);
        }
        held_slot = block.slot;
      } else {
        block.ReleaseSlot(block.slot, 1);
      }
      block.SkipSlots(1);
    }
    GiveBack();
  }

  __device__ __forceinline__ void Mix(const StepLayer& layer) {
    if (share.heads == 0) return;
    block.Await(kMixerReady,
                B * (share.heads * 2 * DK * 4 + block.k_blocks * 2 * kMaxValueHeads * 4));
    const int last = (B - 1) / rows_at_once * rows_at_once, heads = (B - last) * value_heads;
    int next = block.warp;
    if (B > 1) DeltaBeforeLast(layer, last, next);
    char* const states = block.AwaitSlot();
    DeltaOf(last, heads * kQuads, next, states);
    held_slot = block.slot;
    block.SkipSlots(1);
    block.Await(kSliceReady, B * value_heads * (DV * 4 + kRanks * kQuads * 4));
    // The gated norm's factor of each head.
    if (static_cast<int>(threadIdx.x) < B * value_heads) {
      const int row = threadIdx.x % B, head = threadIdx.x / B;
      const auto* squares = reinterpret_cast<const float4*>(shared.head_squares[row][head]);
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kRanks * kQuads / 4; ++i) {
        const float4 v = squares[i];
        sum += (v.x + v.y) + (v.z + v.w);
      }
      shared.linear.head_factor[row][head] = rsqrtf(sum / static_cast<float>(DV) + shape.gated_eps);
    }
    block.Sync();
    if (block.lane == 0) {
#pragma unroll 1
      for (int i = block.warp; i < heads; i += kStepWarps) StoreState(layer, last, i, states);
    }
    __syncwarp();
  }
};

}  // namespace qwend::cuda
