// What a block of the persistent step has in shared memory, and the small things that its phases
// have in common.
#pragma once

#include <algorithm>

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/persistent_step.h"

namespace qwend::cuda {

template <int B>
constexpr int kCachedPages = B == 8 ? 16 : 32;    // of a rank's share of a sequence
constexpr int kStepBlock = kStepThreads + kWarp;  // with the copying warp
// Named barriers: of the computing warps, and from them to the copying warp when the step's inputs
// and tables are in shared memory.
constexpr int kConsumerBarrier = 1, kInputsBarrier = 2;
static_assert(kMaxStepHidden / kRanks == 2 * kWarp);  // two rows of the stream for each lane

// Threads of a warp that arrive when the warp is done with a slot. For racecheck every lane does:
// it takes only whoever arrives for done with what it has read, whatever the warp's own barrier.
#ifdef QWEND_RACECHECK
constexpr int kArrivers = kWarp;
#else
constexpr int kArrivers = 1;
#endif

// The computing warps are two groups. Up to four rows of x they take a phase's slots of weights by
// turns, but share those of an output matrix, two blocks each; of eight rows each group has four,
// and both multiply every slot by theirs. Of a slot of whole rows each warp of a group multiplies
// every fourth 64 elements of K, of a slot of an output matrix one tile of 16 rows. Slots of keys
// and values are for all warps where there is one row, otherwise for the row's team.
constexpr int kGroups = 2;
static_assert(kGroups * kMaxClusters <= kMaxAdders);
constexpr int kGroupWarps = kStepWarps / kGroups;
constexpr int kBlocksOfWarp = kMaxStepHidden / kBoxK / kGroupWarps;
constexpr int kTilesAtOnce = 8;  // of a projection, between two barriers
constexpr int kGroupRows = 4;    // of x, whose high and low bf16 halves are a product's columns
template <int B>
constexpr bool kTakeTurns = B <= kGroupRows;
// Sums that a warp makes of an output matrix: its group's, or those of both blocks' pairs.
template <int B>
constexpr int kSliceSums = kTakeTurns<B> ? 1 : kGroups;

// Outputs of a projection that one thread has, all of the same row of x.
template <int B>
constexpr int kItems = CeilDiv(kTilesAtOnce* kTile* B, kStepThreads);

// Warps that pass the stream's rows of one row of x on, and how many of a rank's each at most has.
// The sum of a rank's squares is in parts of kSquareRows.
template <int B>
constexpr int kStreamWarps = std::min(kStepWarps / B, 4);
template <int B>
constexpr int kStreamRows = kMaxStepHidden / kRanks / kStreamWarps<B>;
constexpr int kStreamSquares = 4, kSquareRows = kMaxStepHidden / kRanks / kStreamSquares;

// Outputs of both groups that a block adds to the stream, half of each tile.
template <int B>
constexpr int kPublished = kMaxStepHidden / kRanks / 2 * kGroups* B;

// Slots of the ring: what the activations of B rows leave room for. Slots arrive in any order, and
// a group must know which turn of a barrier it waits for, so no more are on their way than leave
// one to each group that takes turns: the slot whose turn it might mistake has then arrived. A
// team of AttendToRows sees in slots_asked that its slot's turn has come.
template <int B>
constexpr int kRingSlots = B == 1   ? 6
                           : B == 4 ? 4
                                    : 5;
template <int B>
constexpr int kMostInFlight = kRingSlots<B> - (kTakeTurns<B> ? kGroups : 1);

// Linear attention: the convolution's width, and channels of a rank, of each row of x. At most
// three of a head's four vectors go through it.
constexpr int kConvWidth = 4;
constexpr int kMaxRankValues = 8;  // of a value head, a rank's
template <int B>
constexpr int kMaxChannels = kTilesAtOnce* kTile * 3 / 4 * B;

// A rank's columns of a head's recurrent state come through the ring too, those
// of as many rows of x as fit in a slot.
template <int DK, int DV>
constexpr int kStateBytes = DK* DV / kRanks * 4;
template <int B>
__device__ __forceinline__ int RowsOfStates(int heads, int state_bytes) {
  return SlotBytes(B) / (heads * state_bytes);
}

// Which of all slots' heads a cluster's value head is.
__device__ __forceinline__ int StateRow(const StepArguments& a, int slot, const ClusterShare& share,
                                        int head) {
  const StepShape& shape = a.shape;
  return slot * shape.key_heads * shape.heads_per_key + share.first_head * shape.heads_per_key +
         head;
}

// Attention: keys and values come through the ring, so many positions of a head of D in a slot.
template <int B, int D>
constexpr int kSlotPositions = SlotBytes(B) / (4 * D);
// Of several rows a team of warps has one, each warp a part of the values' dimensions. All teams
// together have a wave of rows, one wave after another. The slots of a wave come by turns: every
// row's first, then every row's second, so that all teams have work while a slot is on its way.
template <int B, int D>
constexpr int kTeamWarps = D == 256 || (D == 128 && B < kStepWarps) ? 2 : 1;
template <int B, int D>
constexpr int kTeams = kStepWarps / kTeamWarps<B, D>;

// A rank's part of a sequence, and who has its last position.
struct SequencePart {
  int begin, end, owner;
};
__device__ __forceinline__ SequencePart PartOf(int last, int rank) {
  const int each = CeilDiv(last + 1, kRanks);
  return {rank * each, min((rank + 1) * each, last + 1), last / each};
}

// What a block waits for from its cluster: the stream; what its mixer or MLP has made, the output
// matrix's slice; a mixer's heads; attention's parts.
enum Signal { kStreamReady, kSliceReady, kMixerReady, kMergeReady, kSignals };
constexpr int kGatesPhase = kSignals;  // its bit among the phases

template <int B>
struct StepShared {
  static constexpr int kPartStride = kTilesAtOnce * kTile * B;
  alignas(128) bf16 gate_weights[2 * kMaxValueHeads * kBoxK];
  // Activations as columns of a product are the high and the low bf16 half of each row.
  alignas(16) bf16 stream[2 * B][kMaxStepHidden + 8];  // normed but for the norm's own factor
  alignas(16) float mixer[B][kMixerFloats];            // heads, each from all ranks
  union {
    alignas(16) bf16 slice[2 * B][kMaxSliceK + 8];  // what the mixer or the MLP made
    // A linear layer's convolution, until this rank's heads have been sent.
    struct {
      alignas(16) float4 weights[kMaxChannels<B>];
      float samples[kConvWidth - 1][kMaxChannels<B>];
    } conv;
  };
  // What became of the newest position, where warps attend to one row together.
  alignas(16) float newest_values[B == 1 ? kMaxPassHeads * (256 + kTile) : 4];
  // This rank's rows of a mixer's projection, and what goes to every rank. Only this block touches
  // either: a row of x takes the place where it was kept, by the warp that has read it.
  static constexpr int kKept = kTilesAtOnce * kTile + 8;
  union {
    alignas(16) float kept[B][kKept];
    alignas(16) bf16 outgoing[2 * B][kKept];
  };
  union {
    float squares[B][kRanks][kStreamSquares];  // each rank's parts of the norm's sum
    unsigned long long keys[B][kStepWarps];    // the head's, the step's last norm done
  };
  float norm_factor[B];
  union {
    struct {
      alignas(16) float gates[B][kRanks][2 * kMaxValueHeads];  // b and a, each rank's part
      float head_factor[B][kMaxValueHeads];
      alignas(16) float sums[kStepWarps][16];
      alignas(16) float a_log[kMaxValueHeads], dt_bias[kMaxValueHeads], norm[kMaxRankValues];
      alignas(16) float own_gates[B][2 * kMaxValueHeads];  // what this rank sends
    } linear;
    struct {
      alignas(16) float2 softmax[B][kMaxPassHeads][kRanks];  // each rank's largest score and sum
      // Each tile's, of two rounds by turns, and the newest position's.
      float2 tile_softmax[3][kStepWarps][kMaxPassHeads];
      alignas(16) float norms[2][256];  // queries', keys'
    } attention;
  };
  uint32_t token[kRanks];
  int states_done[B];  // items of the slot of states that begins with a row
  // The next norm's weights of this rank's rows, for each warp that passes the stream on.
  alignas(16) float norm[kStreamWarps<B> * B][kStreamRows<B>];
  alignas(16) float cos[B][kMaxRotaryHalf];
  alignas(16) float sin[B][kMaxRotaryHalf];
  int page_rows[B][kCachedPages<B>];  // where this rank's part of the sequence begins in the pages
  int position[B], slot[B];
  SequencePart part[B];  // this rank's
  union {
    alignas(16) float parts[kGroupWarps * kPartStride];  // of products
    // What neighbours send when this block has sent its heads, and so has read the parts. It is
    // read before the block's share of the output, without which no next half begins.
    alignas(16) float head_squares[B][kMaxValueHeads][2 * kRanks];  // four columns each
    alignas(16) float attended[B][kMaxPassHeads][kRanks][16];       // this rank's dimensions
  };
  float2 published[2][kPublished<B>];  // what each thread added to the words of each buffer
  uint64_t full[kRingSlots<B>], empty[kRingSlots<B>];
  uint64_t ready[kSignals];
  uint64_t gates_full, gates_empty;
  // Slots of keys and values that have been asked for in this step: until a team's slot has been,
  // the slot's barrier may be any number of turns behind.
  uint32_t slots_asked;
};

// Of this rank's part of row b's sequence, how many positions are in the pages.
template <int B>
__device__ __forceinline__ int CachedPositions(const StepShared<B>& shared, int b) {
  return max(min(shared.part[b].end, shared.position[b]) - shared.part[b].begin, 0);
}

template <int B, int D>
__device__ __forceinline__ int CachedSlots(const StepShared<B>& shared, int b) {
  return CeilDiv(CachedPositions(shared, b), kSlotPositions<B, D>);
}

// A float as two bf16, the second what the first lacks. Where a product becomes two halves it is
// rounded first (__fmul_rn), or the compiler might use the exact one for the second half in the
// kernel for one number of rows and not in that for another.
struct Halves {
  bf16 high, low;
  __device__ __forceinline__ explicit Halves(float v)
      : high(__float2bfloat16_rn(v)), low(__float2bfloat16_rn(v - __bfloat162float(high))) {}
};

__device__ __forceinline__ uint32_t AsWord(__nv_bfloat162 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}
// A pair of Halves for two neighbours, the high ones as one word and the low ones.
struct SplitPair {
  uint32_t high, low;
};
__device__ __forceinline__ SplitPair SplitTwo(float a, float b) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
  const __nv_bfloat162 l = __floats2bfloat162_rn(a - __low2float(h), b - __high2float(h));
  return {AsWord(h), AsWord(l)};
}

// A few floats from an address that is a multiple of their size, at most 16 bytes.
template <int N>
__device__ __forceinline__ void LoadFloats(float (&x)[N], const float* from) {
  if constexpr (N == 2) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    x[0] = v.x;
    x[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      x[i] = v.x;
      x[i + 1] = v.y;
      x[i + 2] = v.z;
      x[i + 3] = v.w;
    }
  }
}

// A pointer that came from shared memory, for the compiler to know what it points to.
template <typename T>
__device__ __forceinline__ T* Global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}

// Two to the power of x, and 1 / x, by the hardware's one instruction: 2 ulp; what is below the
// normal numbers is zero.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The logistic function, SiLU and log(1 + exp(x)), some 1e-6 exact.
__device__ __forceinline__ float QuickSigmoid(float x) {
  constexpr float kLog2E = 1.44269504f;
  return Reciprocal(1.0f + Exp2(x * -kLog2E));
}
__device__ __forceinline__ float QuickSilu(float x) { return __fmul_rn(x, QuickSigmoid(x)); }
__device__ __forceinline__ float QuickSoftplus(float x) {
  return x > 20.0f ? x : __logf(1.0f + __expf(x));
}

// The first row of a page of row b's sequence in the pages of a layer, seen as rows of a head,
// [pages * kv_heads * 64, D].
__device__ __forceinline__ int PageRow(const StepArguments& a, int b, int kv_head, int page) {
  return (a.block_table[b * a.block_table_stride + page] * a.shape.kv_heads + kv_head) *
         kPageTokens;
}

// The same for a page of this rank's part of the sequence, most often from shared memory.
template <int B>
__device__ __forceinline__ int PageRow(const StepArguments& a, const StepShared<B>& shared, int b,
                                       int kv_head, int page) {
  const int index = page - shared.part[b].begin / kPageTokens;
  return index < kCachedPages<B> ? shared.page_rows[b][index] : PageRow(a, b, kv_head, page);
}

}  // namespace qwend::cuda
