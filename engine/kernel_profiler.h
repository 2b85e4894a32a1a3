// Sums the times of instrumented runs, per kernel and per batch bucket. Any thread may read while
// one records.
#pragma once

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "engine/engine.h"
#include "kernels/ops.h"

namespace qwend {

class KernelProfiler {
 public:
  // One instrumented decode step (phase "decode", its bucket) or prefill chunk (phase "prefill",
  // bucket 0). `seconds` are in the order of `calls`; `mean_length` and `rows` as in CostOf.
  void Record(const std::string& phase, int bucket, std::span<const OpCall> calls,
              std::span<const double> seconds, double mean_length, int64_t rows);
  std::vector<KernelTotals> Totals() const;
  std::vector<StepProfile> Profiles() const;  // decode only, one per bucket seen

 private:
  struct Sum {
    uint64_t calls = 0;
    double seconds = 0;
    double bytes = 0;
  };
  struct Bucket {
    uint64_t steps = 0;
    double seconds = 0;
    std::map<std::string, Sum> kernels;
  };
  mutable absl::Mutex mu_;
  std::map<std::pair<std::string, std::string>, Sum> totals_
      ABSL_GUARDED_BY(mu_);  // {kernel, phase}
  std::map<int, Bucket> buckets_ ABSL_GUARDED_BY(mu_);
};

}  // namespace qwend
