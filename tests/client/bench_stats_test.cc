#include "client/bench_stats.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace qwend::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Quantiles, TakesTheNearestRank) {
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Quantiles q = QuantilesOf(values);
  EXPECT_EQ(q.p50, 50);
  EXPECT_EQ(q.p90, 90);
  EXPECT_EQ(q.p99, 99);
}

TEST(Quantiles, OfOneValueAndOfNone) {
  EXPECT_EQ(QuantilesOf({7}).p50, 7);
  EXPECT_EQ(QuantilesOf({7}).p99, 7);
  EXPECT_EQ(QuantilesOf({}).p90, 0);
}

TEST(AddTokens, FirstTokenThenGaps) {
  RequestTiming t;
  AddTokens(&t, 0.5, 1);
  AddTokens(&t, 0.25, 1);
  AddTokens(&t, 0.5, 2);  // two tokens in one message share its gap
  AddTokens(&t, 9, 0);
  EXPECT_EQ(t.first_token_seconds, 0.5);
  EXPECT_THAT(t.token_gaps, ElementsAre(0.25, 0.25, 0.25));
  EXPECT_EQ(t.tokens, 4u);
}

TEST(AddTokens, SeveralTokensInTheFirstMessage) {
  RequestTiming t;
  AddTokens(&t, 0.5, 3);
  EXPECT_EQ(t.first_token_seconds, 0.5);
  EXPECT_THAT(t.token_gaps, ElementsAre(0, 0));
}

TEST(Summarize, CountsTokensOfFailedRequestsButNotTheirDuration) {
  RequestTiming good;
  AddTokens(&good, 0.1, 1);
  AddTokens(&good, 0.1, 1);
  good.seconds = 0.2;
  RequestTiming refused, broken;
  refused.error = "RESOURCE_EXHAUSTED";
  broken.error = "INTERNAL";
  broken.seconds = 9;
  AddTokens(&broken, 0.3, 1);
  const BenchReport r = Summarize(2, 2.0, {good, refused, broken});
  EXPECT_EQ(r.requests, 3u);
  EXPECT_EQ(r.tokens, 3u);
  EXPECT_DOUBLE_EQ(r.tokens_per_second(), 1.5);
  EXPECT_DOUBLE_EQ(r.request.p99, 0.2);
  EXPECT_DOUBLE_EQ(r.first_token.p99, 0.3);
  EXPECT_EQ(r.errors.at("RESOURCE_EXHAUSTED"), 1u);
  EXPECT_THAT(ReportText(r), HasSubstr("failed with INTERNAL: 1"));
  EXPECT_THAT(ReportJson(r), HasSubstr(R"("errors":{"INTERNAL":1,"RESOURCE_EXHAUSTED":1})"));
}

}  // namespace
}  // namespace qwend::client
