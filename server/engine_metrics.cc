#include "server/engine_metrics.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/version.h"

namespace qwend {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

class Builder {
 public:
  explicit Builder(std::string model) : model_(std::move(model)) {}

  void Family(const char* name, const char* help, MetricType type) {
    families_.push_back({name, help, type, {}});
  }
  void Sample(double value, Labels labels = {}) {
    ClientMetric metric;
    metric.label = std::move(labels);
    metric.label.push_back({"model", model_});
    (families_.back().type == MetricType::Counter ? metric.counter.value : metric.gauge.value) =
        value;
    families_.back().metric.push_back(std::move(metric));
  }
  void Gauge(const char* name, const char* help, double value, Labels labels = {}) {
    Family(name, help, MetricType::Gauge);
    Sample(value, std::move(labels));
  }
  void Counter(const char* name, const char* help, double value) {
    Family(name, help, MetricType::Counter);
    Sample(value);
  }
  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  std::string model_;
  std::vector<MetricFamily> families_;
};

void AddRequestGauges(const EngineStats& stats, const DeviceDescription& device, bool aliases,
                      Builder* b) {
  const double usage = device.kv_pages_total > 0
                           ? static_cast<double>(stats.kv_pages_used) / device.kv_pages_total
                           : 0.0;
  const Labels cache = {{"block_size", absl::StrCat(device.kv_page_tokens)},
                        {"num_gpu_blocks", absl::StrCat(device.kv_pages_total)}};
  b->Gauge("qwend_requests_running", "Requests that are being prefilled or decoded.",
           stats.running);
  b->Gauge("qwend_requests_waiting", "Accepted requests that wait for pages and a slot.",
           stats.waiting);
  b->Gauge("qwend_kv_cache_usage_ratio", "Share of the KV pages in use by requests, 0 to 1.",
           usage);
  b->Gauge("qwend_sequences_max", "How many requests can run at once.", device.max_sequences);
  b->Gauge("qwend_cache_config_info", "The KV cache's page size in tokens and number of pages.", 1,
           cache);
  if (!aliases) return;
  b->Gauge("vllm:num_requests_running", "As qwend_requests_running.", stats.running);
  b->Gauge("vllm:num_requests_waiting", "As qwend_requests_waiting.", stats.waiting);
  b->Gauge("vllm:kv_cache_usage_perc", "As qwend_kv_cache_usage_ratio.", usage);
  b->Gauge("vllm:cache_config_info", "As qwend_cache_config_info.", 1, cache);
}

void AddCounters(const EngineStats& stats, Builder* b) {
  b->Counter("qwend_prompt_tokens_total", "Prompt tokens of admitted requests.",
             static_cast<double>(stats.prompt_tokens));
  b->Counter("qwend_cached_prompt_tokens_total", "Of those, taken from the prefix cache.",
             static_cast<double>(stats.cached_prompt_tokens));
  b->Counter("qwend_generation_tokens_total", "Tokens sampled.",
             static_cast<double>(stats.generation_tokens));
  b->Counter("qwend_preemptions_total", "Running requests that gave up their pages for a while.",
             static_cast<double>(stats.preemptions));
  b->Counter("qwend_prefix_cache_hits_total", "Prompt tokens found in the prefix cache.",
             static_cast<double>(stats.cached_prompt_tokens));
  b->Counter("qwend_prefix_cache_queries_total",
             "Prompt tokens looked up in the prefix cache; it is not built, so none are.", 0);
  b->Family("qwend_graph_replays_total", "Runs of a compiled decode step.", MetricType::Counter);
  for (const auto& bucket : stats.buckets) {
    b->Sample(static_cast<double>(bucket.replays), {{"batch", absl::StrCat(bucket.batch)}});
  }
  b->Family("qwend_graph_captures_total", "Decode steps compiled.", MetricType::Counter);
  for (const auto& bucket : stats.buckets) {
    b->Sample(static_cast<double>(bucket.captures), {{"batch", absl::StrCat(bucket.batch)}});
  }
}

void AddKernels(const EngineStats& stats, double peak_bandwidth, Builder* b) {
  const auto labels = [](const KernelTotals& k) -> Labels {
    return {{"kernel", k.kernel}, {"phase", k.phase}};
  };
  b->Family("qwend_kernel_seconds_total", "Time in a kernel, of the instrumented steps only.",
            MetricType::Counter);
  for (const KernelTotals& k : stats.kernels) b->Sample(k.seconds, labels(k));
  b->Family("qwend_kernel_calls_total", "Calls of a kernel, of the instrumented steps only.",
            MetricType::Counter);
  for (const KernelTotals& k : stats.kernels) b->Sample(static_cast<double>(k.calls), labels(k));
  b->Family("qwend_kernel_bytes_total",
            "Bytes a kernel has to move, of the instrumented steps only.", MetricType::Counter);
  for (const KernelTotals& k : stats.kernels) b->Sample(k.bytes, labels(k));
  b->Family("qwend_kernel_bandwidth_ratio",
            "Bytes per second of a kernel in decode steps, over the read bandwidth measured at "
            "start-up.",
            MetricType::Gauge);
  for (const KernelTotals& k : stats.kernels) {
    if (k.phase != "decode" || k.seconds <= 0 || peak_bandwidth <= 0) continue;
    b->Sample(k.bytes / k.seconds / peak_bandwidth, {{"kernel", k.kernel}});
  }
}

}  // namespace

std::vector<MetricFamily> CollectEngineMetrics(const Engine* engine, const std::string& model,
                                               bool vllm_aliases) {
  const EngineStats stats = engine != nullptr ? engine->Stats() : EngineStats();
  const DeviceDescription device = engine != nullptr ? engine->device() : DeviceDescription();
  Builder b(model);
  AddRequestGauges(stats, device, vllm_aliases, &b);
  AddCounters(stats, &b);
  AddKernels(stats, device.peak_bandwidth, &b);
  b.Family("qwend_memory_bytes", "Memory taken at start-up.", MetricType::Gauge);
  const std::pair<const char*, int64_t> kinds[] = {{"weights", device.weight_bytes},
                                                   {"kv", device.kv_bytes},
                                                   {"states", device.state_bytes},
                                                   {"activations", device.activation_bytes},
                                                   {"workspace", device.workspace_bytes}};
  for (const auto& [kind, bytes] : kinds) {
    b.Sample(static_cast<double>(bytes), {{"kind", kind}});
  }
  b.Gauge("qwend_build_info", "The version that runs.", 1,
          {{"version", kVersion}, {"backend", device.backend}});
  return b.Take();
}

}  // namespace qwend
