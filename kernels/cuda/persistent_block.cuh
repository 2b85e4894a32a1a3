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
  using Ring::AwaitSlot, Ring::ReleaseSlot, Ring::SkipSlots, Ring::StepBack;
  using Ring::shared, Ring::lane, Ring::warp, Ring::group, Ring::quarter, Ring::slot;
  const StepArguments& a;
  // A half warp sends to one rank, neighbouring bytes by neighbouring lanes: the network between
  // the blocks takes whole lines as fast as parts of them.
  const int half_lane = threadIdx.x % kRanks, half_warp = threadIdx.x / kRanks;
  // Its columns of a product, and the row of x whose sums this lane has of it.
  const int first_column = kTakeTurns<B> ? 0 : group * 2 * kGroupRows;
  const int row_of_x = first_column / 2 + lane % 4;
  const int rank, cluster;
  const int stream_rows, k_blocks;  // rows of the residual stream that are this rank's; hidden / 64

  uint32_t phases = 0;  // of each signal's barrier, a bit
  int at_half = -1;     // of all layers' halves
  unsigned long long* words;
  // The last warps have this rank's rows of the stream, two each lane: kStreamWarps those of row
  // `stream_b` of x, a part each, which they pass on to all ranks.
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
  __device__ __forceinline__ uint32_t ToRank(const void* p) const { return Mapped(p, half_warp); }
  __device__ __forceinline__ uint32_t ToLane(const void* p) const { return Mapped(p, half_lane); }

  // One thread says how many bytes the cluster will send; all wait for them.
  __device__ __forceinline__ void Await(Signal signal, int bytes) {
    if (threadIdx.x == 0) ArriveExpecting(&shared.ready[signal], bytes);
    WaitForCluster(&shared.ready[signal], phases >> signal & 1);
    phases ^= 1 << signal;
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

  // Among this rank's, this lane's first; and in the stream.
  __device__ __forceinline__ int OwnRow() const { return stream_part * kStreamRows<B> + 2 * lane; }
  __device__ __forceinline__ int StreamRow() const { return rank * stream_rows + OwnRow(); }
  __device__ __forceinline__ bool HasStream() const {
    return stream_b < B && 2 * lane < kStreamRows<B> && OwnRow() < stream_rows;
  }

  // Asks for the norm's weights of these rows, for the next Hop. Each half of a layer asks for its
  // norm first and then, between its product and its hop, for what the next layer needs besides, so
  // that whoever waits for either leaves out what is not due yet.
  __device__ __forceinline__ void FetchNorm(const float* norm) const {
    if (HasStream())
      FetchAsync<8>(&shared.norm[kStepWarps - 1 - warp][2 * lane], norm + StreamRow());
    CommitFetches();
  }

  // These rows, scaled by the norm's weight, to every rank; with them parts of the sum of their
  // squares. No warp waits for another.
  __device__ __forceinline__ void SendStream() const {
    __syncwarp();
    if (stream_b >= B) return;
    constexpr int kPartLanes = kSquareRows / 2;
    float square = fmaf(hidden.x, hidden.x, __fmul_rn(hidden.y, hidden.y));
#pragma unroll
    for (int offset = kPartLanes / 2; offset > 0; offset /= 2)
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
    // Neighbouring lanes have the 16-byte vectors of a rank, those of the high halves first.
    constexpr int kVectors = kStreamRows<B> / 8, kOfRank = 2 * kVectors;
    const int vector = lane % kVectors, column = lane / kVectors % 2;
    uint32_t words_of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t high = __shfl_sync(kFullMask, v.high, vector * 4 + i),
                     low = __shfl_sync(kFullMask, v.low, vector * 4 + i);
      words_of[i] = column == 0 ? high : low;
    }
    const int at = stream_part * kStreamRows<B> + vector * 8;
    if (at < stream_rows) {
      const bf16* to = &shared.stream[2 * stream_b + column][rank * stream_rows + at];
#pragma unroll
      for (int first = 0; first < kRanks; first += kWarp / kOfRank) {
        const int to_which = first + lane / kOfRank;
        Send(Mapped(to, to_which), Mapped(&shared.ready[kStreamReady], to_which),
             make_uint4(words_of[0], words_of[1], words_of[2], words_of[3]));
      }
    }
    __syncwarp();
    constexpr int kParts = kStreamRows<B> / kSquareRows;  // of this warp
#pragma unroll
    for (int first = 0; first < kParts; first += kWarp / kRanks) {
      const int part = first + lane / kRanks, to_which = half_lane;
      const float of_part = __shfl_sync(kFullMask, square, part % kParts * kPartLanes);
      if (part < kParts)
        Send(Mapped(&shared.squares[stream_b][rank][stream_part * kParts + part], to_which),
             Mapped(&shared.ready[kStreamReady], to_which), __float_as_uint(of_part));
    }
  }

  // Where the partial sums of a row of the stream are added up, in two buffers by turns.
  __device__ __forceinline__ unsigned long long* Word(int b, int row) const {
    const int index = (at_half % 2 * kMaxStepRows + b) * a.shape.hidden + row;
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
        float2& before = shared.published[at_half % 2][(of_warp * 8 + lane / 4) * B + row_of_x];
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

  // The token's embedding.
  __device__ __forceinline__ void Embed() {
    if (!HasStream()) return;
    const bf16* from = a.embedding.At(max(a.token_ids[stream_b], 0)) + StreamRow();
    hidden = make_float2(ToFloat(from[0]), ToFloat(from[1]));
  }
  // Goes on to the next half: adds what all clusters have made in the one before to this rank's
  // rows of the stream, which begins as the token's embedding, and passes them on. take() takes the
  // first weights: while the words are asked for the first time, where all warps have a part of the
  // stream; behind it where some have none.
  template <typename Take>
  __device__ __forceinline__ void Hop(Take take) {
    const bool has = HasStream();
    const unsigned long long* from = Word(stream_b, StreamRow());
    unsigned long long first = 0, second = 0;
    if (has && at_half >= 0) ReadWords(first, second, from);
    if constexpr (B > 1) take();
    if (at_half < 0) {
      Embed();
    } else if (has) {
      const auto added = static_cast<unsigned>(kGroups * a.shape.clusters * (at_half / 2 + 1));
      Patience patience;
      for (; !HasAll(first, added) || !HasAll(second, added); ReadWords(first, second, from))
        patience.Try();
      hidden.x += SumOf(first, added);
      hidden.y += SumOf(second, added);
    }
    SendStream();
    if constexpr (B == 1) take();
    ++at_half;
  }

  __device__ __forceinline__ void AwaitStream() {
    Await(kStreamReady, B * (a.shape.hidden * 4 + kRanks * kStreamSquares * 4));
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
    const int b = warp;
    if (b >= B) return;
    constexpr int kEach = kRanks * kStreamSquares / kWarp;  // a lane's
    float squares[kEach], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) squares[i] = (&shared.squares[b][0][0])[i * kWarp + lane];
#pragma unroll
    for (int i = 0; i < kEach; i += 2) sum += squares[i] + squares[i + 1];
    sum = WarpSum(sum);
    if (lane == 0) shared.norm_factor[b] = rsqrtf(fmaf(sum, a.shape.per_hidden, a.shape.norm_eps));
  }

  // Rows of weights to be multiplied with the stream, tile by tile from the ring. This warp's part
  // of a tile is in registers before its turn, so that much more is on its way while the stream is.
  struct StreamProduct {
    int rows, tile;                  // the next tile of this warp that is not in registers yet
    uint32_t at[kBlocksOfWarp / 2];  // of a slot, where this lane's row of each of its blocks of K
                                     // is, two of them in one
    Weights64 weights[kBlocksOfWarp] = {};
  };
  static_assert(SlotStride(B) <= 1 << 16);
  static constexpr int kColumns = SlotColumns(B), kSlots = kMaxStepHidden / kBoxK / kColumns;
  static constexpr int kSlotBlocks = kBlocksOfWarp / kSlots;  // a warp's, of a slot
  static constexpr int kTurns = kTakeTurns<B> ? kGroups : 1;

  // Begins with the first tile, in boxes of 2^`box_shift` rows, before the stream is there.
  __device__ __forceinline__ void BeginStream(StreamProduct& p, int rows, int box_shift) {
    p.rows = rows;
    p.tile = kTakeTurns<B> ? group : 0;
    const int box_rows = 1 << box_shift, row = lane % kTile;
#pragma unroll
    for (int i = 0; i < kBlocksOfWarp; ++i) {
      // Past the end a warp has its last block once more, times zero.
      const int first = i / kSlotBlocks * kColumns;  // of the slot
      const int bytes = min(k_blocks - first, kColumns) * box_rows * kBoxK * 2;
      const int block = min(quarter + i * kGroupWarps, k_blocks - 1) - first;
      const uint32_t at = BoxOffset(row >> box_shift, box_rows, bytes) +
                          (block * box_rows + (row & (box_rows - 1))) * kBoxK * 2;
      p.at[i / 2] = i % 2 == 0 ? at : p.at[i / 2] | at << 16;
    }
    if (rows > 0) SkipSlots(p.tile);
    TakeTile(p);
  }
  // The weights of the next tile, if there is one.
  __device__ __forceinline__ void TakeTile(StreamProduct& p) {
    const int tiles = CeilDiv(p.rows, kTile);
    if (p.tile >= tiles) return;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      if (s > 0 && s * kColumns >= k_blocks) continue;
      const char* from = AwaitSlot();
#pragma unroll
      for (int i = s * kSlotBlocks; i < (s + 1) * kSlotBlocks; ++i)
        LoadTile(p.weights[i], from + (p.at[i / 2] >> i % 2 * 16 & 0xffff));
      ReleaseSlot(slot, kTurns);
      SkipSlots(kTurns);
    }
    p.tile += kTurns;
    if (p.tile > tiles) StepBack();  // to the first slot of what comes next
  }

  // The product with the stream; finish(parts, first, count) every `at_once` tiles, an even number,
  // when their parts are there. With less than kTilesAtOnce the parts alternate; otherwise whoever
  // reads the last ones must have a barrier after it.
  template <typename Finish>
  __device__ __forceinline__ void MultiplyStream(StreamProduct& p, int at_once, Finish finish) {
    NormFactors();
    // Without branches between them the loads of all blocks run side by side.
    Columns x[kBlocksOfWarp];
#pragma unroll
    for (int i = 0; i < kBlocksOfWarp; ++i) {
      const int block = quarter + i * kGroupWarps, last = k_blocks - 1;
      LoadColumns<B>(x[i], shared.stream[0], kMaxStepHidden + 8, first_column,
                     min(block, last) * kBoxK);
      if (block > last) Clear(x[i]);
    }
#pragma unroll 1
    for (int first = 0; first < p.rows; first += at_once * kTile) {
      float* parts = shared.parts + first % (kTilesAtOnce * kTile) * B;
      const int count = min(p.rows - first, at_once * kTile), tiles = CeilDiv(count, kTile);
#pragma unroll 1
      for (int tile = kTakeTurns<B> ? group : 0; tile < tiles; tile += kTurns) {
        Sums c = {};
#pragma unroll
        for (int i = 0; i < kBlocksOfWarp; ++i) MultiplyTile(c, p.weights[i], x[i]);
        TakeTile(p);
        PutParts(parts, tile * kTile, Total(c));
      }
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
    if (threadIdx.x < kRanks)
      Send(ToLane(&shared.token[rank]), ToLane(&shared.ready[kSliceReady]), 0u);
    Await(kSliceReady, kRanks * 4);
    const float2 nothing[kSliceSums<B>] = {};
    Publish(nothing);
  }
};

}  // namespace qwend::cuda
