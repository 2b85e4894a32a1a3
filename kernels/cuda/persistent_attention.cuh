// The persistent step's attention layers: projection, head norms, rotation, cache write and
// attention, in one cluster from its query heads' projections to their part of the output. A
// cluster's query heads share one key-value head, whose keys and values every cluster that needs
// them projects for itself. Each rank attends to its part of the sequence (persistent_scores.cuh);
// then each merges its part of the dimensions.
#pragma once

#include "kernels/cuda/persistent_scores.cuh"

namespace qwend::cuda {

template <int B, int D>
struct AttentionMixer {
  StepBlock<B>& block;
  const ClusterShare& share;
  const StepShape& shape = block.a.shape;
  StepShared<B>& shared = block.shared;

  static constexpr int kRows = D / kRanks;  // of a head, this rank's
  static constexpr int kHeads = kMaxPassHeads;
  const int query_rows = (shape.gated ? 2 : 1) * kRows;  // of a head: its queries, then their gates
  const int rows = share.heads == 0 ? 0 : share.heads * query_rows + 2 * kRows;
  const int kv_head = share.first_head / shape.group;
  using Tiles = TileAttention<B, D>;
  using Query = typename Tiles::Query;
  static constexpr int kTilesOfSlot = kSlotPositions<B, D> / kTile;

  __device__ __forceinline__ SequencePart Part(int b) const { return shared.part[b]; }

  // The bias of a row of this rank's projection.
  __device__ __forceinline__ float BiasOf(const StepLayer& layer, int row) const {
    const int mine = block.rank * kRows, head = row / query_rows;
    if (head < share.heads)
      return layer.q_bias[(share.first_head + head) * D + mine + row - head * query_rows];
    const int i = row - share.heads * query_rows;
    return (i < kRows ? layer.k_bias : layer.v_bias)[kv_head * D + mine + i % kRows];
  }

  // Of this rank's part of row b's sequence, what is in the pages.
  __device__ __forceinline__ int CachedTiles(int b) const {
    return CeilDiv(CachedPositions(shared, b), kTile);
  }
  // Tile `tile` of them, in this slot.
  __device__ __forceinline__ TilePlace CachedTile(int b, int tile) const {
    const uint32_t keys = SharedAddress(block.ring) + block.slot * SlotStride(B) +
                          tile % kTilesOfSlot * kTile * D * 2;
    return {keys, keys + SlotBytes(B) / 2, Part(b).begin + tile * kTile,
            min(CachedPositions(shared, b) - tile * kTile, kTile)};
  }
  // The newest position, which is not in the pages yet.
  __device__ __forceinline__ TilePlace NewestTile(int b) const {
    const uint32_t keys = SharedAddress(shared.mixer[b] + share.heads * D);
    return {keys, keys + D * 4, shared.position[b], 1};
  }

  // The largest scores and sums of a rank's heads, of a lane each, to a rank.
  __device__ __forceinline__ void SendSoftmax(int b, int head, int rank, float largest,
                                              float sum) const {
    Send(Mapped(&shared.attention.softmax[b][head][block.rank], rank),
         Mapped(&shared.ready[kMergeReady], rank), __float_as_uint(largest), __float_as_uint(sum));
  }
  __device__ __forceinline__ void SendAttended(int b, int head, int dim, float value) const {
    const int rank = dim / kRows;
    Send(Mapped(&shared.attended[b][head][block.rank][dim % kRows], rank),
         Mapped(&shared.ready[kMergeReady], rank), __float_as_uint(value));
  }

  // Several rows, a team of warps each; a slot's tiles two by two, where there are registers for
  // it.
  static constexpr int kTeamWarps = cuda::kTeamWarps<B, D>, kTeams = cuda::kTeams<B, D>;
  static constexpr int kRowParts = Tiles::kSteps / kTeamWarps;
  static constexpr int kTilesTogether = D <= 128 && kTilesOfSlot % 2 == 0 ? 2 : 1;
  static_assert(kTeamWarps == 1 || kRowParts % 4 == 0);
  uint32_t slots_before = 0;  // of keys and values, in earlier layers of this step

  // Where a wave of rows has its slots among those of the layer.
  struct Wave {
    int first_slot;
    int slots;  // of a lane's row
    int at;     // where block.slot is among those of the layer
  };

  // This rank's part of each sequence, its tiles in order and the newest position last. A team has
  // no part in others' slots.
  __device__ __forceinline__ void AttendToRows() {
    Wave wave{};
#pragma unroll 1
    for (int first = 0; first < B; first += kTeams) {
      const int own = first + block.lane, b = first + block.warp / kTeamWarps;
      wave.slots = own < min(first + kTeams, B) ? CachedSlots<B, D>(shared, own) : 0;
      if (b < B) AttendToRow(b, b - first, wave);
      wave.first_slot += __reduce_add_sync(kFullMask, wave.slots);
    }
    block.PassSlots(wave.first_slot - wave.at);
    slots_before += wave.first_slot;
  }

  // Goes to slot `place` of the team's row and waits for it; until it has been asked for, its
  // barrier may be any number of turns behind.
  __device__ __forceinline__ void AwaitRowSlot(int team, int place, Wave& wave) {
    const int before = min(wave.slots, place) + (block.lane < team && wave.slots > place ? 1 : 0);
    const int to = wave.first_slot + __reduce_add_sync(kFullMask, before);
    block.PassSlots(to - wave.at);
    wave.at = to;
    Patience patience;
    while (static_cast<int>(ReadCount(&shared.slots_asked) - slots_before) <= to) patience.Try();
    block.AwaitSlot();
  }

  __device__ __forceinline__ void AttendToRow(int b, int team, Wave& wave) {
    const int cached = CachedTiles(b), tiles = cached + (Part(b).owner == block.rank ? 1 : 0);
    const int first_part = block.warp % kTeamWarps * kRowParts;
    Query q;
    Tiles::LoadQuery(q, shared, b, share.heads);
    float largest = -INFINITY, sum = 0.0f, values[kRowParts][2] = {};
#pragma unroll 1
    for (int i = 0; i < tiles; i += kTilesTogether) {
      if (i < cached && i % kTilesOfSlot == 0) AwaitRowSlot(team, i / kTilesOfSlot, wave);
      TilePlace places[kTilesTogether];
#pragma unroll
      for (int n = 0; n < kTilesTogether; ++n) {
        if (i + n < cached) {
          places[n] = CachedTile(b, i + n);
        } else if (i + n < tiles) {
          places[n] = NewestTile(b);
        } else {
          places[n] = places[0];
          places[n].count = 0;
          continue;
        }
        places[n].values += first_part / 4 * 128;
      }
      FoldFactors factors[kTilesTogether];
      Tiles::template Attend<kRowParts>(
          places, q,
          [&](int n, float of_tile, float sum_of_tile) {
            factors[n] = FoldFactors(largest, of_tile);
            sum = factors[n].Fold(sum, sum_of_tile);
          },
          [&](int n, int s, float first, float second) {
            values[s][0] = factors[n].Fold(values[s][0], first);
            values[s][1] = factors[n].Fold(values[s][1], second);
          });
      const int next = i + kTilesTogether;
      if (i < cached && (next >= cached || next % kTilesOfSlot == 0))
        block.ReleaseSlot(block.slot, kTeams);
    }
    const int head = block.lane % kHeads;
    if (head < share.heads) {
#pragma unroll
      for (int s = 0; s < kRowParts; ++s)
        SendAttended(b, head, first_part * 16 + Tiles::OwnDimension(s),
                     Tiles::Own(values[s][0], values[s][1]));
      if (first_part == 0) SendSoftmax(b, head, block.lane / kHeads, largest, sum);
    }
    __syncwarp();
  }

  // One row by all warps, a tile each, round after round; then every thread folds a dimension of a
  // head, or of both, tile after tile. What a warp makes of a tile takes the place of its keys; of
  // the newest position it has a place of its own.
  static constexpr int kHeadValues = D + kTile;                     // either head in other banks
  static constexpr int kFolds = CeilDiv(kHeads * D, kStepThreads);  // of a thread
  static constexpr int kSlotsOfRound = kStepWarps / kTilesOfSlot;
  static_assert(kStepWarps % kTilesOfSlot == 0 && kHeads * kHeadValues * 4 <= kTile * D * 2);
  static_assert(B > 1 || kRingSlots<B> > kSlotsOfRound);
  struct Folded {
    float largest = -INFINITY, sum = 0.0f, value = 0.0f;
    __device__ __forceinline__ void Fold(float2 softmax, float v) {
      const FoldFactors factors(largest, softmax.x);
      sum = factors.Fold(sum, softmax.y);
      value = factors.Fold(value, v);
    }
  };
  // Tile `i` of a round, in slots from `slot` on.
  __device__ __forceinline__ float* TileValues(int slot, int i) const {
    const int its = (slot + i / kTilesOfSlot) % kRingSlots<B>;
    return reinterpret_cast<float*>(block.ring + its * SlotStride(B) +
                                    i % kTilesOfSlot * kTile * D * 2);
  }
  __device__ __forceinline__ void AttendTogether() const {
    const int cached = CachedTiles(0), warp = block.warp, dim = threadIdx.x % D;
    const bool owner = Part(0).owner == block.rank;
    Folded folded[kFolds];
    int held = 0, held_count = 0;
    block.Sync();  // heads are ready
    Query q;
    Tiles::LoadQuery(q, shared, 0, share.heads);
    // The newest position, by the last warp, before the first round.
#pragma unroll 1
    for (int first = owner && warp == kStepWarps - 1 ? -kStepWarps : 0; first < cached;
         first += kStepWarps) {
      const bool newest = first < 0;
      const int tiles = newest ? 0 : min(cached - first, kStepWarps);
      const int slots = CeilDiv(tiles, kTilesOfSlot), own_slot = min(warp / kTilesOfSlot, slots);
      const int first_slot = block.slot;
      float2(&softmax)[kStepWarps][kHeads] =
          shared.attention.tile_softmax[newest ? 2 : first / kStepWarps % 2];
      block.SkipSlots(own_slot);
      if (newest || warp < tiles) {
        if (!newest) block.AwaitSlot();
        float* const values = (newest ? shared.newest_values : TileValues(first_slot, warp)) +
                              block.lane % kHeads * kHeadValues;
        const TilePlace places[1] = {newest ? NewestTile(0) : CachedTile(0, first + warp)};
        Tiles::template Attend<Tiles::kSteps>(
            places, q,
            [&](int, float largest, float sum) {
              __syncwarp();  // all lanes have read the keys, whose place the values take
              if (block.lane < kHeads) softmax[warp][block.lane] = make_float2(largest, sum);
            },
            [&](int, int s, float one, float other) {
              values[Tiles::OwnDimension(s)] = Tiles::Own(one, other);
            });
      }
      block.SkipSlots(slots - own_slot);
      if (newest) continue;
      block.Sync();
#pragma unroll 1
      for (int slot = 0; slot < slots; ++slot) {
        const float* const values_of = TileValues(first_slot, slot * kTilesOfSlot) + dim;
        const int there = tiles - slot * kTilesOfSlot;
        float2 softmax_of[kFolds][kTilesOfSlot];
        float values[kFolds][kTilesOfSlot];
#pragma unroll
        for (int j = 0; j < kTilesOfSlot; ++j) {
          const float* const from = values_of + j * (kTile * D / 2);
#pragma unroll
          for (int f = 0; f < kFolds; ++f) {
            const int head = min(HeadOf(f), kHeads - 1);
            softmax_of[f][j] =
                j < there ? softmax[slot * kTilesOfSlot + j][head] : make_float2(-INFINITY, 0.0f);
            values[f][j] = j < there ? from[head * kHeadValues] : 0.0f;
          }
        }
#pragma unroll
        for (int f = 0; f < kFolds; ++f) {
#pragma unroll
          for (int j = 0; j < kTilesOfSlot; ++j) folded[f].Fold(softmax_of[f][j], values[f][j]);
        }
      }
      held = first_slot;
      held_count = slots;
      if (first + kStepWarps < cached) GiveBack(held, held_count);
    }
    if (cached == 0) block.Sync();
#pragma unroll
    for (int f = 0; f < kFolds; ++f) {
      const int head = HeadOf(f);
      if (head >= share.heads) continue;
      if (owner)
        folded[f].Fold(shared.attention.tile_softmax[2][kStepWarps - 1][head],
                       shared.newest_values[head * kHeadValues + dim]);
      SendAttended(0, head, dim, folded[f].value);
      if (dim < kRanks) SendSoftmax(0, head, dim, folded[f].largest, folded[f].sum);
    }
    GiveBack(held, held_count);
  }
  // Slots that have been written to.
  __device__ __forceinline__ void GiveBack(int first, int count) const {
    FenceForCopies();
#pragma unroll 1
    for (int i = 0; i < count; ++i) block.ReleaseSlot((first + i) % kRingSlots<B>, 1);
    __syncwarp();
  }
  // The head whose dimension threadIdx.x % D this thread folds.
  __device__ __forceinline__ static int HeadOf(int fold) {
    return (static_cast<int>(threadIdx.x) + fold * kStepThreads) / D;
  }

  // This rank's dimensions of every head, gated, to every rank. A warp has a row of x.
  __device__ __forceinline__ void Merge() {
    constexpr int kVector = kRows < 8 ? kRows : 8;
    const int head = block.lane / kRows, i = block.lane % kRows, column = block.lane / kRanks;
    const uint32_t ready = block.ToLane(&shared.ready[kSliceReady]);
#pragma unroll 1
    for (int b = block.warp; b < B; b += kStepWarps) {
      // Every lane for itself: it needs the weights of all ranks.
      float x = 0.0f;
      if (head < share.heads) {
        const auto* parts = reinterpret_cast<const float4*>(shared.attention.softmax[b][head]);
        float largest[kRanks], sums[kRanks];
#pragma unroll
        for (int r = 0; r < kRanks; r += 2) {
          const float4 two = parts[r / 2];
          largest[r] = two.x;
          sums[r] = two.y;
          largest[r + 1] = two.z;
          sums[r + 1] = two.w;
        }
        float most = largest[0];
#pragma unroll
        for (int r = 1; r < kRanks; ++r) most = fmaxf(most, largest[r]);
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          const float factor = Exp2(largest[r] - most);
          sum = fmaf(factor, sums[r], sum);
          x = fmaf(factor, shared.attended[b][head][r][i], x);
        }
        x = __fmul_rn(x, Reciprocal(sum));
        if (shape.gated)
          x = __fmul_rn(x, QuickSigmoid(shared.kept[b][head * query_rows + kRows + i]));
      }
      __syncwarp();  // what goes out takes the gates' place
      if (head < share.heads) {
        const Halves v(x);
        shared.outgoing[2 * b][block.lane] = v.high;
        shared.outgoing[2 * b + 1][block.lane] = v.low;
      }
      __syncwarp();
#pragma unroll 1
      for (int j = 0; j < share.heads * kRows; j += kVector) {
        const bf16* from = &shared.outgoing[2 * b + column][j];
        const uint32_t to = block.ToLane(
            &shared.slice[2 * b + column][j / kRows * D + block.rank * kRows + j % kRows]);
        if constexpr (kVector == 8) {
          Send(to, ready, *reinterpret_cast<const uint4*>(from));
        } else {
          const uint2 v = *reinterpret_cast<const uint2*>(from);
          Send(to, ready, v.x, v.y);
        }
      }
    }
  }

  // Asks for the heads' norms.
  __device__ __forceinline__ void Fetch(const StepLayer& layer) const {
    if (share.heads == 0 || !shape.head_norms || threadIdx.x >= 2 * D / 4) return;
    const int norm = threadIdx.x / (D / 4), at = threadIdx.x % (D / 4) * 4;
    FetchAsync<16>(&shared.attention.norms[norm][at],
                   (norm == 0 ? layer.q_norm : layer.k_norm) + at);
  }

  // Queries to every rank, keys and values to the rank that has the newest position; gates stay.
  __device__ __forceinline__ void TakeProducts(const StepLayer& layer, const float* parts,
                                               int count) const {
    const int b = threadIdx.x % B;
    const float factor = shared.norm_factor[b];
#pragma unroll 1
    for (int i = threadIdx.x; i < count * B; i += kStepThreads) {
      float v = __fmul_rn(block.SumParts(parts, i), factor);
      if (layer.q_bias != nullptr) v += BiasOf(layer, i / B);
      shared.kept[b][i / B] = v;
    }
    AwaitFetches();
    block.Sync();
    SendHeads();
  }

  // This rank's part of the queries to every rank, of key and value to the rank that has the newest
  // position.
  __device__ __forceinline__ void SendHeads() const {
    constexpr int kVectors = kRows / 4, kAtOnce = kRanks / B;  // of a row
    const int b = block.half_lane % B, first_vector = block.half_lane / B;
    const bool owner = Part(b).owner == block.half_warp;
    const uint32_t ready = block.ToRank(&shared.ready[kMixerReady]);
    const float* kept = &shared.kept[b][first_vector % kVectors * 4];
    const uint32_t to =
        block.ToRank(&shared.mixer[b][block.rank * kRows + first_vector % kVectors * 4]);
    static_assert(kAtOnce % kVectors == 0 || kVectors % kAtOnce == 0);
    const int vectors = (share.heads + (owner ? 2 : 0)) * kVectors;
#pragma unroll 1
    for (int i = first_vector; i < vectors; i += kAtOnce) {
      const int head = i / kVectors, at = (i - first_vector) % kVectors * 4;
      const int from = min(head, share.heads) * query_rows + max(head - share.heads, 0) * kRows;
      Send(to + (head * D + at) * 4, ready, *reinterpret_cast<const uint4*>(kept + from + at));
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Mix(const StepLayer& layer) {
    if (share.heads == 0) return;
    int bytes = B * share.heads * D * 4;
#pragma unroll
    for (int b = 0; b < B; ++b) bytes += Part(b).owner == block.rank ? 2 * D * 4 : 0;
    block.Await(kMixerReady, bytes);
    HeadPreparer<B, D>{block, share}.Prepare(layer);
    if constexpr (B == 1) {
      AttendTogether();
    } else {
      block.Sync();
      AttendToRows();
    }
    block.Await(kMergeReady, B * share.heads * (D * 4 + kRanks * 8));
    Merge();
    // What neighbours have sent has been read, and parts may take its place: the slice's arrival
    // says so, but not to racecheck.
    if (kArrivers > 1) block.Sync();
    block.Await(kSliceReady, B * share.heads * D * 4);
  }
};

}  // namespace qwend::cuda
