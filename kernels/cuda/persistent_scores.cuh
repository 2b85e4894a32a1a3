// What one warp of the persistent step makes of 16 positions of a sequence, a tile, on tensor
// cores: scores of the cluster's query heads, their exponentials, and the values weighed by them;
// and how tiles are added up, one after another, whoever made them.
#pragma once

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/page_layout.h"
#include "kernels/cuda/persistent_heads.cuh"

namespace qwend::cuda {

// The factors for what is there and for a tile, when the tile is added: one of them is 1.
// `largest`, of the scores that are there, becomes that of both. Scores are exponents of 2. A tile
// that is none, after one that is, has -infinity, no sum and no values, and changes nothing finite.
struct FoldFactors {
  float before, tile;
  FoldFactors() = default;
  __device__ __forceinline__ FoldFactors(float& largest, float of_tile) {
    const float less = Exp2(-fabsf(largest - of_tile));
    const bool stays = largest >= of_tile;
    before = stays ? 1.0f : less;
    tile = stays ? less : 1.0f;
    largest = fmaxf(largest, of_tile);
  }
  __device__ __forceinline__ float Fold(float there, float added) const {
    return fmaf(added, tile, __fmul_rn(there, before));
  }
};

// Where a row of pieces is in shared memory, and which position's order they have.
struct TileRow {
  uint32_t at;
  int order;
  // Where piece 2 * `pair` + `odd` is.
  __device__ __forceinline__ uint32_t Piece(int pair, int odd) const {
    return at + (((odd ^ order) * 16) ^ (pair % 4 * 32)) + pair / 4 * 128;
  }
};

// The first `count` of the 16 positions from `first` on, 0 of a tile that is none, and where the
// keys and values of `first` are in shared memory.
struct TilePlace {
  uint32_t keys, values;
  int first, count;
};

// Products have the 16 positions, or 16 dimensions of the values, as rows, and as columns the high
// and the low bf16 half of either head's queries or weights, twice. So lane (g, t) has, of head t %
// 2, rows g and g + 8.
template <int B, int D>
struct TileAttention {
  static constexpr int kSteps = D / 16;  // of K of the scores; parts of the values
  // Both heads' queries as a product's second operand.
  using Query = uint32_t[kSteps][2];

  // Column `column` of row b's queries: half column % 2 of head column / 2 where that head was.
  // Piece i lies at i ^ column.
  __device__ __forceinline__ static TileRow QueryColumn(const StepShared<B>& shared, int b,
                                                        int column) {
    return {SharedAddress(shared.mixer[b] + column / 2 * D) + column % 2 * D * 2, column};
  }
  __device__ __forceinline__ static void LoadQuery(Query& q, const StepShared<B>& shared, int b,
                                                   int heads) {
    const int lane = threadIdx.x % kWarp;
    const TileRow row = QueryColumn(shared, b, heads == 1 ? lane % 2 : lane % 4);
#pragma unroll
    for (int s = 0; s < kSteps; s += 2) {
      uint32_t r[4];
      LoadMatrix4(r, row.Piece(s + lane / 16, lane / 8 % 2));
      q[s][0] = r[0];
      q[s][1] = r[1];
      q[s + 1][0] = r[2];
      q[s + 1][1] = r[3];
    }
  }

  // N tiles side by side, of which those without positions count for nothing. scored(n, largest,
  // sum) when all has been read of the keys, the head's largest score and the sum of the
  // exponentials; then take(n, s, first, second) for dimensions 16 s + g and 16 s + g + 8 from
  // where the places' values begin, `Parts` times.
  template <int Parts, int N, typename Scored, typename Take>
  __device__ __forceinline__ static void Attend(const TilePlace (&places)[N], const Query& q,
                                                Scored scored, Take take) {
    const int lane = threadIdx.x % kWarp;
    TileRow value[N];
    float c[N][4][4] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const TileRow key = RowOf(places[n], places[n].keys, lane % 16);
      value[n] = RowOf(places[n], places[n].values, lane % 8 + lane / 16 * 8);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        uint32_t k[4];
        LoadMatrix4(k, key.Piece(s, lane / 16));
        MmaBf16(c[n][s % 4], k, q[s][0], q[s][1]);
      }
    }
    // The first values are asked for before the scores are there.
    constexpr int kEarly = 4 / N;
    uint32_t early[N][kEarly][4], weights[N][2];
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int s = 0; s < kEarly; ++s)
        LoadTransposed4(early[n][s], value[n].Piece(s, lane / 8 % 2));
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int count = places[n].count;
      float2 score = Total(c[n]);
      if (lane / 4 >= count) score.x = -INFINITY;
      if (lane / 4 + 8 >= count) score.y = -INFINITY;
      const float largest =
          OverRows(fmaxf(score.x, score.y), [](float a, float b) { return fmaxf(a, b); });
      // Scores that are no numbers stay so.
      const float p[2] = {lane / 4 < count ? Exp2(score.x - largest) : 0.0f,
                          lane / 4 + 8 < count ? Exp2(score.y - largest) : 0.0f};
      scored(n, largest, OverRows(p[0] + p[1], [](float a, float b) { return a + b; }));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Halves halves(p[i]);
        weights[n][i] = Transposed(AsWord({halves.high, halves.low}));
      }
    }
#pragma unroll
    for (int s = 0; s < Parts; ++s) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float sums[4] = {};
        if (s >= kEarly) LoadTransposed4(early[n][s % kEarly], value[n].Piece(s, lane / 8 % 2));
        MmaBf16(sums, early[n][s % kEarly], weights[n][0], weights[n][1]);
        take(n, s, sums[0] + sums[1], sums[2] + sums[3]);
      }
    }
  }

  // As the two lanes of a head share its values, of part `s`: the lane's one, and its dimension.
  __device__ __forceinline__ static float Own(float first, float second) {
    return threadIdx.x % 4 < kMaxPassHeads ? first : second;
  }
  __device__ __forceinline__ static int OwnDimension(int s) {
    const int lane = threadIdx.x % kWarp;
    return s * 16 + lane % 4 / kMaxPassHeads * 8 + lane / 4;
  }

 private:
  // Past the end comes the last position once more.
  __device__ __forceinline__ static TileRow RowOf(const TilePlace& place, uint32_t rows, int i) {
    const int row = max(min(i, place.count - 1), 0);
    return {rows + row * D * 2, (place.first + row) % 8};
  }
  template <typename Combine>
  __device__ __forceinline__ static float OverRows(float v, Combine combine) {
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2)
      v = combine(v, __shfl_xor_sync(kFullMask, v, offset));
    return v;
  }
};

}  // namespace qwend::cuda
