// One block of the persistent step: the ring that its weights stream through, the products of those
// weights with the activations that its cluster has sent, and the residual stream between clusters.
#pragma once

#include "kernels/cuda/persistent_tiles.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {

// A compute thread's view of its block. All its methods are called by all compute threads.
template <int B>
struct StepBlock {
  const StepArguments& a;
  StepShared<B>& shared;
  char* ring;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int group = warp / kGroupWarps, quarter = warp % kGroupWarps;
  // Each lane of a half warp sends to one rank.
  const int half_lane = threadIdx.x % kRanks, half_warp = threadIdx.x / kRanks;
  const int rank, cluster;
  const float per_hidden = 1.0f / static_cast<float>(a.shape.hidden);
  const int stream_rows, k_blocks;  // rows of the residual stream that are this rank's; hidden / 64
  uint32_t to_peer = 0;             // from an address here to the half lane's rank's

  int slot = 0;  // the next of the ring
  uint32_t slot_parity = 0;
  uint32_t stream_parity = 0, slice_parity = 0, mixer_parity = 0, merge_parity = 0;
  uint32_t hop = 0;  // of the stream's partial sums
  uint32_t first_epoch = 0;
  float hidden[B][kStreamSpan] = {};  // the stream's rows of these eight lanes

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

  // Goes `count` slots on, at most the ring's.
  __device__ __forceinline__ void SkipSlots(int count) {
    slot += count;
    if (slot < kRingSlots<B>) return;
    slot -= kRingSlots<B>;
    slot_parity ^= 1;
  }
  __device__ __forceinline__ char* AwaitSlot() {
    Patience patience;
    while (!TryBarrier(shared.full + slot, slot_parity)) patience.Try();
    __syncwarp();
    return ring + slot * kSlotStride;
  }
  // By all warps that share a slot; a slot that one group has for itself counts twice.
  __device__ __forceinline__ void ReleaseSlot(int which, int times) {
    __syncwarp();
    if (lane == 0) Arrive(shared.empty + which, times);
  }
  // use(i, slot) for the slots of a phase that are this group's.
  template <typename Use>
  __device__ __forceinline__ void ForOwnSlots(int count, Use use) {
    SkipSlots(group);
    int i = group;
#pragma unroll 1
    for (; i < count; i += kGroups) {
      use(i, AwaitSlot());
      ReleaseSlot(slot, kGroups);
      SkipSlots(kGroups);
    }
    // Back to the first slot of the next phase: i is it, or the one behind it.
    if (i == count) return;
    if (slot == 0) slot_parity ^= 1;
    slot = (slot == 0 ? kRingSlots<B> : slot) - 1;
  }

  // Which of this rank's rows of the stream are these eight lanes'.
  __device__ __forceinline__ int StreamRow(int i) const {
    return threadIdx.x / 8 + i * (kStepThreads / 8);
  }

  // `outgoing`, `count` elements of each of its columns, N at a time to every rank's
  // to[column][at...].
  template <int N, int Stride>
  __device__ __forceinline__ void SendOutgoing(bf16 (&to)[2 * B][Stride], int at, int count,
                                               uint64_t* barrier) {
    const uint32_t ready = Peer(barrier);
    const int column = half_warp % (2 * B);
#pragma unroll 1
    for (int i = half_warp / (2 * B) * N; i < count; i += kHalfWarps / (2 * B) * N) {
      const bf16* from = &shared.outgoing[column][i];
      const uint32_t there = Peer(&to[column][at + i]);
      if constexpr (N == 8) {
        Send(there, ready, *reinterpret_cast<const uint4*>(from));
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        Send(there, ready, v.x, v.y);
      }
    }
  }

  // The stream's rows, scaled by the norm's weight, to every rank; with them the sum of their
  // squares.
  __device__ __forceinline__ void SendStream(const float (&weight)[kStreamSpan]) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < kStreamSpan; ++i) {
        const Halves v(__fmul_rn(hidden[b][i], weight[i]));
        if (lane % 8 == 0 && StreamRow(i) < stream_rows) {
          shared.outgoing[2 * b][StreamRow(i)] = v.high;
          shared.outgoing[2 * b + 1][StreamRow(i)] = v.low;
        }
        square = fmaf(hidden[b][i], hidden[b][i], square);  // the same in the row's eight lanes
      }
      square += __shfl_xor_sync(kFullMask, square, 8);
      square += __shfl_xor_sync(kFullMask, square, 16);
      if (lane == 0) shared.own_squares[b][warp] = square;
    }
    Sync();
    SendOutgoing<8>(shared.stream, rank * stream_rows, stream_rows, &shared.stream_ready);
    const int b = kHalfWarps - 1 - half_warp;
    if (b >= B) return;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kStepWarps; i += 4) {
      const float4 x = *reinterpret_cast<const float4*>(&shared.own_squares[b][i]);
      sum += (x.x + x.y) + (x.z + x.w);
    }
    Send(Peer(&shared.squares[b][rank]), Peer(&shared.stream_ready), __float_as_uint(sum));
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
      w.v[i] =
          row < stream_rows ? a.shape.norm_offset + Global(norm)[rank * stream_rows + row] : 0.0f;
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

  // Leaves a tile's sums of this lane among the parts.
  __device__ __forceinline__ void PutParts(float* parts, int part, int row, int n,
                                           float2 sums) const {
    const int b = 4 * n + lane % 4;
    if (b >= B) return;
    float* to = parts + part * StepShared<B>::kPartStride + (row + lane / 4) * B + b;
    to[0] = sums.x;
    to[8 * B] = sums.y;
  }

  // The sum of an output's four parts; `item` is its row of the weights times B plus its row of x.
  __device__ __forceinline__ float SumParts(const float* parts, int item) const {
    constexpr int kStride = StepShared<B>::kPartStride;
    return (parts[item] + parts[item + kStride]) +
           (parts[item + 2 * kStride] + parts[item + 3 * kStride]);
  }

  // The norm's factor of each row, from all ranks' squares, for whoever comes after a barrier.
  __device__ __forceinline__ void NormFactors() const {
    const int b = kStepWarps - 1 - warp;
    if (b >= B) return;
    float sum = shared.squares[b][lane % kRanks];
#pragma unroll
    for (int offset = kRanks / 2; offset > 0; offset /= 2)
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    if (lane == 0) shared.norm_factor[b] = rsqrtf(fmaf(sum, per_hidden, a.shape.norm_eps));
  }

  // `rows` rows of weights, tile by tile from the ring, times the stream. A tile is `Boxes` copied
  // boxes of 16 / Boxes rows each. before() runs when the stream is there; finish(parts,
  // first, count) every AtOnce tiles, when their parts are there. With less than kTilesAtOnce the
  // parts alternate; otherwise finish must have a barrier after it has read them.
  template <int Boxes, int AtOnce, typename Before, typename Finish>
  __device__ __forceinline__ void MultiplyStream(int rows, Before before, Finish finish) {
    Columns<B> x[kBlocksOfWarp];
#pragma unroll
    for (int i = 0; i < kBlocksOfWarp; ++i) {
      const int block = quarter + i * kGroupWarps;
      if (block < k_blocks)
        LoadColumns<B>(x[i], shared.stream[0], kMaxStepHidden + 8, block * kBoxK);
    }
    NormFactors();
    before();
    constexpr int kBoxRows = kTile / Boxes;
    const int row = lane % kTile, box = row / kBoxRows;
    const int at = box * k_blocks * kBoxRows * 128 + (box + 1) / 2 * kBoxGap +
                   quarter * kBoxRows * 128 + row % kBoxRows * 128;
#pragma unroll 1
    for (int first = 0; first < rows; first += AtOnce * kTile) {
      float* parts = shared.parts + first % (kTilesAtOnce * kTile) * B;
      const int count = min(rows - first, AtOnce * kTile), tiles = CeilDiv(count, kTile);
      ForOwnSlots(tiles, [&](int tile, const char* weights) {
        Sums<B> c = {};
#pragma unroll
        for (int i = 0; i < kBlocksOfWarp; ++i) {
          if (quarter + i * kGroupWarps >= k_blocks) continue;
          Weights64 w;
          LoadTile(w, weights + at + i * kGroupWarps * kBoxRows * 128);
          MultiplyTile<B>(c, w, x[i]);
        }
#pragma unroll
        for (int n = 0; n < kColumnTiles<B>; ++n)
          PutParts(parts, quarter, tile * kTile, n, Total(c[n]));
      });
      Sync();
      finish(parts, first, count);
    }
  }

  // This rank's rows of the output matrix times the cluster's slice of `slice_blocks` * 64 columns;
  // the sums are published for every cluster. scale(b, block) weighs row b's part of Run blocks,
  // from a multiple of Run on.
  template <int Run, typename Scale>
  __device__ __forceinline__ void MultiplySlice(int slice_blocks, Scale scale) {
    const int row = quarter * kTile + lane % kTile;
    float2 sums[kColumnTiles<B>] = {};
    ForOwnSlots(CeilDiv(slice_blocks, kSlotBlocks), [&](int i, const char* weights) {
      const int count = min(slice_blocks - i * kSlotBlocks, kSlotBlocks);
#pragma unroll
      for (int first = 0; first < kSlotBlocks; first += Run) {
        if (first >= count || quarter * kTile >= stream_rows) continue;
        Sums<B> c = {};
#pragma unroll
        for (int j = first; j < first + Run; ++j) {
          if (j >= count) continue;
          Columns<B> x;
          Weights64 w;
          LoadColumns<B>(x, shared.slice[0], kMaxSliceK + 8, (i * kSlotBlocks + j) * kBoxK);
          LoadTile(w, weights + (j * stream_rows + row) * 128);
          MultiplyTile<B>(c, w, x);
        }
#pragma unroll
        for (int n = 0; n < kColumnTiles<B>; ++n) {
          const float2 v = Total(c[n]);
          const float factor = scale(min(4 * n + lane % 4, B - 1), i * kSlotBlocks + first);
          sums[n].x = fmaf(factor, v.x, sums[n].x);
          sums[n].y = fmaf(factor, v.y, sums[n].y);
        }
      }
    });
#pragma unroll
    for (int n = 0; n < kColumnTiles<B>; ++n)
      PutParts(shared.parts, group, quarter * kTile, n, sums[n]);
    Sync();
#pragma unroll 1
    for (int i = threadIdx.x; i < stream_rows * B; i += kStepThreads) {
      const float v = shared.parts[i] + shared.parts[StepShared<B>::kPartStride + i];
      PublishWord(Word(i % B, rank * stream_rows + i / B, cluster), v, first_epoch + hop);
    }
  }

  // This rank's rows of `heads` heads of D elements, where they begin in `kept`, to the same heads
  // of every rank's `mixer`, or to one rank alone: to(b, head) is that rank, or -1.
  template <int D, typename Kept, typename To>
  __device__ __forceinline__ void SendHeads(int heads, Kept kept, To to) {
    constexpr int kRows = D / kRanks, kVectors = kRows / 4;
    const uint32_t ready = Peer(&shared.mixer_ready);
#pragma unroll 1
    for (int b = 0; b < B; ++b) {
#pragma unroll 1
      for (int i = half_warp; i < heads * kVectors; i += kHalfWarps) {
        const int head = i / kVectors, at = i % kVectors * 4, only = to(b, head);
        if (only >= 0 && only != half_lane) continue;
        Send(Peer(&shared.mixer[b][head * D + rank * kRows + at]), ready,
             *reinterpret_cast<const uint4*>(&shared.kept[b][kept(head) + at]));
      }
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
