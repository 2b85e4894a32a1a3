// The fused plan's norm and head with the sampler behind it on CUDA against their parts on the CPU
// backend, and each row's bits alone against its bits in a batch.
#include <algorithm>
#include <numeric>

#include "tests/gpu/twin.h"

namespace qwend::gpu {
namespace {

using Side = Twin::Side;

class FusedHead : public TwinTest {
 protected:
  Handle Sampling(const std::vector<SamplingRow>& rows) {
    return twin_->Bytes(rows.data(), {std::ssize(rows), static_cast<int64_t>(sizeof(SamplingRow))});
  }
  void ExpectTokens(Handle tokens, const std::vector<float>& want, const std::string& what) {
    EXPECT_EQ(twin_->Cpu(tokens), want) << what << " on the CPU";
    EXPECT_EQ(twin_->Cuda(tokens), want) << what;
  }
};

// A head over rows of x. Random weights give logits of about 1; planted ones any that is wanted.
struct Head {
  int k, vocab;
  int limit = 0;
  std::vector<float> weights;     // [vocab, k]
  std::vector<float> directions;  // [64, k]: what a weight must be for a logit of 1
  Handle x{}, norm_weight{}, normed{}, weight{}, rows{}, best{}, logits{}, tokens{};

  Head(Twin& t, int k, int vocab) : k(k), vocab(vocab), limit(vocab - 37) {
    std::normal_distribution<float> normal;
    std::vector<float> xs(64 * k), scales(k);
    for (float& v : xs) v = normal(t.random());
    for (int r = 0; r < 64; ++r) xs[r * k] = 0.1f + std::abs(xs[r * k]);
    for (float& v : scales) v = 0.2f * normal(t.random());
    scales[0] = 0.0f;
    for (int r = 0; r < 64; ++r) {
      float squares = 0, size = 0;
      for (int i = 0; i < k; ++i) squares += xs[r * k + i] * xs[r * k + i];
      for (int i = 0; i < k; ++i) {
        directions.push_back(xs[r * k + i] / std::sqrt(squares / k) * (1.0f + scales[i]));
        size += directions.back() * directions.back();
      }
      for (int i = 0; i < k; ++i) directions[r * k + i] /= size;
    }
    // Even spread, for speed: four numbers of 16 bits a draw.
    weights.resize(static_cast<size_t>(vocab) * k);
    const float unit = std::sqrt(3.0f / k) / 32768.0f;
    for (size_t i = 0; i < weights.size(); i += 4) {
      uint64_t bits = t.random()();
      for (size_t j = i; j < std::min(i + 4, weights.size()); ++j, bits >>= 16)
        weights[j] = static_cast<int16_t>(bits & 0xffff) * unit;
    }
    x = t.Floats(xs, {64, k});
    norm_weight = t.Floats(scales, {k});
  }
  void Plant(int id, int row, float logit) {
    for (int i = 0; i < k; ++i)
      weights[static_cast<size_t>(id) * k + i] = directions[row * k + i] * logit;
  }
  void Outputs(Twin& t, int count) {
    normed = t.Poisoned(DType::kF32, {count, k});
    best = t.Bytes(std::vector<char>(count * 8).data(), {count, 8});
    logits = t.Poisoned(DType::kF32, {count, vocab});
    tokens = t.Poisoned(DType::kI32, {count});
  }
  void Run(Twin& t, int first, int count) const {
    const auto cut = [&](const TensorView& v) { return v.Slice(0, first, count); };
    t.Run([&](const Side& v) {
      return ops::NormHead{.norm = {.out = v(normed),
                                    .x = cut(v(x)),
                                    .weight = v(norm_weight),
                                    .weight_offset = 1.0f},
                           .head = {.out = v(logits), .x = v(normed), .weight = v(weight)},
                           .rows = cut(v(rows)),
                           .best = v(best),
                           .vocab_limit = limit};
    });
    t.Run([&](const Side& v) {
      return ops::TokenSampler{.tokens = v(tokens),
                               .logits = v(logits),
                               .rows = cut(v(rows)),
                               .vocab_limit = limit,
                               .best = v(best)};
    });
    EXPECT_EQ(t.Cuda(best), std::vector<float>(count * 8)) << "the best must be taken";
  }
};

TEST_F(FusedHead, TokensAndLogits) {
  struct Case {
    int k, vocab;
    std::vector<int> counts;
    DType weight = DType::kBF16;
  };
  const Case cases[] = {{264, 1003, {1, 2, 3, 9, 33, 64}},
                        {264, 1003, {1, 9}, DType::kF32},
                        {1024, 1000, {1, 2, 4, 5, 8, 64}},
                        {1024, 248320, {1, 2, 8}},
                        {896, 151936, {1, 3}}};
  for (const Case& c : cases) {
    twin_ = std::make_unique<Twin>(*cpu_, *cuda_, OnCuda(), twin_->random()());  // tables are large
    Twin& t = *twin_;
    Head h(t, c.k, c.vocab);
    std::vector<int> ids(h.limit);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), t.random());
    std::swap(*std::find(ids.begin(), ids.end(), h.limit - 1), ids[0]);
    std::swap(*std::find(ids.begin(), ids.end(), 0), ids[7]);
    std::vector<SamplingRow> rows(64);
    std::vector<float> want(64);  // -2: whatever the sampler draws from these logits by itself
    for (int r = 0; r < 64; ++r) {
      const int a = ids[2 * r], b = ids[2 * r + 1], kind = r % 8;
      rows[r] = {.seed = 77, .position = r};
      h.Plant(a, r, 20.0f);
      want[r] = static_cast<float>(a);
      if (kind == 1) {  // the best is banned, among others
        rows[r].num_banned = SamplingRow::kMaxBanned;
        for (int i = 0; i < SamplingRow::kMaxBanned; ++i) rows[r].banned[i] = ids[300 + i];
        rows[r].banned[40] = b;
        h.Plant(b, r, 30.0f);
      } else if (kind == 2) {  // the best is beyond the limit
        h.Plant(h.limit + r / 8, r, 30.0f);
      } else if (kind == 3) {
        rows[r].keep_logits = 1;
        h.Plant(b, r, 15.0f);
      } else if (kind == 4) {
        rows[r].temperature = 0.5f;
      } else if (kind == 5) {  // a tie
        h.Plant(b, r, 20.0f);
        want[r] = static_cast<float>(std::min(a, b));
      } else if (kind == 6) {
        rows[r].temperature = 1.0f;
        h.Plant(a, r, 0.0f);
        want[r] = -2.0f;
      } else if (kind == 7) {
        rows[r] = {.temperature = 0.8f,
                   .top_k = 1,
                   .seed = 5,
                   .position = r,
                   .num_banned = 1,
                   .banned = {b}};
        h.Plant(b, r, 30.0f);
      }
    }
    h.rows = Sampling(rows);
    h.weight = t.Weight(c.weight, c.vocab, c.k, h.weights);
    const bool fused = OnCuda() && c.weight == DType::kBF16;
    for (const int count : c.counts) {
      const std::string what = "k " + std::to_string(c.k) + " vocab " + std::to_string(c.vocab) +
                               " rows " + std::to_string(count);
      h.Outputs(t, count);
      h.Run(t, 0, count);
      const std::vector<float> got = t.Cuda(h.tokens);
      for (int r = 0; r < count; ++r) {
        const Handle row = Rows(h.logits, r, 1);
        const std::string which = what + " row " + std::to_string(r);
        if (rows[r].temperature != 0.0f || rows[r].keep_logits != 0) {
          t.ExpectClose(row, 2e-5, which + " logits");
        } else if (fused) {
          for (const float logit : t.Cuda(row))
            ASSERT_TRUE(std::isnan(logit)) << which << ": logits that nobody wants were written";
        }
        if (want[r] >= 0.0f) {
          EXPECT_EQ(got[r], want[r]) << which;
          EXPECT_EQ(t.Cpu(h.tokens)[r], want[r]) << which << " on the CPU";
          continue;
        }
        const Handle alone = t.Poisoned(DType::kI32, {1}), params = Rows(h.rows, r, 1);
        t.Run([&](const Side& v) {
          return ops::TokenSampler{
              .tokens = v(alone), .logits = v(row), .rows = v(params), .vocab_limit = h.limit};
        });
        EXPECT_EQ(got[r], t.Cuda(alone)[0]) << which << " without `best`";
      }
      h.Run(t, 0, count);
      EXPECT_EQ(t.Cuda(h.tokens), got) << what << " again";
    }
  }
}

// A weight that is NaN, or whose product overflows, spoils every row, wherever it lies; an x that
// is NaN only its own row. The next step is clean.
TEST_F(FusedHead, Poison) {
  Twin& t = *twin_;
  const int count = 9;
  std::vector<SamplingRow> rows(64);
  for (int r = 0; r < 64; ++r) {
    rows[r] = {.temperature = r % 3 == 1 ? 0.5f : 0.0f, .position = r, .keep_logits = r % 3 == 2};
    rows[r].num_banned = 1;
    rows[r].banned[0] = 7;
  }
  Head h(t, 264, 1003);
  std::vector<float> clean;
  for (int r = 0; r < count; ++r) {
    clean.push_back(20.0f + 100 * r);
    h.Plant(20 + 100 * r, r, 20.0f);
  }
  h.rows = Sampling(rows);
  h.Outputs(t, count);
  const Handle good = t.Weight(DType::kBF16, 1003, 264, h.weights);
  const std::vector<float> invalid(count, static_cast<float>(kInvalidToken));
  for (const auto& [id, value] : {std::pair{400, std::nanf("")},
                                  {1002, std::nanf("")},
                                  {7, std::nanf("")},
                                  {1001, INFINITY},
                                  {3, INFINITY}}) {
    std::vector<float> weights = h.weights;
    weights[static_cast<size_t>(id) * 264] = value;
    h.weight = t.Weight(DType::kBF16, 1003, 264, weights);
    h.Run(t, 0, count);
    ExpectTokens(h.tokens, invalid, "id " + std::to_string(id));
    h.weight = good;
    h.Run(t, 0, count);
    ExpectTokens(h.tokens, clean, "after id " + std::to_string(id));
  }
  std::vector<float> xs = t.Cpu(h.x);
  xs[4 * 264 + 100] = std::nanf("");
  h.x = t.Floats(xs, {64, 264});
  h.Run(t, 0, count);
  clean[4] = static_cast<float>(kInvalidToken);
  ExpectTokens(h.tokens, clean, "one row of x");
}

TEST_F(FusedHead, Bits) {
  Twin& t = *twin_;
  Head h(t, 1024, 30000);
  std::vector<SamplingRow> rows(64);
  for (SamplingRow& row : rows) row.keep_logits = 1;
  h.rows = Sampling(rows);
  h.weight = t.Weight(DType::kBF16, h.vocab, h.k, h.weights);
  ExpectRowBits(
      [&](int first, int count) {
        h.Outputs(t, count);
        h.Run(t, first, count);
      },
      [&](int row) {
        std::vector<float> all = t.Cuda(Rows(h.logits, row, 1));
        all.push_back(t.Cuda(h.tokens)[row]);
        return all;
      });
}

}  // namespace
}  // namespace qwend::gpu
