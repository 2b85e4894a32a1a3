#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "server/logging.h"
#include "tests/server/fake_engine.h"
#include "tests/server/http_get.h"

namespace qwend {
namespace {

using testing::FakeEngine;
using ::testing::HasSubstr;
using ::testing::Not;

// The value of the sample that starts with `start`, or -1.
double Value(const std::string& text, const std::string& start) {
  const size_t at = text.find("\n" + start);
  if (at == std::string::npos) return -1;
  const size_t space = text.find(' ', text.find('}', at));
  return std::stod(text.substr(space));
}

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(Metrics, EveryNameIsThereBeforeTheModelIs) {
  const Metrics metrics("demo", false);
  const std::string text = metrics.Text();
  for (const char* line : {"qwend_requests_total counter",
                           "qwend_requests_running gauge",
                           "qwend_requests_waiting gauge",
                           "qwend_kv_cache_usage_ratio gauge",
                           "qwend_sequences_max gauge",
                           "qwend_prompt_tokens_total counter",
                           "qwend_cached_prompt_tokens_total counter",
                           "qwend_generation_tokens_total counter",
                           "qwend_time_to_first_token_seconds histogram",
                           "qwend_inter_token_latency_seconds histogram",
                           "qwend_request_duration_seconds histogram",
                           "qwend_queue_time_seconds histogram",
                           "qwend_prefill_time_seconds histogram",
                           "qwend_decode_step_seconds histogram",
                           "qwend_kernel_seconds_total counter",
                           "qwend_kernel_calls_total counter",
                           "qwend_kernel_bytes_total counter",
                           "qwend_kernel_bandwidth_ratio gauge",
                           "qwend_graph_replays_total counter",
                           "qwend_graph_captures_total counter",
                           "qwend_preemptions_total counter",
                           "qwend_prefix_cache_hits_total counter",
                           "qwend_prefix_cache_queries_total counter",
                           "qwend_memory_bytes gauge",
                           "qwend_build_info gauge",
                           "qwend_cache_config_info gauge"}) {
    EXPECT_NE(text.find(absl::StrCat("# TYPE ", line, "\n")), std::string::npos) << line;
  }
  EXPECT_THAT(text, Not(HasSubstr("vllm:")));
  // Every sample carries the model.
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    const std::string line = text.substr(at, end - at);
    if (line[0] != '#') {
      EXPECT_THAT(line, HasSubstr("model=\"demo\""));
    }
    at = end + 1;
  }
}

TEST(Metrics, OutcomesAreCountedApart) {
  Metrics metrics("demo", false);
  const std::pair<Outcome, const char*> outcomes[] = {{Outcome::kEos, "eos"},
                                                      {Outcome::kStopString, "stop_string"},
                                                      {Outcome::kStopToken, "stop_token"},
                                                      {Outcome::kLength, "length"},
                                                      {Outcome::kAborted, "aborted"},
                                                      {Outcome::kCancelled, "cancelled"},
                                                      {Outcome::kDeadline, "deadline"},
                                                      {Outcome::kRejected, "rejected"},
                                                      {Outcome::kError, "error"}};
  int n = 0;
  for (const auto& [outcome, name] : outcomes) {
    ++n;
    for (int i = 0; i < n; ++i) metrics.CountRequest(outcome);
  }
  const std::string text = metrics.Text();
  n = 0;
  for (const auto& [outcome, name] : outcomes) {
    EXPECT_EQ(Value(text, absl::StrCat("qwend_requests_total{model=\"demo\",finish_reason=\"", name,
                                       "\"}")),
              ++n);
  }
}

TEST(Metrics, HistogramEdges) {
  Metrics metrics("demo", false);
  metrics.ObserveDecodeStep(4, absl::Milliseconds(1));
  metrics.ObserveDecodeStep(4, absl::Milliseconds(3));
  metrics.ObserveDecodeStep(1, absl::Milliseconds(1));
  metrics.ObserveRequestDuration(absl::Milliseconds(30));
  const std::string text = metrics.Text();
  const auto edges = [&](const char* name) {
    return Count(text, absl::StrCat("\n", name, "_bucket{"));
  };
  EXPECT_EQ(edges("qwend_time_to_first_token_seconds"), 22 + 1);
  EXPECT_EQ(edges("qwend_inter_token_latency_seconds"), 10 + 19 + 1);
  EXPECT_EQ(edges("qwend_request_duration_seconds"), 6 + 21 + 1);
  EXPECT_EQ(edges("qwend_decode_step_seconds"), 2 * (10 + 19 + 1));
  EXPECT_THAT(text, HasSubstr("batch=\"4\",le=\"0.0002\""));
  EXPECT_EQ(Value(text, "qwend_decode_step_seconds_count{model=\"demo\",batch=\"4\"}"), 2);
  EXPECT_EQ(Value(text, "qwend_request_duration_seconds_bucket{model=\"demo\",le=\"0.025\"}"), 0);
  EXPECT_EQ(Value(text, "qwend_request_duration_seconds_bucket{model=\"demo\",le=\"0.05\"}"), 1);
}

TEST(Metrics, EngineFiguresAreReadAtTheScrape) {
  FakeEngine engine;
  Metrics metrics("demo", /*vllm_aliases=*/true);
  metrics.SetEngine(&engine);
  EngineStats stats;
  stats.kv_pages_used = 25;
  stats.prompt_tokens = 7;
  stats.generation_tokens = 9;
  stats.buckets = {{.batch = 2, .replays = 11, .captures = 1}};
  stats.kernels = {
      {.kernel = "down_proj", .phase = "decode", .calls = 4, .seconds = 2, .bytes = 1e9},
      {.kernel = "down_proj", .phase = "prefill", .calls = 1, .seconds = 1, .bytes = 5}};
  engine.SetStats(stats);
  const std::string text = metrics.Text();
  EXPECT_EQ(Value(text, "qwend_kv_cache_usage_ratio{"), 0.25);
  EXPECT_EQ(Value(text, "vllm:kv_cache_usage_perc{"), 0.25);
  EXPECT_EQ(Value(text, "vllm:num_requests_running{"), 0);
  EXPECT_EQ(Value(text, "vllm:num_requests_waiting{"), 0);
  EXPECT_EQ(Value(text, "qwend_sequences_max{"), 4);
  EXPECT_EQ(Value(text, "qwend_prompt_tokens_total{"), 7);
  EXPECT_EQ(Value(text, "qwend_generation_tokens_total{"), 9);
  EXPECT_EQ(Value(text, "qwend_graph_replays_total{batch=\"2\""), 11);
  EXPECT_EQ(Value(text, "qwend_graph_captures_total{batch=\"2\""), 1);
  EXPECT_EQ(Value(text, "qwend_kernel_calls_total{kernel=\"down_proj\",phase=\"prefill\""), 1);
  EXPECT_EQ(Value(text, "qwend_kernel_seconds_total{kernel=\"down_proj\",phase=\"decode\""), 2);
  EXPECT_EQ(Value(text, "qwend_kernel_bandwidth_ratio{kernel=\"down_proj\""), 0.5);
  EXPECT_EQ(Value(text, "qwend_memory_bytes{kind=\"weights\""), 1000);
  EXPECT_EQ(Value(text, "qwend_memory_bytes{kind=\"states\""), 30);
  EXPECT_EQ(Value(text, "qwend_cache_config_info{block_size=\"64\",num_gpu_blocks=\"100\""), 1);
  EXPECT_EQ(Value(text, "vllm:cache_config_info{block_size=\"64\",num_gpu_blocks=\"100\""), 1);
  metrics.SetEngine(nullptr);
  EXPECT_EQ(Value(metrics.Text(), "qwend_sequences_max{"), 0);
}

TEST(MetricsEndpoint, ServesTextAndTellsItsPort) {
  const Metrics metrics("demo", false);
  auto endpoint = MetricsEndpoint::Open("127.0.0.1:0", metrics);
  ASSERT_TRUE(endpoint.ok()) << endpoint.status();
  ASSERT_GT((*endpoint)->port(), 0);
  EXPECT_THAT(testing::HttpGet((*endpoint)->port(), "/metrics"),
              HasSubstr("qwend_requests_running{"));

  const auto second =
      MetricsEndpoint::Open(absl::StrCat("127.0.0.1:", (*endpoint)->port()), metrics);
  ASSERT_FALSE(second.ok());
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--metrics_listen=127.0.0.1:"));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("address already in use"));
}

TEST(Logging, EventsAsText) {
  EXPECT_EQ(EventText("request finished", {{"id", "a"}, {"n", 3}, {"why", "two words"}, {"e", ""}}),
            "request finished id=a n=3 why=\"two words\" e=\"\"");
  EXPECT_EQ(EventText("x", {{"bad", "\xff \""}}), "x bad=\"\xef\xbf\xbd \\\"\"");
}

TEST(Logging, EventsAsJson) {
  EXPECT_EQ(EventJson("stopped", {}), "{\"event\":\"stopped\"}");
  EXPECT_EQ(EventJson("x", {{"n", 1}, {"s", "a\"\n\xff"}}),
            "{\"event\":\"x\",\"n\":1,\"s\":\"a\\\"\\n\xef\xbf\xbd\"}");
}

}  // namespace
}  // namespace qwend
