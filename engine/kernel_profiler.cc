#include "engine/kernel_profiler.h"

#include <algorithm>
#include <string_view>

#include "kernels/op_cost.h"

namespace qwend {
namespace {

// The operator map's name of a tag: prefill tags carry a prefix.
std::string KernelName(std::string_view tag) {
  constexpr std::string_view kPrefix = "prefill_";
  if (tag.substr(0, kPrefix.size()) == kPrefix) tag.remove_prefix(kPrefix.size());
  return std::string(tag);
}

}  // namespace

void KernelProfiler::Record(const std::string& phase, int bucket, std::span<const OpCall> calls,
                            std::span<const double> seconds, double mean_length, int64_t rows) {
  // Summed up outside the lock: readers wait for a few additions only.
  std::map<std::string, Sum> step;
  double step_seconds = 0;
  for (size_t i = 0; i < calls.size() && i < seconds.size(); ++i) {
    Sum& sum = step[KernelName(calls[i].tag)];
    ++sum.calls;
    sum.seconds += seconds[i];
    sum.bytes += CostOf(calls[i].op, mean_length, rows).bytes;
    step_seconds += seconds[i];
  }
  const auto add = [](Sum& to, const Sum& from) {
    to.calls += from.calls;
    to.seconds += from.seconds;
    to.bytes += from.bytes;
  };
  absl::MutexLock lock(&mu_);
  for (const auto& [kernel, sum] : step) add(totals_[{kernel, phase}], sum);
  if (bucket == 0) return;
  Bucket& b = buckets_[bucket];
  ++b.steps;
  b.seconds += step_seconds;
  for (const auto& [kernel, sum] : step) add(b.kernels[kernel], sum);
}

std::vector<KernelTotals> KernelProfiler::Totals() const {
  std::vector<KernelTotals> out;
  absl::MutexLock lock(&mu_);
  for (const auto& [key, sum] : totals_) {
    out.push_back({.kernel = key.first,
                   .phase = key.second,
                   .calls = sum.calls,
                   .seconds = sum.seconds,
                   .bytes = sum.bytes});
  }
  return out;
}

std::vector<StepProfile> KernelProfiler::Profiles() const {
  std::vector<StepProfile> out;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [batch, bucket] : buckets_) {
      const auto steps = static_cast<double>(bucket.steps);
      StepProfile profile{.batch = batch,
                          .steps = bucket.steps,
                          .step_seconds = bucket.seconds / steps,
                          .kernels = {}};
      for (const auto& [kernel, sum] : bucket.kernels) {
        profile.kernels.push_back({.kernel = kernel,
                                   .calls_per_step = static_cast<double>(sum.calls) / steps,
                                   .seconds_per_step = sum.seconds / steps,
                                   .bytes_per_step = sum.bytes / steps});
      }
      out.push_back(std::move(profile));
    }
  }
  for (StepProfile& profile : out) {
    std::stable_sort(
        profile.kernels.begin(), profile.kernels.end(),
        [](const auto& a, const auto& b) { return a.seconds_per_step > b.seconds_per_step; });
  }
  return out;
}

}  // namespace qwend
