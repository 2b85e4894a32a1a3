// The figures of a load test.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace qwend::client {

// One request as its client saw it.
struct RequestTiming {
  std::string error;               // status code name; empty: OK
  double seconds = 0;              // from the call to its end
  double first_token_seconds = 0;  // from the call to the first token
  std::vector<double> token_gaps;  // seconds before each further token
  uint64_t tokens = 0;
};

struct Quantiles {
  double p50 = 0, p90 = 0, p99 = 0;
};

struct BenchReport {
  int concurrency = 0;
  uint64_t requests = 0;
  uint64_t tokens = 0;
  double wall_seconds = 0;
  Quantiles first_token;                   // seconds, of the requests that gave a token
  Quantiles inter_token;                   // seconds, over all gaps of all requests
  Quantiles request;                       // seconds, of the requests that ended OK
  std::map<std::string, uint64_t> errors;  // by status code name

  double tokens_per_second() const { return wall_seconds > 0 ? tokens / wall_seconds : 0; }
  double requests_per_second() const { return wall_seconds > 0 ? requests / wall_seconds : 0; }
};

// Nearest rank: the smallest value that at least the share of all values does not exceed. 0 of
// none.
Quantiles QuantilesOf(std::vector<double> values);

// A message that brought `count` tokens after `gap` seconds: they share the gap.
void AddTokens(RequestTiming* timing, double gap, int count);

BenchReport Summarize(int concurrency, double wall_seconds,
                      const std::vector<RequestTiming>& timings);

std::string ReportText(const BenchReport& report);
std::string ReportJson(const BenchReport& report);  // one line

}  // namespace qwend::client
