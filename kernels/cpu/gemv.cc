// Gemv and SplitKReduce.
//
// A tile is one panel of weights (kPanelRows outputs) against up to kMaxTokens rows of x: all its
// sums stay in registers for the whole of K, vector lanes are outputs, and every step of k is one
// load of weights, one broadcast of x per row, and their fused multiply-adds. With one row the
// bound is memory: each weight is read once, in one contiguous stream per thread. With many rows
// the panel is read once from memory and then from the second-level cache, and the bound is the
// multiply-adds: 2 * N * K * T.
//
// On processors without fused multiply-add (x86 before AVX2) a product is rounded before it is
// added: results there differ in the last bits, but not from run to run.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/float_types.h"
#include "kernels/cpu/panels.h"

// Vectors whose length is known at compile time only; SSSE3 adds nothing below SSE4 here, nor
// AVX3_DL to AVX3.
#undef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemv.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#ifndef QWEND_KERNELS_CPU_GEMV_ONCE
#define QWEND_KERNELS_CPU_GEMV_ONCE
namespace qwend::cpu {

constexpr int kMostTileTokens = 12;  // of any instruction set

// Steps [k_begin, k_end) of one panel against `tokens` rows of x.
struct Tile {
  const void* weights;  // the panel's first step, k = 0
  DType weight_type;    // kBF16 or kF32
  int64_t height;       // 16 or 32
  int64_t k_begin;      // even
  int64_t k_end;
  const float* x;  // [k_end][tokens], from k = 0
  int64_t tokens;
  float* out;  // [tokens][kPanelRows]
};

}  // namespace qwend::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using DU = hn::RebindToUnsigned<D>;
using V = hn::Vec<D>;
constexpr int kLanes = static_cast<int>(hn::MaxLanes(D()));

// Sums that fit into the registers beside two weights and a broadcast.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_NEON
constexpr int kSums = 24;
#else
constexpr int kSums = 12;
#endif
// Vectors of outputs that many rows of x leave room for: at least kPanelStep outputs.
constexpr int kStepVectors = kPanelStep / kLanes;
constexpr int kPanelVectors = kPanelRows / kLanes;
constexpr int kMaxTokens =
    std::max(1, kSums / (kPanelVectors * 4 <= kSums ? kPanelVectors : kStepVectors));
static_assert(kMaxTokens <= kMostTileTokens);

constexpr int VectorsFor(int tokens, int height) {
  const int vectors = height / kLanes;
  return vectors * tokens <= kSums ? vectors : kStepVectors;
}

// The hardware's own prefetching stops at a page and starts slowly; this far ahead keeps enough
// lines in flight to reach the read bandwidth. Past a panel's end lies the next one.
constexpr int64_t kPrefetchBytes = 4096;
constexpr int64_t kLineBytes = 64;

HWY_INLINE void PrefetchLine(const void* base, int64_t offset) {
  // Through an integer: the address may lie behind the weights, where prefetching does nothing.
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) +
                                                   static_cast<uintptr_t>(offset)));
}

// For each step of k: the lines of that step's weights, kPrefetchBytes ahead.
template <int kBytes>
HWY_INLINE void PrefetchStep(const void* weights) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kBytes; i += kLineBytes) PrefetchLine(weights, kPrefetchBytes + i);
}

HWY_INLINE void PrefetchStart(const void* weights) {
  for (int64_t i = 0; i < kPrefetchBytes; i += kLineBytes) PrefetchLine(weights, i);
}

template <int kTokens, int kVectors>
HWY_INLINE void AddProducts(V (&sum)[kTokens][kVectors], const V (&w)[kVectors], const float* x) {
  const D d;
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
    const V xt = hn::Set(d, x[t]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[t][v] = hn::MulAdd(w[v], xt, sum[t][v]);
  }
}

template <int kTokens, int kVectors>
HWY_INLINE void Steps(const uint16_t* w, int64_t height, int64_t k_begin, int64_t k_end,
                      const float* x, V (&sum)[kTokens][kVectors]) {
  const DU du;
  const D d;
  const auto odd_mask = hn::Set(du, 0xffff0000u);
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(w) + k_begin / 2 * height;
  const float* xk = x + k_begin * kTokens;
  const int64_t whole = (k_end - k_begin) / 2;
  V wf[kVectors];
  PrefetchStart(pairs);
  for (int64_t j = 0; j < whole; ++j) {
    PrefetchStep<kVectors * kLanes * 4>(pairs);
    hn::Vec<DU> raw[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      raw[v] = hn::LoadU(du, pairs + v * kLanes);
      wf[v] = hn::BitCast(d, hn::ShiftLeft<16>(raw[v]));
    }
    AddProducts(sum, wf, xk);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) wf[v] = hn::BitCast(d, hn::And(raw[v], odd_mask));
    AddProducts(sum, wf, xk + kTokens);
    pairs += height;
    xk += 2 * kTokens;
  }
  if ((k_end - k_begin) % 2 != 0) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      wf[v] = hn::BitCast(d, hn::ShiftLeft<16>(hn::LoadU(du, pairs + v * kLanes)));
    }
    AddProducts(sum, wf, xk);
  }
}

template <int kTokens, int kVectors>
HWY_INLINE void Steps(const float* w, int64_t height, int64_t k_begin, int64_t k_end,
                      const float* x, V (&sum)[kTokens][kVectors]) {
  const D d;
  V wf[kVectors];
  PrefetchStart(w + k_begin * height);
  for (int64_t k = k_begin; k < k_end; ++k) {
    PrefetchStep<kVectors * kLanes * 4>(w + k * height);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) wf[v] = hn::LoadU(d, w + k * height + v * kLanes);
    AddProducts(sum, wf, x + k * kTokens);
  }
}

template <typename Weight, int kTokens, int kHeight>
void RunTile(const Tile& tile) {
  constexpr int kVectors = VectorsFor(kTokens, kHeight);
  const D d;
  const Weight* w = static_cast<const Weight*>(tile.weights);
  constexpr int64_t kElementsPerRow = sizeof(Weight) == 2 ? 2 : 1;
  for (int r = 0; r < kHeight; r += kVectors * kLanes) {
    V sum[kTokens][kVectors];
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[t][v] = hn::Zero(d);
    }
    Steps<kTokens, kVectors>(w + r * kElementsPerRow, kHeight, tile.k_begin, tile.k_end, tile.x,
                             sum);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        hn::StoreU(sum[t][v], d, tile.out + t * kPanelRows + r + v * kLanes);
      }
    }
  }
}

// Picks the tile made for this number of rows.
template <typename Weight, int kTokens = 1>
HWY_INLINE void PickTile(const Tile& tile) {
  if constexpr (kTokens <= kMaxTokens) {
    if (tile.tokens != kTokens) return PickTile<Weight, kTokens + 1>(tile);
    if (tile.height == kPanelRows) return RunTile<Weight, kTokens, kPanelRows>(tile);
    RunTile<Weight, kTokens, kPanelStep>(tile);
  }
}

void ComputeTile(const Tile& tile) {
  if (tile.weight_type == DType::kBF16) {
    PickTile<uint16_t>(tile);
  } else {
    PickTile<float>(tile);
  }
}

int MaxTileTokens() { return kMaxTokens; }

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(ComputeTile);
HWY_EXPORT(MaxTileTokens);

// Grow-only memory of one thread, so that a step allocates nothing after its first run.
float* Scratch(std::vector<float>& scratch, int64_t count) {
  if (static_cast<int64_t>(scratch.size()) < count) scratch.resize(static_cast<size_t>(count));
  return scratch.data();
}
thread_local std::vector<float> x_scratch;
thread_local std::vector<float> panel_scratch;

// The rows of x cut into tiles of nearly equal size, each stored [K][tokens of the tile].
struct TiledRows {
  TiledRows(int64_t rows, int64_t max_tokens)
      : rows(rows), tiles((rows + max_tokens - 1) / max_tokens) {}
  int64_t Begin(int64_t tile) const { return rows * tile / tiles; }
  int64_t rows;
  int64_t tiles;
};

// Steps [k_begin, k_end) of `tokens` rows of x from `first` on, to [k][tokens].
void TileRows(const TensorView& x, int64_t first, int64_t tokens, int64_t k_begin, int64_t k_end,
              float* to) {
  const auto transpose = [&](const auto* rows, const auto& convert) {
    for (int64_t k = k_begin; k < k_end; ++k) {
      for (int64_t t = 0; t < tokens; ++t) to[k * tokens + t] = convert(rows[t * x.strides[0] + k]);
    }
  };
  if (x.dtype == DType::kBF16) {
    transpose(x.As<const uint16_t>() + first * x.strides[0], Bf16ToFloat);
  } else {
    transpose(x.As<const float>() + first * x.strides[0], [](float v) { return v; });
  }
}

// All of x as tiles, or x itself where that is the same.
const float* TileAllRows(const TensorView& x, const TiledRows& tiled, ThreadPool& pool) {
  if (x.rows() == 1 && x.dtype == DType::kF32) return x.As<const float>();
  constexpr int64_t kSteps = 512;  // of k that one item transposes
  const int64_t k = x.cols();
  float* tiles = Scratch(x_scratch, x.rows() * k);
  const int64_t blocks = (k + kSteps - 1) / kSteps;
  pool.ParallelFor(tiled.tiles * blocks, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t tile = item / blocks;
      const int64_t k_begin = item % blocks * kSteps;
      const int64_t first = tiled.Begin(tile);
      TileRows(x, first, tiled.Begin(tile + 1) - first, k_begin, std::min(k, k_begin + kSteps),
               tiles + first * k);
    }
  });
  return tiles;
}

// out[row, first_col + i] = sums[i] + bias[i], rounded once. `bias` may be null.
void StoreOutputs(const TensorView& out, int64_t row, int64_t first_col, int64_t count,
                  const float* sums, const float* bias) {
  const int64_t index = row * out.strides[0] + first_col;
  const auto store = [&](auto* to, const auto& convert) {
    if (bias == nullptr) {
      for (int64_t i = 0; i < count; ++i) to[i] = convert(sums[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = convert(sums[i] + bias[i]);
    }
  };
  if (out.dtype == DType::kBF16) {
    store(out.As<uint16_t>() + index, FloatToBf16);
  } else {
    store(out.As<float>() + index, [](float v) { return v; });
  }
}

// Outputs of panel `panel` over part `split` of K, for the rows of tiles [tile_begin, tile_end).
void RunPanel(const ops::Gemv& op, const TiledRows& tiled, const float* x, int64_t panel,
              int64_t split, int64_t tile_begin, int64_t tile_end) {
  const int64_t k = op.weight.cols();
  const int64_t n = op.weight.rows();
  const int64_t pairs_per_split = ((k + 1) / 2 + op.splits - 1) / op.splits;
  const int64_t first_out = panel * kPanelRows;
  const int64_t count = std::min<int64_t>(kPanelRows, n - first_out);
  float sums[kMostTileTokens * kPanelRows];
  Tile tile;
  tile.height = PanelHeight(n, panel);
  tile.k_begin = std::min(k, split * pairs_per_split * 2);
  tile.k_end = std::min(k, (split + 1) * pairs_per_split * 2);
  tile.out = sums;
  if (op.weight.layout == Layout::kCpuPanels) {
    tile.weight_type = op.weight.dtype;
    tile.weights = op.weight.As<const char>() + PanelOffset(tile.weight_type, k, panel);
  } else {
    tile.weight_type = PackedType(op.weight.dtype);
    float* packed = Scratch(panel_scratch, kPanelRows * PanelRowBytes(tile.weight_type, k) / 4);
    PackPanelRange(op.weight, tile.weight_type, panel, panel + 1, packed);
    tile.weights = packed;
  }
  float bias[kPanelRows];
  if (op.bias) {
    for (int64_t i = 0; i < count; ++i) {
      bias[i] = LoadElement(op.bias.data, op.bias.dtype, first_out + i);
    }
  }
  for (int64_t i = tile_begin; i < tile_end; ++i) {
    const int64_t first = tiled.Begin(i);
    tile.tokens = tiled.Begin(i + 1) - first;
    tile.x = x + first * k;
    HWY_DYNAMIC_DISPATCH(ComputeTile)(tile);
    for (int64_t t = 0; t < tile.tokens; ++t) {
      const float* row_sums = sums + t * kPanelRows;
      if (op.splits > 1) {
        float* part = op.partials.As<float>() + split * op.partials.strides[0] +
                      (first + t) * op.partials.strides[1] + first_out;
        std::copy(row_sums, row_sums + count, part);
      } else {
        StoreOutputs(op.out, first + t, first_out, count, row_sums, op.bias ? bias : nullptr);
      }
    }
  }
}

}  // namespace

void Run(const ops::Gemv& op, const LaunchContext& ctx) {
  const TiledRows tiled(op.x.rows(), HWY_DYNAMIC_DISPATCH(MaxTileTokens)());
  const float* x = TileAllRows(op.x, tiled, ctx.pool);
  const int64_t splits = op.splits;
  const int64_t parts = PanelCount(op.weight.rows()) * splits;
  // Few panels and many rows: the rows are shared out too, so that no thread is left without work.
  constexpr int64_t kItemsPerThread = 16;
  const int64_t groups =
      std::clamp<int64_t>(kItemsPerThread * ctx.pool.size() / parts, 1, tiled.tiles);
  ctx.pool.ParallelFor(parts * groups, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t part = item / groups;
      const int64_t group = item % groups;
      RunPanel(op, tiled, x, part / splits, part % splits, tiled.tiles * group / groups,
               tiled.tiles * (group + 1) / groups);
    }
  });
}

void Run(const ops::SplitKReduce& op, const LaunchContext& ctx) {
  const int64_t n = op.out.cols();
  constexpr int64_t kBlock = 1024;  // columns of one item
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  ctx.pool.ParallelFor(op.out.rows() * blocks, 4, [&](int64_t begin, int64_t end, int) {
    float sums[kBlock];
    float bias[kBlock];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / blocks;
      const int64_t col = item % blocks * kBlock;
      const int64_t count = std::min(kBlock, n - col);
      const float* part = op.partials.As<const float>() + row * op.partials.strides[1] + col;
      std::copy(part, part + count, sums);
      for (int64_t p = 1; p < op.partials.dim(0); ++p) {
        part += op.partials.strides[0];
        for (int64_t i = 0; i < count; ++i) sums[i] += part[i];
      }
      if (op.bias) {
        for (int64_t i = 0; i < count; ++i) {
          bias[i] = LoadElement(op.bias.data, op.bias.dtype, col + i);
        }
      }
      StoreOutputs(op.out, row, col, count, sums, op.bias ? bias : nullptr);
    }
  });
}

}  // namespace qwend::cpu
#endif  // HWY_ONCE
