// How long each projection of a model takes in 1, 2, 4 ... 32 parts along K, from memory that no
// cache holds.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "tests/bench/bench_options.h"

namespace qwend::bench {

// A table: a row for each distinct matrix, a column for each number of parts, the reduction
// included; the fastest is marked, and what the backend chooses is named.
absl::StatusOr<std::string> SweepSplitK(const BenchOptions& options);

}  // namespace qwend::bench
