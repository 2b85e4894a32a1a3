#include "client/bench_stats.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace qwend::client {

Quantiles QuantilesOf(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  auto rank = [&values](double share) {
    const double n = static_cast<double>(values.size());
    const size_t k = static_cast<size_t>(std::max(1.0, std::ceil(share * n)));
    return values[k - 1];
  };
  return {rank(0.50), rank(0.90), rank(0.99)};
}

void AddTokens(RequestTiming* timing, double gap, int count) {
  if (count <= 0) return;
  int gaps = count;
  if (timing->tokens == 0) {
    // The message's first token closes the time to first token; any beside it came at once.
    timing->first_token_seconds = gap;
    gap = 0;
    gaps = count - 1;
  }
  for (int i = 0; i < gaps; ++i) timing->token_gaps.push_back(gap / gaps);
  timing->tokens += count;
}

BenchReport Summarize(int concurrency, double wall_seconds,
                      const std::vector<RequestTiming>& timings) {
  BenchReport report;
  report.concurrency = concurrency;
  report.requests = timings.size();
  report.wall_seconds = wall_seconds;
  std::vector<double> first, gaps, whole;
  for (const RequestTiming& t : timings) {
    report.tokens += t.tokens;
    if (t.tokens > 0) first.push_back(t.first_token_seconds);
    gaps.insert(gaps.end(), t.token_gaps.begin(), t.token_gaps.end());
    if (t.error.empty()) {
      whole.push_back(t.seconds);
    } else {
      ++report.errors[t.error];
    }
  }
  report.first_token = QuantilesOf(std::move(first));
  report.inter_token = QuantilesOf(std::move(gaps));
  report.request = QuantilesOf(std::move(whole));
  return report;
}

std::string ReportText(const BenchReport& r) {
  std::string out = absl::StrFormat(
      "%d requests, %d at a time, %.2f s: %.1f tokens/s, %.2f requests/s\n", r.requests,
      r.concurrency, r.wall_seconds, r.tokens_per_second(), r.requests_per_second());
  absl::StrAppendFormat(&out, "%-22s %10s %10s %10s\n", "ms", "p50", "p90", "p99");
  auto row = [&out](const char* name, const Quantiles& q) {
    absl::StrAppendFormat(&out, "%-22s %10.2f %10.2f %10.2f\n", name, q.p50 * 1e3, q.p90 * 1e3,
                          q.p99 * 1e3);
  };
  row("time to first token", r.first_token);
  row("between tokens", r.inter_token);
  row("whole request", r.request);
  for (const auto& [code, count] : r.errors) {
    absl::StrAppendFormat(&out, "failed with %s: %d\n", code, count);
  }
  return out;
}

std::string ReportJson(const BenchReport& r) {
  auto quantiles = [](const Quantiles& q) {
    return absl::StrFormat("{\"p50\":%.6g,\"p90\":%.6g,\"p99\":%.6g}", q.p50, q.p90, q.p99);
  };
  const std::string errors = absl::StrJoin(r.errors, ",", [](std::string* out, const auto& entry) {
    absl::StrAppendFormat(out, "\"%s\":%d", entry.first, entry.second);
  });
  return absl::StrFormat(
      "{\"concurrency\":%d,\"requests\":%d,\"tokens\":%d,\"wall_seconds\":%.6g,"
      "\"tokens_per_second\":%.6g,\"requests_per_second\":%.6g,"
      "\"time_to_first_token_seconds\":%s,\"inter_token_seconds\":%s,\"request_seconds\":%s,"
      "\"errors\":{%s}}\n",
      r.concurrency, r.requests, r.tokens, r.wall_seconds, r.tokens_per_second(),
      r.requests_per_second(), quantiles(r.first_token), quantiles(r.inter_token),
      quantiles(r.request), errors);
}

}  // namespace qwend::client
