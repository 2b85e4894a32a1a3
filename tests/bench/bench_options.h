// The flags of qwend-bench.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"

namespace qwend::bench {

struct BenchOptions {
  std::string synthetic = "qwen3.5-0.8b";  // a geometry with random weights, unless `model` is set
  std::string model;                       // a checkpoint's folder
  std::string backend = "cpu";             // cpu | cuda
  int device = 0;
  int threads = 0;  // CPU backend; 0: one per core
  DecodePlan decode_plan = DecodePlan::kAuto;
  int prompt_tokens = 512;         // prefilled, and in the cache when decoding begins
  int decode_tokens = 64;          // per sequence and repeat
  int repeats = 5;                 // timed blocks of decode_tokens, and timed prefills
  int context = 0;                 // positions in the cache when decoding begins; 0: prompt_tokens
  std::vector<int> batches = {1};  // sequences decoded together
  std::string sweep;               // splitk: time that instead of a model
  bool json = false;
  bool help = false;
};

// INVALID_ARGUMENT names the flag and what it takes.
absl::StatusOr<BenchOptions> ParseBenchOptions(const std::vector<std::string>& args);

std::string BenchHelp();

}  // namespace qwend::bench
