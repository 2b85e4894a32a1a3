// qwend-bench: decode and prefill speed of one model on one device, against the read bandwidth that
// the device shows in the same run. Exit code 0, 1 for a failure, 2 for a bad flag.

#include <cstdio>
#include <string>
#include <vector>

#include "tests/bench/bench_options.h"
#include "tests/bench/bench_report.h"
#include "tests/bench/model_bench.h"
#include "tests/bench/splitk_sweep.h"

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const absl::StatusOr<qwend::bench::BenchOptions> options = qwend::bench::ParseBenchOptions(args);
  if (!options.ok()) {
    std::fprintf(stderr, "qwend-bench: %s\n", std::string(options.status().message()).c_str());
    return 2;
  }
  if (options->help) {
    std::fputs(qwend::bench::BenchHelp().c_str(), stdout);
    return 0;
  }
  if (options->sweep == "splitk") {
    const absl::StatusOr<std::string> table = qwend::bench::SweepSplitK(*options);
    if (!table.ok()) {
      std::fprintf(stderr, "qwend-bench: %s\n", std::string(table.status().message()).c_str());
      return 1;
    }
    std::fputs(table->c_str(), stdout);
    return 0;
  }
  const absl::StatusOr<qwend::bench::BenchResult> result = qwend::bench::RunBench(*options);
  if (!result.ok()) {
    std::fprintf(stderr, "qwend-bench: %s\n", std::string(result.status().message()).c_str());
    return 1;
  }
  const std::string report =
      options->json ? qwend::bench::ReportJson(*result) : qwend::bench::ReportText(*result);
  std::fputs(report.c_str(), stdout);
  return 0;
}
