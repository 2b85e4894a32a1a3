// Loads a model and times it: the measurements that qwend-bench prints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/decode_plan_choice.h"
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

// One kernel of a decode step, run again and again with nothing between: all its calls of a step,
// each on its own layer's weights, as a program of their own.
struct KernelAlone {
  std::string kernel;
  int calls = 0;
  double seconds_per_call = 0;
};

struct DecodeResult {
  int batch = 0;
  int context = 0;           // positions in each cache when decoding began
  Spread tokens_per_second;  // all sequences together
  double step_bytes = 0;     // weights, states and cache that one step reads and writes
  // Of the read bandwidth: each repeat against the better of the two plain reads just before and
  // just after it, so that a shared machine's swings hit both; and the median against the best
  // plain read of the whole run.
  Spread bandwidth_share;
  double share_of_best = 0;
  StepProfile profile;  // kernel by kernel, from the instrumented steps
  // Seconds of a step that the host does not spend waiting for the device; 0 where the device is
  // the host.
  double host_step_seconds = 0;
  // Seconds of a step: plain ones with profiling off, and, with some steps instrumented, the plain
  // ones between and the instrumented ones.
  double plain_step_seconds = 0;
  double between_step_seconds = 0;
  double instrumented_step_seconds = 0;
  // The whole step as a program run back to back, without the host's part; and kernel by kernel,
  // unless it is one kernel.
  double device_step_seconds = 0;
  std::vector<KernelAlone> alone;
};

struct BenchResult {
  std::string model;
  std::string device;
  MemoryPlan plan;
  DecodePlanChoice decode_plan;
  uint64_t parameters = 0;
  double load_seconds = 0;  // making or reading the weights, packing, compiling
  Spread read_bandwidth;    // bytes per second: before loading and around every decode repeat
  int prompt_tokens = 0;
  Spread prefill_tokens_per_second;
  double prefill_flops_per_second = 0;  // by the median: 2 per weight and token, without attention
  std::vector<KernelTotals> prefill_kernels;
  std::vector<DecodeResult> decodes;
  // Of the whole process when it begins to decode; 0: unknown. Later plain reads hold more.
  int64_t peak_resident_bytes = 0;
  int64_t device_bytes = 0;  // taken from the device since the program's start; 0 on the CPU
};

// One step in so many is timed kernel by kernel, after the timed blocks; at least kSeldom steps
// run.
constexpr int kOften = 4;
constexpr int kSeldom = 16;

// Errors name the flag, file or device at fault.
absl::StatusOr<BenchResult> RunBench(const BenchOptions& options);

}  // namespace qwend::bench
