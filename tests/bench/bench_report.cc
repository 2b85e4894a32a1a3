#include "tests/bench/bench_report.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace qwend::bench {
namespace {

constexpr double kGiga = 1e9;
constexpr double kMicro = 1e-6;

nlohmann::json ToJson(const Spread& spread) {
  return {{"median", spread.median}, {"min", spread.min}, {"max", spread.max}};
}

std::string ToText(const Spread& spread) {
  return absl::StrFormat("%.2f (%.2f to %.2f)", spread.median, spread.min, spread.max);
}

int64_t Caches(const MemoryPlan& plan) { return plan.kv_bytes + plan.state_bytes; }

}  // namespace

std::string ReportText(const BenchResult& r) {
  std::string out;
  absl::StrAppendFormat(&out, "model            %s: %.1f M weights\n", r.model,
                        static_cast<double>(r.parameters) / 1e6);
  absl::StrAppendFormat(&out, "device           %s, decode plan %s\n", r.device,
                        r.decode_plan.ToString());
  absl::StrAppendFormat(&out, "read bandwidth   %.2f GB/s (%.2f to %.2f)\n",
                        r.read_bandwidth.median / kGiga, r.read_bandwidth.min / kGiga,
                        r.read_bandwidth.max / kGiga);
  absl::StrAppendFormat(&out, "load and pack    %.2f s\n", r.load_seconds);
  absl::StrAppendFormat(
      &out, "memory           peak resident %.1f MB; weights %.1f, caches %.1f, planned %.1f MB\n",
      static_cast<double>(r.peak_resident_bytes) / 1e6,
      static_cast<double>(r.plan.weight_bytes) / 1e6, static_cast<double>(Caches(r.plan)) / 1e6,
      static_cast<double>(r.plan.total()) / 1e6);
  if (r.device_bytes > 0) {
    absl::StrAppendFormat(&out, "device memory    %.1f MB taken\n",
                          static_cast<double>(r.device_bytes) / 1e6);
  }
  absl::StrAppendFormat(&out, "prefill          %s tokens/s at %d tokens, %.1f GFLOP/s\n",
                        ToText(r.prefill_tokens_per_second), r.prompt_tokens,
                        r.prefill_flops_per_second / kGiga);
  for (const DecodeResult& d : r.decodes) {
    const double step_seconds = d.batch / d.tokens_per_second.median;
    absl::StrAppendFormat(&out,
                          "decode           %s tokens/s, batch %d, context %d: %.2f ms a step, "
                          "%.1f MB a step, %.1f MB a token\n",
                          ToText(d.tokens_per_second), d.batch, d.context, step_seconds * 1e3,
                          d.step_bytes / 1e6, d.step_bytes / d.batch / 1e6);
    absl::StrAppendFormat(&out,
                          "                 %.1f %% of the read bandwidth around each repeat "
                          "(%.1f to %.1f); %.1f %% of the best read of this run\n",
                          d.bandwidth_share.median * 100, d.bandwidth_share.min * 100,
                          d.bandwidth_share.max * 100, d.share_of_best * 100);
    if (d.host_step_seconds > 0) {
      absl::StrAppendFormat(&out,
                            "host             %.1f us of a step not waiting for the device, which "
                            "works ahead meanwhile\n",
                            d.host_step_seconds / kMicro);
    }
    const double cost = d.instrumented_step_seconds - d.plain_step_seconds;
    absl::StrAppendFormat(
        &out,
        "instrumentation  plain step %.1f us; instrumented %.1f us; plain steps "
        "between instrumented ones %.1f us; every 64th step: %.2f %% of the time\n",
        d.plain_step_seconds / kMicro, d.instrumented_step_seconds / kMicro,
        d.between_step_seconds / kMicro, 100 * cost / 64 / d.plain_step_seconds);
  }
  for (const DecodeResult& d : r.decodes) {
    absl::StrAppendFormat(&out, "\ndecode, bucket %d: mean of %d instrumented steps, %.2f ms\n",
                          d.profile.batch, d.profile.steps, d.profile.step_seconds * 1e3);
    absl::StrAppendFormat(&out, "  %-26s %8s %10s %7s %8s %8s\n", "kernel", "calls", "us/step",
                          "share", "GB/s", "of best");
    for (const StepProfile::Kernel& k : d.profile.kernels) {
      const double rate = k.seconds_per_step > 0 ? k.bytes_per_step / k.seconds_per_step : 0;
      absl::StrAppendFormat(&out, "  %-26s %8.0f %10.1f %6.1f%% %8.2f %7.1f%%\n", k.kernel,
                            k.calls_per_step, k.seconds_per_step / kMicro,
                            100 * k.seconds_per_step / d.profile.step_seconds, rate / kGiga,
                            100 * rate / r.read_bandwidth.max);
    }
  }
  for (const DecodeResult& d : r.decodes) {
    absl::StrAppendFormat(&out, "\ndecode, batch %d: the step back to back %.1f us\n", d.batch,
                          d.device_step_seconds / kMicro);
    if (d.alone.empty()) continue;
    absl::StrAppendFormat(&out,
                          "each kernel alone, its calls of a step back to back\n"
                          "  %-26s %8s %10s %10s\n",
                          "kernel", "calls", "us/call", "us/step");
    for (const KernelAlone& k : d.alone) {
      absl::StrAppendFormat(&out, "  %-26s %8d %10.2f %10.1f\n", k.kernel, k.calls,
                            k.seconds_per_call / kMicro, k.calls * k.seconds_per_call / kMicro);
    }
  }
  double prefill_seconds = 0;
  for (const KernelTotals& k : r.prefill_kernels) prefill_seconds += k.seconds;
  absl::StrAppendFormat(&out, "\nprefill: all instrumented chunks\n  %-26s %8s %10s %7s\n",
                        "kernel", "calls", "us/call", "share");
  for (const KernelTotals& k : r.prefill_kernels) {
    absl::StrAppendFormat(&out, "  %-26s %8d %10.1f %6.1f%%\n", k.kernel, k.calls,
                          k.seconds / static_cast<double>(k.calls) / kMicro,
                          100 * k.seconds / prefill_seconds);
  }
  return out;
}

std::string ReportJson(const BenchResult& r) {
  nlohmann::json decodes = nlohmann::json::array();
  for (const DecodeResult& d : r.decodes) {
    nlohmann::json kernels = nlohmann::json::array();
    for (const StepProfile::Kernel& k : d.profile.kernels) {
      kernels.push_back({{"kernel", k.kernel},
                         {"calls_per_step", k.calls_per_step},
                         {"seconds_per_step", k.seconds_per_step},
                         {"bytes_per_step", k.bytes_per_step}});
    }
    nlohmann::json alone = nlohmann::json::array();
    for (const KernelAlone& k : d.alone) {
      alone.push_back({{"kernel", k.kernel},
                       {"calls_per_step", k.calls},
                       {"seconds_per_call", k.seconds_per_call}});
    }
    decodes.push_back({{"batch", d.batch},
                       {"context", d.context},
                       {"tokens_per_second", ToJson(d.tokens_per_second)},
                       {"step_bytes", d.step_bytes},
                       {"bandwidth_share", ToJson(d.bandwidth_share)},
                       {"share_of_best", d.share_of_best},
                       {"host_step_seconds", d.host_step_seconds},
                       {"plain_step_seconds", d.plain_step_seconds},
                       {"device_step_seconds", d.device_step_seconds},
                       {"between_step_seconds", d.between_step_seconds},
                       {"instrumented_steps", d.profile.steps},
                       {"instrumented_step_seconds", d.profile.step_seconds},
                       {"kernels", kernels},
                       {"kernels_alone", alone}});
  }
  nlohmann::json prefill_kernels = nlohmann::json::array();
  for (const KernelTotals& k : r.prefill_kernels) {
    prefill_kernels.push_back({{"kernel", k.kernel}, {"calls", k.calls}, {"seconds", k.seconds}});
  }
  const nlohmann::json report = {{"model", r.model},
                                 {"decode_plan", PlanName(r.decode_plan.plan)},
                                 {"device", r.device},
                                 {"parameters", r.parameters},
                                 {"read_bandwidth", ToJson(r.read_bandwidth)},
                                 {"load_seconds", r.load_seconds},
                                 {"memory",
                                  {{"peak_resident_bytes", r.peak_resident_bytes},
                                   {"device_bytes", r.device_bytes},
                                   {"weight_bytes", r.plan.weight_bytes},
                                   {"kv_bytes", r.plan.kv_bytes},
                                   {"state_bytes", r.plan.state_bytes},
                                   {"activation_bytes", r.plan.activation_bytes},
                                   {"workspace_bytes", r.plan.workspace_bytes}}},
                                 {"prefill",
                                  {{"tokens", r.prompt_tokens},
                                   {"tokens_per_second", ToJson(r.prefill_tokens_per_second)},
                                   {"flops_per_second", r.prefill_flops_per_second},
                                   {"kernels", prefill_kernels}}},
                                 {"decode", decodes}};
  return report.dump(2) + "\n";
}

}  // namespace qwend::bench
