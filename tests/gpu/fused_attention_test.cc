// The fused plan's attention on CUDA against its parts on the CPU backend, what it writes to the
// pages, and each row's bits alone against its bits in a batch.
#include <algorithm>
#include <numeric>

#include "tests/gpu/twin.h"

namespace qwend::gpu {
namespace {

using Side = Twin::Side;

class FusedAttention : public TwinTest {};

// One row a sequence, their pages dealt out in a shuffled order.
struct Decode {
  int heads, kv_heads, dim, rotary_dim;
  bool norms, gated;
  std::vector<int32_t> new_slots{};  // of each row
  Handle q{}, k{}, v{}, q_weight{}, k_weight{}, cos{}, sin{}, k_pages{}, v_pages{}, slots{}, seen{},
      out{}, row_sequence{}, positions{}, block_table{};

  void Fill(Twin& t, const std::vector<int>& lengths) {
    const int rows = static_cast<int>(lengths.size());
    const int longest = *std::max_element(lengths.begin(), lengths.end());
    const auto pages_of = [](int length) { return (length + kPageTokens - 1) / kPageTokens; };
    int pages = 3;  // that no row uses
    for (const int length : lengths) pages += pages_of(length);
    std::vector<int32_t> order(pages), sequence(rows), position;
    std::iota(order.begin(), order.end(), 0);
    std::iota(sequence.begin(), sequence.end(), 0);
    std::shuffle(order.begin(), order.end(), t.random());
    std::vector<int32_t> table(rows * pages_of(longest), order[0]);
    auto next = order.begin() + 3;
    for (int r = 0; r < rows; ++r) {
      const auto at = table.begin() + r * pages_of(longest);
      std::copy_n(next, pages_of(lengths[r]), at);
      next += pages_of(lengths[r]);
      position.push_back(lengths[r] - 1);
      new_slots.push_back(at[position[r] / kPageTokens] * kPageTokens + position[r] % kPageTokens);
    }
    row_sequence = t.Ints(sequence, {rows});
    positions = t.Ints(position, {rows});
    block_table = t.Ints(table, {rows, pages_of(longest)});
    q = t.Random(DType::kF32, {rows, heads * per_head()});
    k = t.Random(DType::kF32, {rows, kv_heads * dim});
    v = t.Random(DType::kF32, {rows, kv_heads * dim});
    q_weight = t.Random(DType::kBF16, {dim}, 0.3f);
    k_weight = t.Random(DType::kF32, {dim}, 0.3f);
    cos = t.Random(DType::kF32, {longest, rotary_dim / 2}, 0.8f);
    sin = t.Random(DType::kF32, {longest, rotary_dim / 2}, 0.8f);
    k_pages = t.Pages(pages, kv_heads, dim);
    v_pages = t.Pages(pages, kv_heads, dim);
  }
  void Outputs(Twin& t, int rows) {
    slots = t.Poisoned(DType::kI32, {rows});
    seen = t.Poisoned(DType::kI32, {rows});
    out = t.Poisoned(DType::kF32, {rows, heads * dim});
  }
  int per_head() const { return gated ? 2 * dim : dim; }
  // As engine/models/decoder.cc builds it.
  ops::DecodeAttention On(const Side& view, int first, int rows) const {
    const auto cut = [&](Handle h) { return view(h).Slice(0, first, rows); };
    StepSequences sequences;
    sequences.row_sequence = view(row_sequence).Slice(0, 0, rows);
    sequences.positions = cut(positions);
    sequences.block_table = cut(block_table);
    const TensorView q_and_gate = cut(q).SplitLast(heads, per_head()),
                     query = q_and_gate.Slice(2, 0, dim), key = cut(k).SplitLast(kv_heads, dim),
                     value = cut(v).SplitLast(kv_heads, dim),
                     attended = view(out).SplitLast(heads, dim);
    ops::DecodeAttention op{
        .mask = {.slots = view(slots), .lengths = view(seen), .sequences = sequences},
        .rope = {.q = query,
                 .k = key,
                 .cos = view(cos),
                 .sin = view(sin),
                 .positions = sequences.positions},
        .update = {.k = key,
                   .v = value,
                   .k_pages = view(k_pages),
                   .v_pages = view(v_pages),
                   .slots = view(slots)},
        .attention = {.out = attended,
                      .q = query,
                      .k_pages = view(k_pages),
                      .v_pages = view(v_pages),
                      .lengths = view(seen),
                      .sequences = sequences,
                      .scale = 1.0f / std::sqrt(static_cast<float>(dim))}};
    if (norms) {
      op.norm = {.q = query,
                 .k = key,
                 .q_weight = view(q_weight),
                 .k_weight = view(k_weight),
                 .weight_offset = 1.0f};
    }
    if (gated) op.gate = {.x = attended, .gate = q_and_gate.Slice(2, dim, dim)};
    return op;
  }

  // CUDA's new rows of a pool against the CPU's, within one rounding to bf16; all else as it was.
  // Returns how many elements differ.
  int ExpectOnlyNewRows(Twin& t, Handle pages, std::vector<float> before,
                        const std::string& what) const {
    const std::vector<float> want = t.Cpu(pages), got = t.Cuda(pages);
    int differ = 0;
    for (const int slot : new_slots) {
      for (int64_t i = 0; i < kv_heads * dim; ++i) {
        const int64_t row = int64_t{slot} / kPageTokens * kv_heads + i / dim;
        const int64_t at = (row * kPageTokens + slot % kPageTokens) * dim + i % dim;
        EXPECT_NEAR(got[at], want[at], std::abs(want[at]) / 127 + 1e-6) << what << " slot " << slot;
        if (got[at] != want[at]) ++differ;
        before[at] = got[at];
      }
    }
    EXPECT_TRUE(got == before) << what << ": written outside the new rows";
    return differ;
  }
};

TEST_F(FusedAttention, DecodeAttention) {
  const std::vector<int> lengths = {65, 1, 2100, 2, 63, 5000, 64, 127, 1024, 500};
  const int rows = static_cast<int>(lengths.size());
  int variant = 0;
  for (const int dim : {16, 32, 64, 128, 256}) {
    for (const auto& [heads, kv_heads] :
         {std::pair{1, 1}, {4, 4}, {8, 4}, {8, 2}, {16, 2}, {16, 1}, {6, 2}}) {
      twin_ =
          std::make_unique<Twin>(*cpu_, *cuda_, OnCuda(), twin_->random()());  // pools are large
      Twin& t = *twin_;
      Decode d{.heads = heads,
               .kv_heads = kv_heads,
               .dim = dim,
               .rotary_dim = (variant & 1) != 0 ? dim / 4 : dim,
               .norms = (variant & 2) == 0,
               .gated = (variant & 4) == 0};
      ++variant;
      d.Fill(t, lengths);
      d.Outputs(t, rows);
      const std::vector<float> keys = t.Cuda(d.k_pages), values = t.Cuda(d.v_pages);
      t.Run([&](const Side& v) { return d.On(v, 0, rows); });
      const std::string what = "dim " + std::to_string(dim) + " heads " + std::to_string(heads) +
                               ", " + std::to_string(kv_heads) + (d.norms ? " normed" : "") +
                               (d.gated ? " gated" : "") + " rotary " +
                               std::to_string(d.rotary_dim);
      EXPECT_EQ(d.ExpectOnlyNewRows(t, d.v_pages, values, what + " values"), 0);
      const int differ = d.ExpectOnlyNewRows(t, d.k_pages, keys, what + " keys");
      EXPECT_LE(differ, 2 + rows * kv_heads * dim / 500) << what;
      // A key that is rounded the other way moves its score.
      ExpectRowsClose(d.out, rows, differ == 0 ? 1e-5 : 5e-3, what);
    }
  }
}

TEST_F(FusedAttention, Bits) {
  Twin& t = *twin_;
  for (const auto& [heads, kv_heads, dim] : {std::tuple{8, 2, 256}, {14, 2, 64}, {16, 8, 128}}) {
    Decode d{.heads = heads,
             .kv_heads = kv_heads,
             .dim = dim,
             .rotary_dim = dim / 4,
             .norms = true,
             .gated = dim == 256};
    std::vector<int> lengths(64);
    for (int& length : lengths) length = 1 + static_cast<int>(t.random()() % 200);
    lengths.front() = 2100;
    lengths.back() = 100;
    d.Fill(t, lengths);
    const Handle q = d.q, k = d.k;  // which the parts change in place
    d.q = t.Poisoned(DType::kF32, {64, heads * d.per_head()});
    d.k = t.Poisoned(DType::kF32, {64, kv_heads * dim});
    ExpectRowBits(
        [&](int first, int count) {
          t.Restore(d.q, q);
          t.Restore(d.k, k);
          d.Outputs(t, count);
          t.Run([&](const Side& v) { return d.On(v, first, count); });
        },
        [&](int row) { return t.Cuda(Rows(d.out, row, 1)); });
  }
}

}  // namespace
}  // namespace qwend::gpu
