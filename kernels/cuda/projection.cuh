// What the fused plan's projections have in common: x as columns of a tensor-core product, staged
// in shared memory, and the weights that it meets there.
#pragma once

#include <algorithm>

#include "kernels/cuda/load8.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/reduce.cuh"

namespace qwend::cuda {

constexpr int kTileRows = 8;      // weight rows of a tile
constexpr int kBlockK = 32;       // elements of K that one 16-byte load of each lane covers
constexpr int kRoundRows = 4;     // rows of x that one product serves: two columns each
constexpr int kMaxPassRows = 32;  // rows of x that one pass over the weights serves
constexpr int kMaxK = 8192;
constexpr int kSquareK = kWarp * 8;  // elements of x that a warp sums up at once
constexpr int kMaxSegments = ops::NormProjections::kMax;
constexpr int64_t kSharedLimit = 216 << 10;  // bytes a block may have
constexpr int64_t kSharedX = 128 << 10;      // of which x may take

// A weight [n, k] and what is made of its product; its tiles begin at first_tile.
struct Segment {
  const bf16* weight = nullptr;
  View<float> out;
  Vector bias;
  int n = 0;
  int first_tile = 0;
};

struct ProjectArguments {
  Segment segments[kMaxSegments];
  int count = 0;
  View<const float> x;
  int rows = 0;
  int k = 0;
  int tiles = 0;       // of all segments
  int pass_rows = 0;   // rows of x that a block takes
  int slots = 0;       // tiles in shared memory
  int teams = 0;       // groups of warps, each with a tile at a time
  int team_warps = 0;  // which share K
  const float* norm_weight = nullptr;
  float norm_offset = 0.0f;
  float norm_eps = 0.0f;
  View<const float> residual;
  const SamplingRow* sampling = nullptr;
  unsigned long long* best = nullptr;  // one key a row
  int vocab_limit = 0;
};

// Eight elements of x as the high and the low bf16 of each: together they keep 16 bits of it.
struct Split8 {
  uint4 high, low;
};
__device__ __forceinline__ Split8 SplitEight(const Eight& x) {
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x.v[2 * i], x.v[2 * i + 1]);
    const __nv_bfloat162 l =
        __floats2bfloat162_rn(x.v[2 * i] - __low2float(h), x.v[2 * i + 1] - __high2float(h));
    high[i] = *reinterpret_cast<const uint32_t*>(&h);
    low[i] = *reinterpret_cast<const uint32_t*>(&l);
  }
  return {{high[0], high[1], high[2], high[3]}, {low[0], low[1], low[2], low[3]}};
}

// Rows of x into shared memory as columns of the product, [K / 32][rows][high, low][4] vectors,
// scaled by the norm's weight; squares[t] gets the sum of squares of each kSquareK elements, in an
// order that the number of warps does not change.
template <bool Normed>
__device__ __forceinline__ void StageX(const ProjectArguments& a, uint4* columns,
                                       float (*squares)[kMaxK / kSquareK], int t0, int rows,
                                       int warps) {
  const int lane = threadIdx.x % kWarp, vectors = a.k / 8, padded = CeilDiv(a.k, kBlockK) * 4;
  for (int t = 0; t < rows; ++t) {
    for (int chunk = threadIdx.x / kWarp; chunk * kWarp < padded; chunk += warps) {
      const int i = chunk * kWarp + lane;
      float square = 0.0f;
      Eight x{};
      if (i < vectors) {
        x = LoadEight(a.x.At(t0 + t) + i * 8);
        if constexpr (Normed) {
          const Eight scale = LoadEight(a.norm_weight + i * 8);
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            square = fmaf(x.v[j], x.v[j], square);
            x.v[j] *= a.norm_offset + scale.v[j];
          }
        }
      }
      if (i < padded) {
        const Split8 split = SplitEight(x);
        uint4* to = columns + ((i / 4) * rows + t) * 8 + i % 4;
        to[0] = split.high;
        to[4] = split.low;
      }
      if constexpr (Normed) {
        square = WarpSum(square);
        if (lane == 0) squares[t][chunk] = square;
      }
    }
  }
}

// Products of one weight row a lane group with up to four rows of x: w and x are the lane's 16
// bytes of the weight row and of the column.
__device__ __forceinline__ void MultiplyBlock(float (&even)[4], float (&odd)[4], uint4 w, uint4 x) {
  const uint32_t low[4] = {w.x, 0, w.y, 0}, high[4] = {w.z, 0, w.w, 0};
  MmaBf16(even, low, x.x, x.y);
  MmaBf16(odd, high, x.z, x.w);
}

// Bytes of a row of x in shared memory, and how many rows fit beside `other_bytes`.
inline int64_t RowBytes(const ProjectArguments& a) {
  return int64_t{CeilDiv(a.k, kBlockK)} * kBlockK * 4;
}
inline int PassRows(const ProjectArguments& a, int64_t other_bytes) {
  const int64_t fit = std::min(kSharedX, kSharedLimit - other_bytes) / RowBytes(a);
  return static_cast<int>(std::min<int64_t>(
      {a.rows, kMaxPassRows, fit >= kRoundRows ? fit / kRoundRows * kRoundRows : fit}));
}

inline bool Aligned(const TensorView& v) {
  return reinterpret_cast<uintptr_t>(v.data) % 16 == 0 && v.strides[0] % 8 == 0;
}

// Whether the kernels here are built for the projection; else its parts run one by one.
inline bool Fits(const ops::Gemv& g, const LaunchContext& ctx) {
  return ctx.overlap && g.x.dtype == DType::kF32 && g.out.dtype == DType::kF32 &&
         g.weight.dtype == DType::kBF16 && g.weight.layout == Layout::kRowMajor &&
         g.weight.cols() % 8 == 0 && g.weight.cols() <= kMaxK && Aligned(g.x) &&
         Aligned(g.weight) && g.x.rows() <= kMaxDecodeRows;
}

inline Segment MakeSegment(const ops::Gemv& g, const TensorView& out) {
  return {g.weight.As<const bf16>(), MakeView<float>(out), MakeVector(g.bias),
          static_cast<int>(g.weight.rows()), 0};
}

inline ProjectArguments MakeArguments(const TensorView& x) {
  ProjectArguments a;
  a.x = MakeView<const float>(x);
  a.rows = static_cast<int>(x.rows());
  a.k = static_cast<int>(x.cols());
  return a;
}

}  // namespace qwend::cuda
