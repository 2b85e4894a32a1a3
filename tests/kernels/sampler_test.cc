// TokenSampler against the reference's candidates, and its generator against published vectors.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/philox.h"
#include "tests/support/cpu.h"
#include "tests/support/reference/reference.h"
#include "tests/support/tensors.h"

namespace qwend::test {
namespace {

// The rows of SamplingRow that the operator reads, and where it writes tokens.
class Sampler {
 public:
  explicit Sampler(std::vector<SamplingRow> rows)
      : rows_(std::move(rows)), tokens_(DType::kI32, {static_cast<int64_t>(rows_.size())}) {}

  std::vector<int> Run(const TensorView& logits, int vocab_limit, int threads = 1) {
    tokens_.Poison();
    const auto count = static_cast<int64_t>(rows_.size());
    RunCpu(ops::TokenSampler{.tokens = tokens_,
                             .logits = logits,
                             .rows =
                                 TensorView::Of(rows_.data(), DType::kU8,
                                                {count, static_cast<int64_t>(sizeof(SamplingRow))}),
                             .vocab_limit = vocab_limit},
           threads);
    EXPECT_TRUE(tokens_.GuardsIntact());
    std::vector<int> tokens;
    for (int64_t t = 0; t < count; ++t) tokens.push_back(static_cast<int>(At(tokens_, t)));
    return tokens;
  }

 private:
  std::vector<SamplingRow> rows_;
  TestTensor tokens_;
};

int SampleOne(const TensorView& logits, const SamplingRow& row, int limit = 0) {
  return Sampler({row}).Run(logits, limit > 0 ? limit : static_cast<int>(logits.cols()))[0];
}

TestTensor Logits(const std::vector<double>& values) {
  return TestTensor(DType::kF32, {1, static_cast<int64_t>(values.size())}).Values(values);
}

TEST(Philox, MatchesThePublishedVectors) {
  EXPECT_EQ(Philox4x32(0, {{0, 0, 0, 0}}),
            (PhiloxWords{{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
  EXPECT_EQ(Philox4x32(~uint64_t{0}, {{~0u, ~0u, ~0u, ~0u}}),
            (PhiloxWords{{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
  EXPECT_EQ(Philox4x32(0x299f31d0a4093822u, {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}),
            (PhiloxWords{{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));
}

TEST(TokenSampler, GreedyTakesTheLargestAndTheLowestIdOnATie) {
  Rng rng;
  SCOPED_TRACE(rng.Trace());
  for (const DType type : {DType::kF32, DType::kBF16}) {
    for (const int vocab : {1, 2, 15, 16, 255, 256, 257, 1000, 5000}) {
      const TestTensor logits = TestTensor(type, {3, vocab}, 5).Normal(rng);
      Put(logits, 7, 1, rng.Int(0, vocab - 1));
      Put(logits, 7, 1, rng.Int(0, vocab - 1));
      const std::vector<int> tokens = Sampler({{}, {}, {}}).Run(logits, vocab, 3);
      for (int t = 0; t < 3; ++t) {
        EXPECT_EQ(tokens[t], reference::Candidates(logits, t, vocab, {})[0].first)
            << "row " << t << " of " << vocab;
      }
    }
  }
}

TEST(TokenSampler, LimitAndBannedIdsAreNeverSampled) {
  Rng rng;
  SCOPED_TRACE(rng.Trace());
  const int vocab = 700, limit = 600;
  const TestTensor logits = TestTensor(DType::kF32, {1, vocab}).Normal(rng);
  Put(logits, 50, 0, 650);  // beyond the limit
  Put(logits, 40, 0, 599);
  Put(logits, 39, 0, 3);
  Put(logits, 39, 0, 300);
  const TestTensor before = logits.Copy();
  SamplingRow row;
  EXPECT_EQ(SampleOne(logits, row, limit), 599);
  row.num_banned = 3;
  row.banned[0] = 599;
  row.banned[1] = 599;   // twice
  row.banned[2] = 5000;  // no such id
  EXPECT_EQ(SampleOne(logits, row, limit), 3);
  row.num_banned = 4;
  row.banned[3] = 3;
  EXPECT_EQ(SampleOne(logits, row, limit), 300);
  for (row.position = 0; row.position < 200; ++row.position) {
    row.temperature = 30.0f;
    const int token = SampleOne(logits, row, limit);
    EXPECT_LT(token, limit);
    EXPECT_NE(token, 599);
    EXPECT_NE(token, 3);
  }
  EXPECT_TRUE(SameBits(logits, before));  // as they were given
}

TEST(TokenSampler, BadRowsYieldTheInvalidToken) {
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingRow row;
    row.temperature = temperature;
    for (const int vocab : {3, 40, 1000}) {
      for (const double bad : {double{NAN}, HUGE_VAL}) {
        for (const int at : {0, vocab / 2, vocab - 1}) {
          std::vector<double> values(vocab, 0.5);
          values[at] = bad;
          EXPECT_EQ(SampleOne(Logits(values), row), kInvalidToken) << vocab << " " << at;
        }
      }
      EXPECT_EQ(SampleOne(Logits(std::vector<double>(vocab, -HUGE_VAL)), row), kInvalidToken);
    }
    row.num_banned = 2;
    row.banned[0] = 1;
    row.banned[1] = 0;
    EXPECT_EQ(SampleOne(Logits({3, 4}), row), kInvalidToken);
    EXPECT_EQ(SampleOne(Logits({3, 4, -5}), row), 2);
    EXPECT_EQ(SampleOne(Logits({3, 4, -HUGE_VAL, -1e30}), row), 3);
  }
}

struct Setting {
  float temperature;
  int top_k;
  float top_p, min_p;
};
constexpr Setting kSettings[] = {
    {1.0f, 0, 1.0f, 0.0f},   {0.7f, 20, 0.8f, 0.0f},  {1.0f, 20, 0.95f, 0.0f},
    {1.5f, 5, 1.0f, 0.0f},   {1.0f, 0, 0.9f, 0.0f},   {1.0f, 0, 1.0f, 0.05f},
    {2.0f, 50, 0.9f, 0.1f},  {1.0f, 1, 1.0f, 0.0f},   {0.01f, 0, 0.55f, 0.0f},
    {1.0f, 100000, 0.9f, 0}, {5.0f, 0, 0.99f, 0.01f}, {1.0f, 20, 1e-6f, 0.0f}};

SamplingRow RowOf(const Setting& s, uint64_t seed, int position) {
  SamplingRow row;
  row.temperature = s.temperature;
  row.top_k = s.top_k;
  row.top_p = s.top_p;
  row.min_p = s.min_p;
  row.seed = seed;
  row.position = position;
  return row;
}

// Each draw is the candidate in which the uniform number falls; at a border within rounding either
// neighbour will do.
TEST(TokenSampler, DrawsWhatTheReferenceDraws) {
  Rng rng;
  SCOPED_TRACE(rng.Trace());
  for (const Setting& s : kSettings) {
    for (const int vocab : {1, 7, 300, 3000}) {
      SCOPED_TRACE("T " + std::to_string(s.temperature) + " top_k " + std::to_string(s.top_k) +
                   " top_p " + std::to_string(s.top_p) + " min_p " + std::to_string(s.min_p) +
                   " vocab " + std::to_string(vocab));
      const TestTensor logits = TestTensor(DType::kF32, {1, vocab}).Normal(rng, 2.0f);
      for (int i = 0; i + 1 < vocab; i += 3) Put(logits, At(logits, 0, i), 0, i + 1);  // ties
      for (int position = 0; position < 40; ++position) {
        const SamplingRow row = RowOf(s, rng.engine()(), position);
        const int token = SampleOne(logits, row);
        const auto candidates = reference::Candidates(logits, 0, vocab, row);
        const double u = SamplingUniform(row.seed, row.position);
        double below = 0;
        bool found = false;
        for (const auto& [id, p] : candidates) {
          if (id == token) {
            EXPECT_GE(u, below - 1e-5) << "token " << token;
            EXPECT_LE(u, below + p + 1e-5) << "token " << token;
            found = true;
          }
          below += p;
        }
        // At a cut's border one candidate more or less is rounding; anything else is wrong.
        EXPECT_TRUE(found || u > 1 - 1e-3) << "token " << token << " is no candidate";
      }
    }
  }
}

TEST(TokenSampler, FrequenciesFollowTheProbabilities) {
  const TestTensor logits = Logits({1.0, 3.0, 2.5, 0.0, -HUGE_VAL, 2.5, -2.0});
  for (const Setting& s : {Setting{1.0f, 0, 1.0f, 0.0f}, Setting{1.3f, 4, 0.97f, 0.0f}}) {
    constexpr int kDraws = 20000;
    std::map<int, int> counts;
    for (int position = 0; position < kDraws; ++position) {
      ++counts[SampleOne(logits, RowOf(s, 12345, position))];
    }
    const auto candidates = reference::Candidates(logits, 0, 7, RowOf(s, 0, 0));
    double chi_squared = 0;
    int seen = 0;
    for (const auto& [id, p] : candidates) {
      const double expected = p * kDraws;
      chi_squared += (counts[id] - expected) * (counts[id] - expected) / expected;
      seen += counts[id];
    }
    EXPECT_EQ(seen, kDraws);
    // Beyond 27.9 lies 1e-4 of the distribution with 6 - 1 degrees of freedom.
    EXPECT_LT(chi_squared, 27.9);
  }
}

TEST(TokenSampler, DependsOnSeedAndPositionOnly) {
  Rng rng(7);
  const int vocab = 5000;
  const TestTensor logits = TestTensor(DType::kF32, {1, vocab}).Normal(rng);
  const Setting s{1.0f, 0, 1.0f, 0.0f};
  std::vector<SamplingRow> rows;
  for (int i = 0; i < 8; ++i) rows.push_back(RowOf(s, 99 + i / 4, i % 4));
  const TestTensor many(DType::kF32, {8, vocab});
  for (int t = 0; t < 8; ++t) {
    for (int i = 0; i < vocab; ++i) Put(many, At(logits, 0, i), t, i);
  }
  const std::vector<int> batch = Sampler(rows).Run(many, vocab, 3);
  std::map<int, int> distinct;
  for (int t = 0; t < 8; ++t) {
    EXPECT_EQ(batch[t], SampleOne(logits, rows[t]));
    ++distinct[batch[t]];
  }
  EXPECT_GT(distinct.size(), 5u);
}

// Without top_k, the draw must reach far down a flat distribution.
TEST(TokenSampler, FlatDistributionsReachEveryId) {
  const int vocab = 20000;
  const TestTensor logits(DType::kF32, {1, vocab});
  for (int i = 0; i < vocab; ++i) Put(logits, 1.0, 0, i);
  double sum = 0;
  for (int position = 0; position < 200; ++position) {
    const SamplingRow row = RowOf({1.0f, 0, 1.0f, 0.0f}, 3, position);
    const int token = SampleOne(logits, row);
    // All weights are equal, so the order is by id and the token is the uniform number itself.
    EXPECT_NEAR(token, std::floor(SamplingUniform(3, position) * vocab), 1.0);
    sum += token;
  }
  EXPECT_NEAR(sum / 200, vocab / 2.0, vocab * 0.1);
}

}  // namespace
}  // namespace qwend::test
