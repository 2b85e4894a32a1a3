// One block of the persistent step: the ring that its weights stream through, the products of those
// weights with the activations that its cluster has sent, and the residual stream between clusters.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/persistent_shared.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {

// A compute thread's view of its block. All its methods are called by all compute threads.
template <int B>
struct StepBlock {
  const StepArguments& a;
  StepShared<B>& shared;
  char* ring;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // Sixteen lanes share an output: each sums what one warp left of it and sends it to one rank.
  const int half_lane = threadIdx.x % kRanks, half_warp = threadIdx.x / kRanks;
  const unsigned half_mask = 0xffffu << (threadIdx.x & 16);
  const int rank, cluster;
  const int stream_rows, k_blocks;  // rows of the residual stream that are this rank's; hidden / 64
  uint32_t to_peer = 0;             // from an address here to the half lane's rank's

  const float per_hidden = 1.0f / static_cast<float>(a.shape.hidden);

  uint32_t slot = 0, slot_parity = 0;
  uint32_t stream_parity = 0, slice_parity = 0, mixer_parity = 0, merge_parity = 0;
  uint32_t turn = 0;  // of the parts
  uint32_t hop = 0;   // of the stream's partial sums
  uint32_t first_epoch = 0;
  float hidden[B][kStreamSpan] = {};  // the stream's rows of these eight lanes
  float inverse[B] = {};              // the norm's factor

  __device__ __forceinline__ StepBlock(const StepArguments& arguments, StepShared<B>& s, char* r)
      : a(arguments),
        shared(s),
        ring(r),
        rank(static_cast<int>(ClusterRank())),
        cluster(static_cast<int>(blockIdx.x) / kRanks),
        stream_rows(arguments.shape.hidden / kRanks),
        k_blocks(arguments.shape.hidden / kBoxK) {
    to_peer = Mapped(&s, half_lane) - SharedAddress(&s);
    first_epoch = *a.epoch;
  }

  __device__ __forceinline__ void Sync() { NamedBarrier(kConsumerBarrier, kStepThreads); }
  __device__ __forceinline__ uint32_t Peer(const void* p) const {
    return SharedAddress(p) + to_peer;
  }

  // One thread says how many bytes the cluster will send; all wait for them.
  __device__ __forceinline__ void Await(uint64_t* barrier, uint32_t& parity, int bytes) {
    if (threadIdx.x == 0) ArriveExpecting(barrier, bytes);
    WaitForCluster(barrier, parity);
    parity ^= 1;
  }

  __device__ __forceinline__ const char* AwaitSlot() {
    Patience patience;
    while (!TryBarrier(shared.full + slot, slot_parity)) patience.Try();
    return ring + slot * kSlotStride;
  }
  __device__ __forceinline__ void ReleaseSlot() {
    __syncwarp();
    if (lane == 0) Arrive(shared.empty + slot);
    if (++slot == kRingSlots<B>) {
      slot = 0;
      slot_parity ^= 1;
    }
  }

  // Which of this rank's rows of the stream are these eight lanes'.
  __device__ __forceinline__ int StreamRow(int i) const {
    return threadIdx.x / 8 + i * (kStepThreads / 8);
  }

  // The stream's rows, scaled by the norm's weight, to every rank, sixteen bytes at a time; with
  // them the sum of their squares.
  __device__ __forceinline__ void SendStream(const float (&weight)[kStreamSpan]) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < kStreamSpan; ++i) {
        const float v = hidden[b][i] * weight[i];
        const bf16 high = __float2bfloat16_rn(v);
        if (lane % 8 == 0 && StreamRow(i) < stream_rows) {
          shared.outgoing[2 * b][StreamRow(i)] = high;
          shared.outgoing[2 * b + 1][StreamRow(i)] =
              __float2bfloat16_rn(v - __bfloat162float(high));
        }
        square = fmaf(hidden[b][i], hidden[b][i], square);  // the same in the row's eight lanes
      }
      square += __shfl_xor_sync(kFullMask, square, 8);
      square += __shfl_xor_sync(kFullMask, square, 16);
      if (lane == 0) shared.own_squares[b][warp] = square;
    }
    Sync();
    const uint32_t ready = Peer(&shared.stream_ready);
    const int vectors = stream_rows / 8;
#pragma unroll 1
    for (int i = half_warp; i < 2 * B * vectors; i += kHalfWarps) {
      const int column = i / vectors, at = (i - column * vectors) * 8;
      Send(Peer(&shared.stream[column][rank * stream_rows + at]), ready,
           *reinterpret_cast<const uint4*>(&shared.outgoing[column][at]));
    }
    const int b = kHalfWarps - 1 - half_warp;  // whoever has least to send
    if (b >= B) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kStepWarps; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&shared.own_squares[b][i]);
      sum += (x.x + x.y) + (x.z + x.w);
    }
    Send(Peer(&shared.squares[b][rank]), ready, __float_as_uint(sum));
  }

  // The norm's weights of these lanes' rows; 0 where there is none.
  struct Weights {
    float v[kStreamSpan];
  };
  __device__ __forceinline__ Weights StreamWeights(const float* norm) const {
    Weights w;
#pragma unroll
    for (int i = 0; i < kStreamSpan; ++i) {
      const int row = StreamRow(i);
      w.v[i] = row < stream_rows ? a.shape.norm_offset + norm[rank * stream_rows + row] : 0.0f;
    }
    return w;
  }

  __device__ __forceinline__ void Embed(const float* norm) {
    const Weights weights = StreamWeights(norm);
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const bf16* from = a.embedding.At(max(a.token_ids[b], 0)) + rank * stream_rows;
#pragma unroll
      for (int i = 0; i < kStreamSpan; ++i)
        hidden[b][i] = StreamRow(i) < stream_rows ? ToFloat(from[StreamRow(i)]) : 0.0f;
    }
    SendStream(weights.v);
  }

  __device__ __forceinline__ unsigned long long* Word(int b, int row, int of_cluster) const {
    return a.words +
           ((static_cast<int64_t>(hop & 1) * B + b) * a.shape.hidden + row) * kMaxClusters +
           of_cluster;
  }

  // Adds what every cluster has made of this rank's rows, in order of the clusters' pairs, pairs of
  // pairs and halves, and passes the stream on.
  __device__ __forceinline__ void Hop(const float* norm) {
    const Weights weights = StreamWeights(norm);
    const int of_cluster = lane % 8;
    const uint32_t epoch = first_epoch + hop;
    unsigned long long words[B][kStreamSpan];
    Patience patience;
#pragma unroll 1
    for (bool done = of_cluster >= a.shape.clusters; !done; patience.Try()) {
      done = true;
#pragma unroll
      for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int i = 0; i < kStreamSpan; ++i) {
          const int row = min(StreamRow(i), stream_rows - 1);
          words[b][i] = ReadWord(Word(b, rank * stream_rows + row, of_cluster));
        }
      }
#pragma unroll
      for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int i = 0; i < kStreamSpan; ++i)
          done &= static_cast<uint32_t>(words[b][i] >> 32) == epoch;
      }
    }
    __syncwarp();
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
      for (int i = 0; i < kStreamSpan; ++i) {
        const bool counts = of_cluster < a.shape.clusters && StreamRow(i) < stream_rows;
        float v = counts ? __uint_as_float(static_cast<uint32_t>(words[b][i])) : 0.0f;
        v += __shfl_xor_sync(kFullMask, v, 1);
        v += __shfl_xor_sync(kFullMask, v, 2);
        v += __shfl_xor_sync(kFullMask, v, 4);
        hidden[b][i] += v;
      }
    }
    ++hop;
    SendStream(weights.v);
  }

  __device__ __forceinline__ void AwaitStream() {
    Await(&shared.stream_ready, stream_parity, B * (a.shape.hidden * 4 + kRanks * 4));
  }

  // The norm's factor of every row, from all ranks' squares.
  __device__ __forceinline__ void NormFactors() {
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const float sum = HalfSum(shared.squares[b][half_lane], kFullMask);
      inverse[b] = rsqrtf(fmaf(sum, per_hidden, a.shape.norm_eps));
    }
  }
  __device__ __forceinline__ float Inverse(int b) const {
    float v = inverse[0];
#pragma unroll
    for (int i = 1; i < B; ++i) v = b == i ? inverse[i] : v;
    return v;
  }

  // 64 elements of K of the columns, as the product's second operand.
  __device__ __forceinline__ void LoadColumns(uint32_t (&x)[4][2], const bf16* columns, int stride,
                                              int k) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t r[4];
      LoadMatrix4(r, columns + lane % 8 % (2 * B) * stride + k + i * 32 + lane / 8 * 8);
      x[2 * i][0] = r[0];
      x[2 * i][1] = r[1];
      x[2 * i + 1][0] = r[2];
      x[2 * i + 1][1] = r[3];
    }
  }

  // 16 rows of a weight times 64 elements of K; `row` is where this lane's row of the tile begins.
  // Lane (g, t) gets the sums of rows g and g + 8 for row t of x.
  __device__ __forceinline__ float2 MultiplyTile(const char* row, const uint32_t (&x)[4][2]) const {
    float even[4] = {}, odd[4] = {};
    const uint32_t swizzle = SharedAddress(row) >> 7 & 7;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      uint32_t w[4];
      LoadMatrix4(w, row + ((2 * s + lane / 16) ^ swizzle) * 16);
      MmaBf16(s % 2 == 0 ? even : odd, w, x[s][0], x[s][1]);
    }
    return make_float2((even[0] + odd[0]) + (even[1] + odd[1]),
                       (even[2] + odd[2]) + (even[3] + odd[3]));
  }

  // Half of the parts, in turn: whoever still reads is behind the barrier before last.
  __device__ __forceinline__ float* NextParts() {
    return shared.parts + (turn++ & 1) * StepShared<B>::kHalfParts;
  }

  // Leaves a tile's two sums of this lane among the parts.
  __device__ __forceinline__ void PutParts(float* parts, int part, int row, float2 sums) const {
    const int t = lane % 4;
    if (t >= B) return;
    float* to = parts + part * StepShared<B>::kPartStride + (row + lane / 4) * B + t;
    to[0] = sums.x;
    to[8 * B] = sums.y;
  }

  // The sums of two neighbouring outputs' parts; the sixteen lanes of a half warp call it together:
  // eight add up the first output's parts, eight the second's.
  __device__ __forceinline__ float2 SumPair(const float* parts, int row, int b) const {
    const int part = half_lane % kStepWarps;
    float v =
        part < k_blocks
            ? parts[part * StepShared<B>::kPartStride + (row + half_lane / kStepWarps) * B + b]
            : 0.0f;
#pragma unroll
    for (int offset = kStepWarps / 2; offset > 0; offset /= 2)
      v += __shfl_xor_sync(half_mask, v, offset);
    const float other = __shfl_xor_sync(half_mask, v, kStepWarps);
    return half_lane < kStepWarps ? make_float2(v, other) : make_float2(other, v);
  }

  // `rows` rows of weights, tile by tile from the ring, times the stream: each warp has every
  // eighth 64 elements of K. A tile is `Boxes` copied boxes of 16 / Boxes rows each.
  // before(weights, x) runs once with the first slot; finish(parts, first, count) every few tiles,
  // when their parts are there.
  template <int Boxes, typename Before, typename Finish>
  __device__ __forceinline__ void MultiplyStream(int rows, Before before, Finish finish) {
    uint32_t x[kBlocksOfWarp][4][2];
#pragma unroll
    for (int i = 0; i < kBlocksOfWarp; ++i) {
      const int block = warp + i * kStepWarps;
      if (block < k_blocks) LoadColumns(x[i], shared.stream[0], kMaxStepHidden + 8, block * kBoxK);
    }
    constexpr int kBoxRows = kTile / Boxes;
    const int row = lane % kTile;
    const int at = row / kBoxRows * (k_blocks * kBoxRows * 128 + kBoxGap) + warp * kBoxRows * 128 +
                   row % kBoxRows * 128;
#pragma unroll 1
    for (int first = 0; first < rows; first += kTilesAtOnce<B> * kTile) {
      float* parts = NextParts();
      const int count = min(rows - first, kTilesAtOnce<B> * kTile);
#pragma unroll 1
      for (int tile = 0; tile * kTile < count; ++tile) {
        const char* weights = AwaitSlot();
        float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kBlocksOfWarp; ++i) {
          if (warp + i * kStepWarps >= k_blocks) continue;
          const float2 v = MultiplyTile(weights + at + i * kStepWarps * kBoxRows * 128, x[i]);
          sums.x += v.x;
          sums.y += v.y;
        }
        PutParts(parts, warp, tile * kTile, sums);
        if (first == 0 && tile == 0) before(weights + kGatesAt, x);
        ReleaseSlot();
      }
      if (first == 0) NormFactors();
      Sync();
      finish(parts, first, count);
    }
  }

  // This rank's rows of the output matrix times the cluster's slice of `slice_blocks` * 64 columns;
  // the sums are published for every cluster. scale(b, block) weighs a block's part of row b.
  template <typename Scale>
  __device__ __forceinline__ void MultiplySlice(int slice_blocks, Scale scale) {
    constexpr int kParts = kStepWarps / 4;
    const int tile = warp % 4, part = warp / 4;
    float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int first = 0; first < slice_blocks; first += 4) {
      const char* weights = AwaitSlot();
#pragma unroll
      for (int j = 0; j < 4 / kParts; ++j) {
        const int i = part + j * kParts, block = first + i;
        if (block >= slice_blocks || tile * kTile >= stream_rows) continue;
        uint32_t x[4][2];
        LoadColumns(x, shared.slice[0], kMaxSliceK + 8, block * kBoxK);
        const float2 v =
            MultiplyTile(weights + (i * stream_rows + tile * kTile + lane % kTile) * 128, x);
        float factor = 0.0f;
#pragma unroll
        for (int b = 0; b < B; ++b) {
          const float f = scale(b, block);
          factor = lane % 4 == b ? f : factor;
        }
        sums.x = fmaf(factor, v.x, sums.x);
        sums.y = fmaf(factor, v.y, sums.y);
      }
      ReleaseSlot();
    }
    float* parts = NextParts();
    PutParts(parts, part, tile * kTile, sums);
    Sync();
#pragma unroll 1
    for (int i = threadIdx.x; i < stream_rows * B; i += kStepThreads) {
      float v = 0.0f;
#pragma unroll
      for (int p = 0; p < kParts; ++p) v += parts[p * StepShared<B>::kPartStride + i];
      PublishWord(Word(i % B, rank * stream_rows + i / B, cluster), v, first_epoch + hop);
    }
  }

  // When a cluster has no part in a half of a layer. Its ranks wait for one another, as the
  // exchange inside a half makes the others wait: a rank that ran ahead would count into its
  // neighbours' current phase of the stream.
  __device__ __forceinline__ void PublishNothing() {
    if (threadIdx.x < kRanks) Send(Peer(&shared.token[rank]), Peer(&shared.slice_ready), 0u);
    Await(&shared.slice_ready, slice_parity, kRanks * 4);
#pragma unroll 1
    for (int i = threadIdx.x; i < stream_rows * B; i += kStepThreads)
      PublishWord(Word(i % B, rank * stream_rows + i / B, cluster), 0.0f, first_epoch + hop);
  }
};

}  // namespace qwend::cuda
