// Attention over paged keys and values, whole (Attention) or in its three steps (QkDot,
// SoftmaxMask, PvDot). All four share the inner functions below, so that they give the same bits:
//   score: 16 partial sums over the head's elements, one fixed tree, times scale;
//   softmax: the maximum, e^(s - max), a sum in 16 partial sums by position, times 1 / sum;
//   output: one chain of multiply-adds per element, in order of the position.
// Blocking over queries and pages changes what stays in cache, and no bit.
#include <algorithm>
#include <vector>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {

constexpr int kTile = kLanes == 16 ? 4 : 2;  // queries by keys, or by 16 columns, in registers

// out[i][p] = scale * q[i] . keys[p] for NQ queries and p < count.
template <int NQ>
void ScoreTile(const float* const* q, const float* keys, int64_t stride, int64_t dim, int count,
               float scale, float* const* out) {
  int p = 0;
  for (; p + kTile <= count; p += kTile) {
    F16 sum[NQ][kTile];
#pragma GCC unroll 4
    for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kTile; ++j) sum[i][j] = Zero();
    }
    const float* key = keys + p * stride;
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
      F16 k[kTile];
#pragma GCC unroll 4
      for (int j = 0; j < kTile; ++j) k[j] = Load(key + j * stride + d);
#pragma GCC unroll 4
      for (int i = 0; i < NQ; ++i) {
        const F16 x = Load(q[i] + d);
#pragma GCC unroll 4
        for (int j = 0; j < kTile; ++j) sum[i][j] = MulAdd(x, k[j], sum[i][j]);
      }
    }
    if (d < dim) {
#pragma GCC unroll 4
      for (int i = 0; i < NQ; ++i) {
        const F16 x = Load(q[i] + d, dim - d);
#pragma GCC unroll 4
        for (int j = 0; j < kTile; ++j) {
          sum[i][j] = MulAdd(x, Load(key + j * stride + d, dim - d), sum[i][j]);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kTile; ++j) out[i][p + j] = scale * Sum(sum[i][j]);
    }
  }
  for (; p < count; ++p) {
    for (int i = 0; i < NQ; ++i) {
      F16 sum = Zero();
      for (int64_t d = 0; d < dim; d += 16) {
        sum = MulAdd(Load(q[i] + d, dim - d), Load(keys + p * stride + d, dim - d), sum);
      }
      out[i][p] = scale * Sum(sum);
    }
  }
}

// out[i][c] += sum over p < count, in order, of probs[i][p] * values[p][c], for NQ rows.
template <int NQ>
void MixTile(const float* const* probs, const float* values, int64_t stride, int64_t dim, int count,
             float* const* out) {
  int64_t c = 0;
  for (; c + 16 * kTile <= dim; c += 16 * kTile) {
    F16 sum[NQ][kTile];
#pragma GCC unroll 4
    for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kTile; ++j) sum[i][j] = Load(out[i] + c + 16 * j);
    }
    for (int p = 0; p < count; ++p) {
      F16 v[kTile];
#pragma GCC unroll 4
      for (int j = 0; j < kTile; ++j) v[j] = Load(values + p * stride + c + 16 * j);
#pragma GCC unroll 4
      for (int i = 0; i < NQ; ++i) {
        const F16 w = Splat(probs[i][p]);
#pragma GCC unroll 4
        for (int j = 0; j < kTile; ++j) sum[i][j] = MulAdd(w, v[j], sum[i][j]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < NQ; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < kTile; ++j) Store(sum[i][j], out[i] + c + 16 * j);
    }
  }
  for (; c < dim; c += 16) {
    for (int i = 0; i < NQ; ++i) {
      F16 sum = Load(out[i] + c, dim - c);
      for (int p = 0; p < count; ++p) {
        sum = MulAdd(Splat(probs[i][p]), Load(values + p * stride + c, dim - c), sum);
      }
      Store(sum, out[i] + c, dim - c);
    }
  }
}

// The scores of `num` queries against one page; query i sees its first visible[i] keys.
// visible[] must not fall within a group of kTile.
void ScorePage(const float* const* q, int num, const float* keys, int64_t stride, int64_t dim,
               const int* visible, float scale, float* const* out) {
  int i = 0;
  for (; i + kTile <= num; i += kTile) {
    const int common = *std::min_element(visible + i, visible + i + kTile);
    ScoreTile<kTile>(q + i, keys, stride, dim, common, scale, out + i);
    for (int j = i; j < i + kTile; ++j) {
      float* rest = out[j] + common;
      ScoreTile<1>(q + j, keys + common * stride, stride, dim, visible[j] - common, scale, &rest);
    }
  }
  for (; i < num; ++i) ScoreTile<1>(q + i, keys, stride, dim, visible[i], scale, out + i);
}

// Adds one page's weighted values to the outputs of `num` rows.
void MixPage(const float* const* probs, int num, const float* values, int64_t stride, int64_t dim,
             const int* visible, float* const* out) {
  int i = 0;
  for (; i + kTile <= num; i += kTile) {
    const int common = *std::min_element(visible + i, visible + i + kTile);
    MixTile<kTile>(probs + i, values, stride, dim, common, out + i);
    for (int j = i; j < i + kTile; ++j) {
      const float* rest = probs[j] + common;
      MixTile<1>(&rest, values + common * stride, stride, dim, visible[j] - common, out + j);
    }
  }
  for (; i < num; ++i) MixTile<1>(probs + i, values, stride, dim, visible[i], out + i);
}

void Softmax(float* s, int64_t n) {
  float top = s[0];
  int64_t i = 0;
  if (n >= 16) {
    F16 max = Load(s);
    for (i = 16; i + 16 <= n; i += 16) max = Max(max, Load(s + i));
    top = MaxLane(max);
  }
  for (; i < n; ++i) top = s[i] > top ? s[i] : top;
  const F16 shift = Splat(top);
  F16 sum = Zero();
  for (i = 0; i + 16 <= n; i += 16) {
    const F16 e = Exp(Sub(Load(s + i), shift));
    Store(e, s + i);
    sum = Add(sum, e);
  }
  if (i < n) {
    Store(Exp(Sub(Load(s + i, n - i), shift)), s + i, n - i);
    sum = Add(sum, Load(s + i, n - i));
  }
  const F16 scale = Splat(1.0f / Sum(sum));
  for (i = 0; i < n; i += 16) Store(Mul(Load(s + i, n - i), scale), s + i, n - i);
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(ScorePage);
HWY_EXPORT(MixPage);
HWY_EXPORT(Softmax);

// Consecutive rows of one sequence. With all query heads of one key-value head they are worked on
// together, so that a page is read once for all of them.
struct Block {
  int64_t row = 0;
  int count = 0;
};

// The queries of a block and one key-value head, row by row.
struct Group {
  int num = 0;
  std::vector<const float*> q;
  std::vector<float*> scores;  // each at position 0
  std::vector<float*> out;
  std::vector<int32_t> lengths;
  std::vector<int> visible;  // of the page at hand
  std::vector<const float*> page_probs;
  std::vector<float*> page_scores;

  void Resize(int n) {
    num = n;
    q.resize(n);
    scores.resize(n);
    out.resize(n);
    lengths.resize(n);
    visible.resize(n);
    page_probs.resize(n);
    page_scores.resize(n);
  }
};

// One head of one page as f32 [64, D].
struct PageRows {
  const float* data;
  int64_t stride;
};
PageRows ReadPage(const TensorView& pages, int32_t page, int64_t kv_head, int positions) {
  const int64_t dim = pages.cols();
  if (pages.dtype == DType::kF32) {
    return {static_cast<const float*>(RowAt(pages, page, kv_head)), pages.strides[2]};
  }
  float* to = Scratch(ScratchSlot::kInB, kPageTokens * dim);
  for (int p = 0; p < positions; ++p) {
    ToFloats(RowAt(pages, page, kv_head, p), pages.dtype, dim, to + p * dim);
  }
  return {to, dim};
}

// fn(page rows, first position) for each page that holds the first `length` positions, after
// setting what each query sees of it.
template <typename Fn>
void ForEachPage(const TensorView& pages, const int32_t* table, int64_t kv_head, Group& g,
                 const Fn& fn) {
  const int32_t length = *std::max_element(g.lengths.begin(), g.lengths.end());
  for (int32_t first = 0; first < length; first += kPageTokens) {
    for (int i = 0; i < g.num; ++i) {
      g.visible[i] = std::clamp(g.lengths[i] - first, 0, kPageTokens);
    }
    const int positions = std::min(length - first, kPageTokens);
    fn(ReadPage(pages, table[first / kPageTokens], kv_head, positions), first);
  }
}

void Scores(const TensorView& k_pages, const int32_t* table, int64_t kv_head, float scale,
            Group& g) {
  ForEachPage(k_pages, table, kv_head, g, [&](const PageRows& keys, int32_t first) {
    for (int i = 0; i < g.num; ++i) g.page_scores[i] = g.scores[i] + first;
    HWY_DYNAMIC_DISPATCH(ScorePage)
    (g.q.data(), g.num, keys.data, keys.stride, k_pages.cols(), g.visible.data(), scale,
     g.page_scores.data());
  });
}

void Mix(const TensorView& v_pages, const int32_t* table, int64_t kv_head, Group& g) {
  const int64_t dim = v_pages.cols();
  for (int i = 0; i < g.num; ++i) std::fill_n(g.out[i], dim, 0.0f);
  ForEachPage(v_pages, table, kv_head, g, [&](const PageRows& values, int32_t first) {
    for (int i = 0; i < g.num; ++i) g.page_probs[i] = g.scores[i] + first;
    HWY_DYNAMIC_DISPATCH(MixPage)
    (g.page_probs.data(), g.num, values.data, values.stride, dim, g.visible.data(), g.out.data());
  });
}

// What the three operators that walk pages share: where the group's rows lie.
struct Geometry {
  const StepSequences& sequences;
  const int32_t* lengths;
  int64_t heads_per_kv;

  Block BlockAt(int64_t row, int64_t rows, int max_rows) const {
    const int32_t* row_sequence = sequences.row_sequence.As<int32_t>();
    Block b{row, 1};
    while (b.count < max_rows && row + b.count < rows &&
           row_sequence[row + b.count] == row_sequence[row]) {
      ++b.count;
    }
    return b;
  }

  const int32_t* Table(const Block& b) const {
    const int32_t sequence = sequences.row_sequence.As<int32_t>()[b.row];
    return static_cast<const int32_t*>(RowAt(sequences.block_table, sequence));
  }

  // fn(i, row, head) for each query i of the group.
  template <typename Fn>
  void ForEachQuery(const Block& b, int64_t kv_head, Group& g, const Fn& fn) const {
    g.Resize(b.count * static_cast<int>(heads_per_kv));
    for (int i = 0; i < g.num; ++i) {
      const int64_t row = b.row + i / heads_per_kv;
      g.lengths[i] = lengths[row];
      fn(i, row, kv_head * heads_per_kv + i % heads_per_kv);
    }
  }
};

// body(block, kv_head, group) over all blocks and key-value heads, in parallel when the work is
// worth it. Early and late blocks alternate, because late rows of a prefill see more positions.
template <typename Body>
void ForEachGroup(const Geometry& geometry, int64_t rows, int64_t kv_heads, int64_t dim,
                  const LaunchContext& ctx, const Body& body) {
  constexpr int64_t kGroupScores = 256 * 1024;  // floats of scores that a group may hold
  thread_local std::vector<Block> blocks;
  blocks.clear();
  int64_t total = 0;
  for (int64_t row = 0; row < rows;) {
    const int64_t scores_per_row = geometry.heads_per_kv * geometry.lengths[row];
    const int max_rows = static_cast<int>(
        std::clamp<int64_t>(kGroupScores / std::max<int64_t>(1, scores_per_row), 1, 8));
    blocks.push_back(geometry.BlockAt(row, rows, max_rows));
    total += blocks.back().count * scores_per_row;
    row += blocks.back().count;
  }
  const std::vector<Block>& list = blocks;
  const int64_t items = static_cast<int64_t>(list.size()) * kv_heads;
  const int64_t work = 2 * total * dim * kv_heads / items;
  ctx.pool.ParallelFor(items, GrainFor(work), [&](int64_t begin, int64_t end, int) {
    thread_local Group group;
    for (int64_t item = begin; item < end; ++item) {
      const int64_t b = item / kv_heads;
      const int64_t last = static_cast<int64_t>(list.size()) - 1;
      body(list[b % 2 == 0 ? b / 2 : last - b / 2], item % kv_heads, group);
    }
  });
}

}  // namespace

void Run(const ops::QkDot& op, const LaunchContext& ctx) {
  const int64_t dim = op.q.cols();
  const int64_t kv_heads = op.k_pages.dim(1);
  const Geometry geometry{op.sequences, op.lengths.As<int32_t>(), op.q.dim(1) / kv_heads};
  ForEachGroup(geometry, op.q.rows(), kv_heads, dim, ctx,
               [&](const Block& block, int64_t kv_head, Group& g) {
                 float* q = Scratch(ScratchSlot::kInA, block.count * geometry.heads_per_kv * dim);
                 geometry.ForEachQuery(block, kv_head, g, [&](int i, int64_t row, int64_t head) {
                   ToFloats(RowAt(op.q, row, head), op.q.dtype, dim, q + i * dim);
                   g.q[i] = q + i * dim;
                   g.scores[i] = static_cast<float*>(RowAt(op.scores, row, head));
                 });
                 Scores(op.k_pages, geometry.Table(block), kv_head, op.scale, g);
               });
}

void Run(const ops::SoftmaxMask& op, const LaunchContext& ctx) {
  const int32_t* lengths = op.lengths.As<int32_t>();
  const int64_t heads = op.scores.dim(1);
  int64_t total = 0;
  for (int64_t t = 0; t < op.scores.rows(); ++t) total += lengths[t];
  const int64_t items = op.scores.rows() * heads;
  ctx.pool.ParallelFor(items, GrainFor(8 * total / op.scores.rows()),
                       [&](int64_t begin, int64_t end, int) {
                         for (int64_t i = begin; i < end; ++i) {
                           const int64_t t = i / heads;
                           HWY_DYNAMIC_DISPATCH(Softmax)
                           (static_cast<float*>(RowAt(op.scores, t, i % heads)), lengths[t]);
                         }
                       });
}

void Run(const ops::PvDot& op, const LaunchContext& ctx) {
  const int64_t dim = op.out.cols();
  const int64_t kv_heads = op.v_pages.dim(1);
  const Geometry geometry{op.sequences, op.lengths.As<int32_t>(), op.out.dim(1) / kv_heads};
  ForEachGroup(geometry, op.out.rows(), kv_heads, dim, ctx,
               [&](const Block& block, int64_t kv_head, Group& g) {
                 float* out =
                     Scratch(ScratchSlot::kOutA, block.count * geometry.heads_per_kv * dim);
                 geometry.ForEachQuery(block, kv_head, g, [&](int i, int64_t row, int64_t head) {
                   g.scores[i] = static_cast<float*>(RowAt(op.probs, row, head));
                   g.out[i] = out + i * dim;
                 });
                 Mix(op.v_pages, geometry.Table(block), kv_head, g);
                 geometry.ForEachQuery(block, kv_head, g, [&](int i, int64_t row, int64_t head) {
                   FromFloats(out + i * dim, dim, op.out.dtype, RowAt(op.out, row, head));
                 });
               });
}

void Run(const ops::Attention& op, const LaunchContext& ctx) {
  const int64_t dim = op.q.cols();
  const int64_t kv_heads = op.k_pages.dim(1);
  const int32_t* lengths = op.lengths.As<int32_t>();
  const Geometry geometry{op.sequences, lengths, op.q.dim(1) / kv_heads};
  ForEachGroup(geometry, op.q.rows(), kv_heads, dim, ctx,
               [&](const Block& block, int64_t kv_head, Group& g) {
                 const int64_t num = block.count * geometry.heads_per_kv;
                 const int64_t length =
                     *std::max_element(lengths + block.row, lengths + block.row + block.count);
                 float* q = Scratch(ScratchSlot::kInA, num * dim);
                 float* out = Scratch(ScratchSlot::kOutA, num * dim);
                 float* scores = Scratch(ScratchSlot::kWork, num * length);
                 geometry.ForEachQuery(block, kv_head, g, [&](int i, int64_t row, int64_t head) {
                   ToFloats(RowAt(op.q, row, head), op.q.dtype, dim, q + i * dim);
                   g.q[i] = q + i * dim;
                   g.scores[i] = scores + i * length;
                   g.out[i] = out + i * dim;
                 });
                 Scores(op.k_pages, geometry.Table(block), kv_head, op.scale, g);
                 for (int i = 0; i < g.num; ++i)
                   HWY_DYNAMIC_DISPATCH(Softmax)(g.scores[i], g.lengths[i]);
                 Mix(op.v_pages, geometry.Table(block), kv_head, g);
                 geometry.ForEachQuery(block, kv_head, g, [&](int i, int64_t row, int64_t head) {
                   FromFloats(out + i * dim, dim, op.out.dtype, RowAt(op.out, row, head));
                 });
               });
}

}  // namespace qwend::cpu
#endif
