// One block of the persistent step: the products of the weights that come through its ring with the
// activations that its cluster has sent, and the residual stream between clusters.
#pragma once

#include "kernels/cuda/persistent_ring.cuh"
#include "kernels/cuda/persistent_tiles.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {

// A compute thread's view of its block. All its methods are called by all compute threads.
template <int B>
struct StepBlock : StepRing<B> {
  using Ring = StepRing<B>;
  using Ring::AwaitSlot, Ring::ReleaseSlot, Ring::SkipSlots, Ring::ForOwnTiles;
  using Ring::shared, Ring::lane, Ring::warp, Ring::group, Ring::quarter, Ring::slot;
  const StepArguments& a;
  // A half warp sends to one rank, neighbouring bytes by neighbouring lanes: the network between
  // the blocks takes whole lines as fast as parts of them.
  const int half_lane = threadIdx.x % kRanks, half_warp = threadIdx.x / kRanks;
  // Its columns of a product, and the row of x whose sums this lane has of it.
  const int first_column = kTakeTurns<B> ? 0 : group * 2 * kGroupRows;
  const int row_of_x = first_column / 2 + lane % 4;
  const int rank, cluster;
  const float per_hidden = 1.0f / static_cast<float>(a.shape.hidden);
  const int stream_rows, k_blocks;  // rows of the residual stream that are this rank's; hidden / 64
  uint32_t to_rank = 0, to_lane = 0;  // from an address here to the half warp's rank's; the lane's

  uint32_t stream_parity = 0, slice_parity = 0, mixer_parity = 0, merge_parity = 0;
  int hop = 0;  // the exchanges between clusters, counted
  unsigned long long* words;
  // The last warps have this rank's rows of the stream, two each lane: kStreamWarps the same of row
  // `stream_b` of x, each of which passes them on to some of the ranks.
  const int stream_b = (kStepWarps - 1 - static_cast<int>(threadIdx.x) / kWarp) / kStreamWarps<B>;
  const int stream_part =
      (kStepWarps - 1 - static_cast<int>(threadIdx.x) / kWarp) % kStreamWarps<B>;
  float2 hidden = {0.0f, 0.0f};

  __device__ __forceinline__ StepBlock(const StepArguments& arguments, StepShared<B>& s, char* r)
      : Ring{s, r},
        a(arguments),
        rank(static_cast<int>(ClusterRank())),
        cluster(static_cast<int>(blockIdx.x) / kRanks),
        stream_rows(arguments.shape.hidden / kRanks),
        k_blocks(arguments.shape.hidden / kBoxK) {
    to_rank = Mapped(&s, half_warp) - SharedAddress(&s);
    to_lane = Mapped(&s, half_lane) - SharedAddress(&s);
    const int64_t words_of_step = int64_t{2} * kMaxStepRows * a.shape.hidden;
    const uint32_t turn = *a.turn % 2;
    words = a.words + turn * words_of_step;
    // The next step's begin at zero.
    unsigned long long* next = a.words + (1 - turn) * words_of_step;
#pragma unroll 1
    for (int64_t i = blockIdx.x * kStepThreads + threadIdx.x; i < words_of_step;
         i += gridDim.x * kStepThreads)
      next[i] = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * kPublished<B>; i += kStepThreads)
      (&shared.published[0][0])[i] = make_float2(0.0f, 0.0f);
  }

  __device__ __forceinline__ void Sync() { NamedBarrier(kConsumerBarrier, kStepThreads); }
  __device__ __forceinline__ uint32_t ToRank(const void* p) const {
    return SharedAddress(p) + to_rank;
  }
  __device__ __forceinline__ uint32_t ToLane(const void* p) const {
    return SharedAddress(p) + to_lane;
  }

  // One thread says how many bytes the cluster will send; all wait for them.
  __device__ __forceinline__ void Await(uint64_t* barrier, uint32_t& parity, int bytes) {
    if (threadIdx.x == 0) ArriveExpecting(barrier, bytes);
    WaitForCluster(barrier, parity);
    parity ^= 1;
  }

  // `outgoing`, `count` elements of each of its columns, to every rank's to[column][at...].
  template <int Stride>
  __device__ __forceinline__ void SendOutgoing(bf16 (&to)[2 * B][Stride], int at, int count,
                                               uint64_t* barrier) {
    constexpr int kVector = 4;
    const uint32_t ready = ToRank(barrier), first = ToRank(&to[0][at]);
#pragma unroll 1
    for (int j = half_lane * kVector; j < count; j += kRanks * kVector) {
#pragma unroll 2
      for (int column = 0; column < 2 * B; ++column) {
        const uint2 v = *reinterpret_cast<const uint2*>(&shared.outgoing[column][j]);
        Send(first + (column * Stride + j) * 2, ready, v.x, v.y);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ int StreamRow() const { return rank * stream_rows + 2 * lane; }
  __device__ __forceinline__ bool HasStream() const {
    return stream_b < B && 2 * lane < stream_rows;
  }

  // Asks for the norm's weights of these rows, for the next Hop. Each half of a layer asks for its
  // norm first and then, between its product and its hop, for what the next layer needs besides, so
  // that whoever waits for either leaves out what is not due yet.
  __device__ __forceinline__ void FetchNorm(const float* norm) const {
    if (HasStream())
      FetchAsync<8>(&shared.norm[kStepWarps - 1 - warp][2 * lane], norm + StreamRow());
    CommitFetches();
  }

  // These rows, scaled by the norm's weight, to this warp's ranks; with them parts of the sum of
  // their squares. No warp waits for another.
  __device__ __forceinline__ void SendStream() const {
    constexpr int kTo = kRanks / kStreamWarps<B>, kParts = kStreamSquares;
    const int first_rank = stream_part * kTo;
    float square = fmaf(hidden.x, hidden.x, __fmul_rn(hidden.y, hidden.y));
#pragma unroll
    for (int offset = kWarp / 2; offset >= kParts; offset /= 2)
      square += __shfl_xor_sync(kFullMask, square, offset);
    AwaitFetches();
    SplitPair v{};
    if (HasStream()) {
      const float2 norm =
          *reinterpret_cast<const float2*>(&shared.norm[kStepWarps - 1 - warp][2 * lane]);
      const float offset = a.shape.norm_offset;
      v = SplitTwo(__fmul_rn(hidden.x, norm.x + offset), __fmul_rn(hidden.y, norm.y + offset));
    }
    __syncwarp();
    // A half warp has a rank's 16 vectors, eight of each column.
    const int column = lane / 8 % 2, at = lane % 8 * 8;
    uint32_t words_of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t high = __shfl_sync(kFullMask, v.high, lane % 8 * 4 + i),
                     low = __shfl_sync(kFullMask, v.low, lane % 8 * 4 + i);
      words_of[i] = column == 0 ? high : low;
    }
    if (at < stream_rows) {
      const bf16* to = &shared.stream[2 * stream_b + column][rank * stream_rows + at];
#pragma unroll
      for (int i = 0; i < kTo; i += 2) {
        const int to_which = first_rank + i + lane / kRanks;
        Send(Mapped(to, to_which), Mapped(&shared.stream_ready, to_which),
             make_uint4(words_of[0], words_of[1], words_of[2], words_of[3]));
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < kTo * kParts; i += kWarp) {
      const int to_which = first_rank + i / kParts;
      Send(Mapped(&shared.squares[stream_b][rank][lane % kParts], to_which),
           Mapped(&shared.stream_ready, to_which), __float_as_uint(square));
    }
  }

  __device__ __forceinline__ void Embed() {
    if (HasStream()) {
      const bf16* from = a.embedding.At(max(a.token_ids[stream_b], 0)) + StreamRow();
      hidden = make_float2(ToFloat(from[0]), ToFloat(from[1]));
    }
    __syncwarp();
    if (stream_b < B) SendStream();
  }

  // Where the partial sums of a row of the stream are added up, in two buffers by turns.
  __device__ __forceinline__ unsigned long long* Word(int b, int row) const {
    const int index = (hop % 2 * kMaxStepRows + b) * a.shape.hidden + row;
    return words + index;
  }

  // Adds this warp's sums of a tile of the output to those of all clusters, in place of what it
  // added to the same buffer the last time.
  __device__ __forceinline__ void Publish(const float2 (&sums)[kSliceSums<B>]) {
    const int row = quarter * kTile + lane / 4;
    if (row_of_x < B && row < stream_rows) {
      unsigned long long* to = Word(row_of_x, rank * stream_rows + row);
      unsigned long long first = kSliceSums<B>, second = kSliceSums<B>;
#pragma unroll
      for (int i = 0; i < kSliceSums<B>; ++i) {
        const int of_warp = kTakeTurns<B> ? warp : i * kGroupWarps + quarter;
        float2& before = shared.published[hop % 2][(of_warp * 8 + lane / 4) * B + row_of_x];
        const float2 old = before;
        first += Contribution(sums[i].x) - Contribution(old.x);
        second += Contribution(sums[i].y) - Contribution(old.y);
        before = sums[i];
      }
      AddToWord(to, first);
      if (row + 8 < stream_rows) AddToWord(to + 8, second);
    }
    __syncwarp();
  }

  // Adds what all clusters have made to this rank's rows of the stream and passes it on.
  __device__ __forceinline__ void Hop() {
    if (stream_b < B) {
      const auto added = static_cast<unsigned>(kGroups * a.shape.clusters * (hop / 2 + 1));
      unsigned long long first = 0, second = 0;
      if (HasStream()) {
        const unsigned long long* from = Word(stream_b, StreamRow());
        Patience patience;
        for (ReadWords(first, second, from); !HasAll(first, added) || !HasAll(second, added);
             ReadWords(first, second, from))
          patience.Try();
        hidden.x += SumOf(first, added);
        hidden.y += SumOf(second, added);
      }
      __syncwarp();
      SendStream();
    }
    ++hop;
  }

  __device__ __forceinline__ void AwaitStream() {
    Await(&shared.stream_ready, stream_parity,
          B * (a.shape.hidden * 4 + kRanks * kStreamSquares * 4));
  }

  // Leaves a tile's sums of this lane among the parts.
  __device__ __forceinline__ void PutParts(float* parts, int row, float2 sums) const {
    if (row_of_x >= B) return;
    float* to = parts + quarter * StepShared<B>::kPartStride + (row + lane / 4) * B + row_of_x;
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
    constexpr int kEach = kRanks * kStreamSquares / kWarp;  // a lane's
    float squares[kEach], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares[i] = (&shared.squares[b][0][0])[i * kWarp + lane];
#pragma unroll
    for (int i = 0; i < kEach; i += 2) sum += squares[i] + squares[i + 1];
    sum = WarpSum(sum);
    if (lane == 0) shared.norm_factor[b] = rsqrtf(fmaf(sum, per_hidden, a.shape.norm_eps));
  }

  // `rows` rows of weights, tile by tile from the ring in boxes of 2^`box_shift` rows, times the
  // stream. before() runs once the stream is in registers; finish(parts, first, count) every
  // `at_once` tiles, when their parts are there. With less than kTilesAtOnce the parts alternate;
  // otherwise finish must have a barrier after it has read them.
  template <typename Before, typename Finish>
  __device__ __forceinline__ void MultiplyStream(int rows, int at_once, int box_shift,
                                                 Before before, Finish finish) {
    constexpr int kColumns = SlotColumns(B), kSlots = kMaxStepHidden / kBoxK / kColumns;
    constexpr int kBlocks = kBlocksOfWarp / kSlots;  // of a slot
    const int box_rows = 1 << box_shift;
    // Past the end a warp has its last block once more, times zero: without branches between them
    // the loads of all blocks run side by side.
    Columns x[kBlocksOfWarp];
    int offset[kBlocksOfWarp];
#pragma unroll
    for (int i = 0; i < kBlocksOfWarp; ++i) {
      const int block = quarter + i * kGroupWarps, last = k_blocks - 1;
      LoadColumns<B>(x[i], shared.stream[0], kMaxStepHidden + 8, first_column,
                     min(block, last) * kBoxK);
      if (block > last) Clear(x[i]);
      offset[i] = (min(block, last) - i / kBlocks * kColumns) * box_rows * kBoxK * 2;
    }
    NormFactors();
    before();
    const int row = lane % kTile;
    int at[kSlots];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const int bytes = min(k_blocks - i * kColumns, kColumns) * box_rows * kBoxK * 2;
      at[i] = BoxOffset(row >> box_shift, box_rows, bytes) + (row & (box_rows - 1)) * kBoxK * 2;
    }
#pragma unroll 1
    for (int first = 0; first < rows; first += at_once * kTile) {
      float* parts = shared.parts + first % (kTilesAtOnce * kTile) * B;
      const int count = min(rows - first, at_once * kTile), tiles = CeilDiv(count, kTile);
      ForOwnTiles(tiles, [&](int tile) {
        Sums c = {};
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          if (s > 0 && s * kColumns >= k_blocks) continue;
          const char* weights = AwaitSlot();
#pragma unroll
          for (int i = s * kBlocks; i < (s + 1) * kBlocks; ++i) {
            Weights64 w;
            LoadTile(w, weights + at[s] + offset[i]);
            MultiplyTile(c, w, x[i]);
          }
          if constexpr (!kTakeTurns<B>) {
            ReleaseSlot(slot, 1);
            SkipSlots(1);
          }
        }
        PutParts(parts, tile * kTile, Total(c));
      });
      Sync();
      finish(parts, first, count);
    }
  }

  // This rank's rows of the output matrix times the cluster's slice of `slice_blocks` * 64 columns,
  // pairs of blocks by turns for either of two sums; the sums go to every cluster. Where `scaled`,
  // scale(b, block) weighs row b's part of Run blocks, from a multiple of Run on.
  template <int Run, typename Scale>
  __device__ __forceinline__ void MultiplySlice(int slice_blocks, bool scaled, Scale scale) {
    constexpr int kPair = 2, kPairs = SlotBlocks(B) / kPair;  // of a slot
    static_assert(Run <= kPair && kPairs * kSliceSums<B> == kGroups);
    const int row = quarter * kTile + lane % kTile;
    float2 sums[kSliceSums<B>] = {};
    Sums c[kSliceSums<B>] = {};
#pragma unroll 1
    for (int begin = 0; begin < slice_blocks; begin += kGroups * kPair) {
#pragma unroll
      for (int s = 0; s < kSliceSums<B>; ++s) {
        if (s > 0 && begin + s * kPair >= slice_blocks) continue;
        const char* weights = AwaitSlot();
        const int slot_begin = begin + s * kPair;
#pragma unroll
        for (int i = 0; i < kPair; i += Run) {
          const int first = (kTakeTurns<B> ? group * kPair : 0) + i;  // of the slot
          if (slot_begin + first >= slice_blocks || quarter * kTile >= stream_rows) continue;
#pragma unroll
          for (int j = first; j < first + Run; ++j) {
            // Past the end the last block once more, times zero.
            const int block = min(slot_begin + j, slice_blocks - 1);
            Columns x;
            Weights64 w;
            LoadColumns<B>(x, shared.slice[0], kMaxSliceK + 8, first_column, block * kBoxK);
            if (block != slot_begin + j) Clear(x);
            LoadTile(w, weights + ((block - slot_begin) * stream_rows + row) * 128);
            MultiplyTile(c[s], w, x);
          }
          if (!scaled) continue;
          const float2 v = Total(c[s]);
          const float factor = scale(min(row_of_x, B - 1), slot_begin + first);
          sums[s].x = fmaf(factor, v.x, sums[s].x);
          sums[s].y = fmaf(factor, v.y, sums[s].y);
#pragma unroll
          for (auto& of_chain : c[s]) {
#pragma unroll
            for (float& v_of : of_chain) v_of = 0.0f;
          }
        }
        ReleaseSlot(slot, 1);
        SkipSlots(1);
      }
    }
    if (!scaled) {
#pragma unroll
      for (int s = 0; s < kSliceSums<B>; ++s) sums[s] = Total(c[s]);
    }
    Publish(sums);
  }
  // When a cluster has no part in a half of a layer. Its ranks wait for one another, as the
  // exchange inside a half makes the others wait: a rank that ran ahead would count into its
  // neighbours' current phase of the stream. And its warps, most of which have nothing to publish
  // where there are few rows: one that stayed behind would miss a phase.
  __device__ __forceinline__ void PublishNothing() {
    Sync();
    if (threadIdx.x < kRanks) Send(ToLane(&shared.token[rank]), ToLane(&shared.slice_ready), 0u);
    Await(&shared.slice_ready, slice_parity, kRanks * 4);
    const float2 nothing[kSliceSums<B>] = {};
    Publish(nothing);
  }
};

}  // namespace qwend::cuda
