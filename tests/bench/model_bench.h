// Loads a model and times it: the measurements that qwend-bench prints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/models/model_spec.h"
#include "tests/bench/bench_options.h"

namespace qwend::bench {

// Median, smallest and largest of the repeats.
struct Spread {
  double median = 0;
  double min = 0;
  double max = 0;
};
Spread SpreadOf(std::vector<double> values);

struct DecodeResult {
  int batch = 0;
  int context = 0;             // positions in each cache when decoding began
  Spread tokens_per_second;    // all sequences together
  double step_bytes = 0;       // weights, states and cache that one step reads and writes
  double bandwidth_share = 0;  // of the best plain read measured around the run, by the median
  StepProfile profile;         // kernel by kernel, from the instrumented steps
};

struct BenchResult {
  std::string model;
  std::string device;
  MemoryPlan plan;
  uint64_t parameters = 0;
  double load_seconds = 0;    // making or reading the weights, packing, compiling
  double read_bandwidth = 0;  // bytes per second, best of all measurements
  double read_before = 0;     // ... before loading,
  double read_after = 0;      // ... and after the last run
  int prompt_tokens = 0;
  Spread prefill_tokens_per_second;
  double prefill_flops_per_second = 0;  // by the median: 2 per weight and token, without attention
  std::vector<KernelTotals> prefill_kernels;
  std::vector<DecodeResult> decodes;
  int64_t peak_resident_bytes = 0;  // of the whole process up to the last decode; 0: unknown
};

// Errors name the flag, file or device at fault.
absl::StatusOr<BenchResult> RunBench(const BenchOptions& options);

}  // namespace qwend::bench
