// The fused plan's projections and linear mixer on CUDA against their parts on the CPU backend, and
// each row's bits alone against its bits in a batch. What lies between the parts may stay unwritten
// and is not looked at.
#include <algorithm>
#include <numeric>

#include "tests/gpu/twin.h"

namespace qwend::gpu {
namespace {

using Side = Twin::Side;

constexpr int kRowCounts[] = {1, 2, 3, 4, 5, 8, 9, 33, 64};
// Tensor cores take x as two bf16 that keep 16 bits of it. Few outputs can be much smaller than
// what they are sums of.
double Projected(int outputs) { return outputs < 16 ? 1e-4 : 2e-5; }
constexpr double kPlain = 5e-6;  // where the parts run one by one

class FusedOps : public TwinTest {};

std::vector<float> Join(std::vector<float> a, const std::vector<float>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Norm {
  Handle x{}, weight{}, out{};
  float offset = 0.0f;
  ops::RmsNorm On(const Side& v) const {
    return {.out = v(out), .x = v(x), .weight = v(weight), .weight_offset = offset};
  }
};

struct Projections {
  Norm norm{};
  std::vector<Handle> weights{}, biases{}, outs{};
  ops::NormProjections On(const Side& v) const {
    ops::NormProjections op{.norm = norm.On(v), .count = static_cast<int>(weights.size())};
    for (int i = 0; i < op.count; ++i) {
      op.projections[i] = {
          .out = v(outs[i]), .x = v(norm.out), .weight = v(weights[i]), .bias = v(biases[i])};
    }
    return op;
  }
};

TEST_F(FusedOps, NormProjections) {
  struct Case {
    int k;
    std::vector<int> n;
    DType weight = DType::kBF16, norm = DType::kF32;
  };
  const Case cases[] = {{1024, {6144, 2048, 32}},
                        {896, {1024, 512, 512}},
                        {1024, {4096, 512, 512}},
                        {64, {40, 8, 3}},
                        {520, {100, 7}},
                        {2048, {2048}},
                        {72, {5}},
                        {64, {16, 16, 16, 17}},
                        {75, {33, 5}},
                        {64, {40, 8}, DType::kF16},
                        {64, {40, 8}, DType::kF32},
                        {64, {40, 8}, DType::kBF16, DType::kBF16}};
  int variant = 0;
  for (const Case& c : cases) {
    Twin& t = *twin_;
    const Handle norm_weight = t.Random(c.norm, {c.k}, 0.5f);
    std::vector<Handle> weights, biases;
    for (const int n : c.n) {
      weights.push_back(Projection(n, c.k, c.weight));
      biases.push_back(t.Random(DType::kBF16, {n}));
    }
    for (const int rows : kRowCounts) {
      Projections p{.norm = {.x = t.Random(DType::kF32, {rows, c.k}, 3.0f),
                             .weight = norm_weight,
                             .out = t.Poisoned(DType::kF32, {rows, c.k}),
                             .offset = variant % 2 == 0 ? 0.0f : 1.0f},
                    .weights = weights,
                    .biases = variant / 2 % 2 == 0 ? std::vector<Handle>(4) : biases};
      ++variant;
      for (const int n : c.n) p.outs.push_back(t.Poisoned(DType::kF32, {rows, n}));
      t.Run([&](const Side& v) { return p.On(v); });
      for (size_t i = 0; i < c.n.size(); ++i) {
        t.ExpectClose(p.outs[i], Projected(rows * c.n[i]),
                      "rows " + std::to_string(rows) + " k " + std::to_string(c.k) + " n " +
                          std::to_string(c.n[i]) + " of type " + Name(c.weight));
      }
    }
  }
}

// Rows of x and of the outputs lie in wider tensors; one column off, x cannot be read 16 bytes at a
// time. Above 64 rows the plain projections take x rounded to bf16.
TEST_F(FusedOps, NormProjectionsOfStridedRows) {
  const int k = 520, n0 = 100, n1 = 7, wide = n0 + n1 + 9;
  for (const auto& [rows, begin] : {std::pair{1, 8}, {5, 8}, {33, 8}, {5, 1}, {70, 8}}) {
    Twin& t = *twin_;
    const Handle x = t.Random(DType::kF32, {rows, k + 16}),
                 out = t.Poisoned(DType::kF32, {rows, wide});
    const Projections p{.norm = {.x = Columns(x, begin, k),
                                 .weight = t.Random(DType::kF32, {k}),
                                 .out = t.Poisoned(DType::kF32, {rows, k})},
                        .weights = {Projection(n0, k), Projection(n1, k)},
                        .biases = {{}, t.Random(DType::kBF16, {n1})},
                        .outs = {Columns(out, 1, n0), Columns(out, n0 + 3, n1)}};
    t.Run([&](const Side& v) { return p.On(v); });
    const std::string what = "rows " + std::to_string(rows) + " begin " + std::to_string(begin);
    for (const Handle h : p.outs) t.ExpectClose(h, rows > 64 ? 4e-3 : Projected(rows * n1), what);
    const std::vector<float> got = t.Cuda(out);
    for (size_t i = 0; i < got.size(); ++i) {
      const int column = static_cast<int>(i % wide);
      const bool inside = (column >= 1 && column <= n0) || (column >= n0 + 3 && column < wide - 6);
      ASSERT_EQ(std::isnan(got[i]), !inside) << what << " column " << column;
    }
  }
}

struct GateUp {
  Norm norm{};
  Handle gate_weight{}, up_weight{}, gate{}, up{}, out{}, bias{};
  ops::NormGateUpSilu On(const Side& v) const {
    const TensorView x = v(norm.out);
    return {.norm = norm.On(v),
            .gate = {.out = v(gate), .x = x, .weight = v(gate_weight), .bias = v(bias)},
            .up = {.out = v(up), .x = x, .weight = v(up_weight)},
            .act = {.out = v(out), .gate = v(gate), .up = v(up)}};
  }
};

TEST_F(FusedOps, NormGateUpSilu) {
  int variant = 0;
  for (const auto& [k, n, bias] : {std::tuple{1024, 3584, false},
                                   {896, 4864, false},
                                   {48, 20, false},
                                   {520, 33, false},
                                   {64, 24, true}}) {
    Twin& t = *twin_;
    GateUp g{.norm = {.weight = t.Random(DType::kF32, {k}, 0.5f)},
             .gate_weight = Projection(n, k),
             .up_weight = Projection(n, k)};
    if (bias) g.bias = t.Random(DType::kBF16, {n});
    for (const int rows : kRowCounts) {
      g.norm.x = t.Random(DType::kF32, {rows, k}, 3.0f);
      g.norm.out = t.Poisoned(DType::kF32, {rows, k});
      g.norm.offset = variant++ % 2 == 0 ? 1.0f : 0.0f;
      for (Handle* h : {&g.gate, &g.up, &g.out}) *h = t.Poisoned(DType::kF32, {rows, n});
      t.Run([&](const Side& v) { return g.On(v); });
      t.ExpectClose(
          g.out, 2e-5,
          "rows " + std::to_string(rows) + " k " + std::to_string(k) + " n " + std::to_string(n));
    }
  }
}

TEST_F(FusedOps, GemvResidual) {
  int variant = 0;
  for (const auto& [n, k] : {std::pair{1024, 2048},
                             {1024, 3584},
                             {896, 4864},
                             {896, 1024},
                             {24, 72},
                             {33, 5200},
                             {9, 8192},
                             {16, 9000},
                             {20, 77}}) {
    Twin& t = *twin_;
    const Handle weight = Projection(n, k), some_bias = t.Random(DType::kBF16, {n});
    for (const int rows : kRowCounts) {
      const bool in_place = variant % 2 == 0;
      const Handle bias = variant / 2 % 2 == 0 ? Handle{} : some_bias;
      ++variant;
      const Handle x = t.Random(DType::kF32, {rows, k}), a = t.Random(DType::kF32, {rows, n}),
                   b = t.Poisoned(DType::kF32, {rows, n}),
                   out = in_place ? a : t.Poisoned(DType::kF32, {rows, n});
      const std::vector<float> before = t.Cuda(a);
      t.Run([&](const Side& v) {
        return ops::GemvResidual{
            .gemv = {.out = v(b), .x = v(x), .weight = v(weight), .bias = v(bias)},
            .add = {.out = v(out), .a = v(a), .b = v(b)}};
      });
      const std::string what = "rows " + std::to_string(rows) + " n " + std::to_string(n) + " k " +
                               std::to_string(k) + (in_place ? " in place" : "");
      t.ExpectClose(out, k > 8192 || k % 8 != 0 ? kPlain : 2e-5, what);
      if (in_place) continue;
      EXPECT_TRUE(t.Cuda(a) == before) << what << ": the residual changed";
    }
  }
}

struct Mixer {
  int key_heads, value_heads, key_dim, value_dim, width = 4;
  Handle x{}, conv_weight{}, conv_state{}, conv_out{}, ba{}, beta{}, decay{}, a_log{}, dt_bias{},
      state{}, rule_out{}, z{}, norm_weight{}, out{}, query_start{}, state_slot{};
  int keys() const { return key_heads * key_dim; }
  int values() const { return value_heads * value_dim; }
  int channels() const { return 2 * keys() + values(); }

  // Weights, and the memory of `slots` sequences.
  void Fill(Twin& t, int slots) {
    conv_weight = t.Random(DType::kBF16, {channels(), width}, 0.4f);
    conv_state = t.Random(DType::kF32, {slots, width - 1, channels()});
    a_log = t.Random(DType::kF32, {value_heads});
    dt_bias = t.Random(DType::kBF16, {value_heads});
    state = t.Random(DType::kF32, {slots, value_heads, key_dim, value_dim}, 0.3f);
    norm_weight = t.Random(DType::kF32, {value_dim});
  }
  void Inputs(Twin& t, int rows) {
    x = t.Random(DType::kF32, {rows, channels()});
    ba = t.Random(DType::kF32, {rows, 2 * value_heads}, 2.0f);
    z = t.Random(DType::kF32, {rows, values()});
    std::vector<int32_t> starts(rows + 1);
    std::iota(starts.begin(), starts.end(), 0);
    query_start = t.Ints(starts, {rows + 1});
  }
  void Outputs(Twin& t, int rows) {
    conv_out = t.Poisoned(DType::kF32, {rows, channels()});
    beta = t.Poisoned(DType::kF32, {rows, value_heads});
    decay = t.Poisoned(DType::kF32, {rows, value_heads});
    rule_out = t.Poisoned(DType::kF32, {rows, values()});
    out = t.Poisoned(DType::kF32, {rows, values()});
  }
  // As engine/models/decoder.cc builds it.
  ops::LinearAttention On(const Side& v, int first, int rows) const {
    const auto cut = [&](Handle h) { return v(h).Slice(0, first, rows); };
    StepSequences sequences;
    sequences.query_start = v(query_start).Slice(0, 0, rows + 1);
    sequences.state_slot = cut(state_slot);
    const TensorView mixed = v(conv_out), delta = v(rule_out).SplitLast(value_heads, value_dim);
    return {.conv = {.out = mixed,
                     .x = cut(x),
                     .weight = v(conv_weight),
                     .state = v(conv_state),
                     .sequences = sequences},
            .gates = {.beta = v(beta),
                      .log_decay = v(decay),
                      .a = cut(ba).Slice(1, value_heads, value_heads),
                      .b = cut(ba).Slice(1, 0, value_heads),
                      .a_log = v(a_log),
                      .dt_bias = v(dt_bias)},
            .rule = {.out = delta,
                     .q = mixed.Slice(1, 0, keys()).SplitLast(key_heads, key_dim),
                     .k = mixed.Slice(1, keys(), keys()).SplitLast(key_heads, key_dim),
                     .v = mixed.Slice(1, 2 * keys(), values()).SplitLast(value_heads, value_dim),
                     .beta = v(beta),
                     .log_decay = v(decay),
                     .state = v(state),
                     .sequences = sequences,
                     .scale = 1.0f / std::sqrt(static_cast<float>(key_dim))},
            .norm = {.out = v(out).SplitLast(value_heads, value_dim),
                     .x = delta,
                     .z = cut(z).SplitLast(value_heads, value_dim),
                     .weight = v(norm_weight)}};
  }
};

TEST_F(FusedOps, LinearAttention) {
  const Mixer cases[] = {{16, 16, 128, 128}, {2, 4, 16, 16},     {4, 4, 32, 64},    {2, 2, 96, 48},
                         {2, 4, 64, 128},    {16, 32, 128, 128}, {4, 4, 32, 64, 2}, {1, 9, 16, 16}};
  for (Mixer m : cases) {
    for (const int rows : {1, 3, 8}) {
      Twin& t = *twin_;
      const int slots = rows + 3;
      m.Fill(t, slots);
      m.Inputs(t, rows);
      m.Outputs(t, rows);
      std::vector<int32_t> slot(slots);
      std::iota(slot.begin(), slot.end(), 0);
      std::shuffle(slot.begin(), slot.end(), t.random());
      m.state_slot = t.Ints({slot.begin(), slot.begin() + rows}, {rows});
      const std::vector<float> before = t.Cuda(m.state);
      t.Run([&](const Side& v) { return m.On(v, 0, rows); });
      const std::string what = "heads " + std::to_string(m.key_heads) + ", " +
                               std::to_string(m.value_heads) + " dims " +
                               std::to_string(m.key_dim) + ", " + std::to_string(m.value_dim) +
                               " rows " + std::to_string(rows);
      ExpectRowsClose(m.out, rows, 2e-5, what);
      t.ExpectEqual(m.conv_state, what + " convolution state");
      t.ExpectClose(m.state, 1e-5, what + " state");
      const std::vector<float> after = t.Cuda(m.state);
      const int64_t size = std::ssize(after) / slots;
      for (int i = rows; i < slots; ++i) {
        EXPECT_TRUE(std::equal(after.begin() + slot[i] * size, after.begin() + (slot[i] + 1) * size,
                               before.begin() + slot[i] * size))
            << what << ": slot " << slot[i] << " belongs to no row";
      }
    }
  }
}

TEST_F(FusedOps, BitsOfProjections) {
  Twin& t = *twin_;
  const int k = 1024;
  const Handle x = t.Random(DType::kF32, {64, k}), norm_weight = t.Random(DType::kF32, {k});
  Norm norm{.weight = norm_weight};
  const auto take = [&](int first, int count) {
    norm.x = Rows(x, first, count);
    norm.out = t.Poisoned(DType::kF32, {count, k});
  };
  Projections p{.weights = {Projection(6144, k), Projection(2048, k), Projection(32, k)},
                .biases = {{}, t.Random(DType::kBF16, {2048}), {}}};
  ExpectRowBits(
      [&](int first, int count) {
        take(first, count);
        p.norm = norm;
        p.outs.clear();
        for (const int n : {6144, 2048, 32}) p.outs.push_back(t.Poisoned(DType::kF32, {count, n}));
        t.Run([&](const Side& v) { return p.On(v); });
      },
      [&](int row) {
        std::vector<float> all;
        for (const Handle h : p.outs) all = Join(std::move(all), t.Cuda(Rows(h, row, 1)));
        return all;
      });

  GateUp g{.gate_weight = Projection(3584, k), .up_weight = Projection(3584, k)};
  ExpectRowBits(
      [&](int first, int count) {
        take(first, count);
        g.norm = norm;
        for (Handle* h : {&g.gate, &g.up, &g.out}) *h = t.Poisoned(DType::kF32, {count, 3584});
        t.Run([&](const Side& v) { return g.On(v); });
      },
      [&](int row) { return t.Cuda(Rows(g.out, row, 1)); });

  for (const auto& [n, down] : {std::pair{1024, 3584}, {896, 4864}}) {
    const Handle wide = t.Random(DType::kF32, {64, down}), a = t.Random(DType::kF32, {64, n}),
                 weight = Projection(n, down);
    Handle out;
    ExpectRowBits(
        [&](int first, int count) {
          out = t.Poisoned(DType::kF32, {count, n});
          const Handle b = t.Poisoned(DType::kF32, {count, n}), some_x = Rows(wide, first, count),
                       some_a = Rows(a, first, count);
          t.Run([&](const Side& v) {
            return ops::GemvResidual{.gemv = {.out = v(b), .x = v(some_x), .weight = v(weight)},
                                     .add = {.out = v(out), .a = v(some_a), .b = v(b)}};
          });
        },
        [&](int row) { return t.Cuda(Rows(out, row, 1)); });
  }
}

TEST_F(FusedOps, BitsOfLinearAttention) {
  Twin& t = *twin_;
  Mixer m{16, 16, 128, 128};
  m.Fill(t, 64);
  m.Inputs(t, 64);
  std::vector<int32_t> slot(64);
  std::iota(slot.begin(), slot.end(), 0);
  std::shuffle(slot.begin(), slot.end(), t.random());
  m.state_slot = t.Ints(slot, {64});
  const Handle states = m.state, tails = m.conv_state;
  m.state = t.Poisoned(DType::kF32, {64, 16, 128, 128});
  m.conv_state = t.Poisoned(DType::kF32, {64, 3, m.channels()});
  int begin = 0;
  ExpectRowBits(
      [&](int first, int count) {
        begin = first;
        t.Restore(m.state, states);
        t.Restore(m.conv_state, tails);
        m.Outputs(t, count);
        t.Run([&](const Side& v) { return m.On(v, first, count); });
      },
      [&](int row) {
        const int at = slot[begin + row];
        return Join(Join(t.Cuda(Rows(m.out, row, 1)), t.Cuda(Rows(m.state, at, 1))),
                    t.Cuda(Rows(m.conv_state, at, 1)));
      });
}

}  // namespace
}  // namespace qwend::gpu
