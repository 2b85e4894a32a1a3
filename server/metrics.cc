#include "server/metrics.h"

#include <array>
#include <exception>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "prometheus/collectable.h"
#include "prometheus/counter.h"
#include "prometheus/exposer.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "server/engine_metrics.h"
#include "server/listen_address.h"

namespace qwend {
namespace {

using prometheus::Histogram;
using Edges = Histogram::BucketBoundaries;

constexpr std::array<std::string_view, 9> kOutcomeNames = {"eos",      "stop_string", "stop_token",
                                                           "length",   "aborted",     "cancelled",
                                                           "deadline", "rejected",    "error"};

constexpr char kDecodeStepName[] = "qwend_decode_step_seconds";
constexpr char kDecodeStepHelp[] = "One decode step, by the batch it was compiled for.";

// The edges of vLLM's histograms, and finer ones below, in seconds.
const Edges& FirstTokenEdges() {
  static const Edges edges = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                              1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
  return edges;
}
const Edges& InterTokenEdges() {
  static const Edges edges = {.0002, .0003, .0005, .0007, .001, .0015, .002, .003, .005, .0075,
                              .01,   .025,  .05,   .075,  .1,   .15,   .2,   .3,   .4,   .5,
                              .75,   1,     2.5,   5,     7.5,  10,    20,   40,   80};
  return edges;
}
const Edges& DurationEdges() {
  static const Edges edges = {.005, .01, .025, .05, .1, .2, .3, .5,  .8,  1,   1.5, 2,    2.5, 5,
                              10,   15,  20,   30,  40, 50, 60, 120, 240, 480, 960, 1920, 7680};
  return edges;
}

}  // namespace

std::string_view OutcomeName(Outcome outcome) {
  return kOutcomeNames[static_cast<size_t>(outcome)];
}

struct Metrics::Impl : public prometheus::Collectable {
  Impl(std::string model_name, bool aliases)
      : model(std::move(model_name)),
        vllm_aliases(aliases),
        requests(Counters()),
        first_token(Single("qwend_time_to_first_token_seconds",
                           "From acceptance to the first token.", FirstTokenEdges())),
        inter_token(Single("qwend_inter_token_latency_seconds", "Between two tokens of a request.",
                           InterTokenEdges())),
        duration(Single("qwend_request_duration_seconds",
                        "From acceptance to the end of a request.", DurationEdges())),
        queue(Single("qwend_queue_time_seconds", "From acceptance to admission.", DurationEdges())),
        prefill(Single("qwend_prefill_time_seconds", "Time that a prompt's chunks took.",
                       DurationEdges())),
        decode_steps(prometheus::BuildHistogram()
                         .Name(kDecodeStepName)
                         .Help(kDecodeStepHelp)
                         .Labels({{"model", model}})
                         .Register(registry)) {}

  std::array<prometheus::Counter*, kOutcomeNames.size()> Counters() {
    auto& family = prometheus::BuildCounter()
                       .Name("qwend_requests_total")
                       .Help("Requests that ended, by how.")
                       .Labels({{"model", model}})
                       .Register(registry);
    std::array<prometheus::Counter*, kOutcomeNames.size()> counters;
    for (size_t i = 0; i < counters.size(); ++i) {
      counters[i] = &family.Add({{"finish_reason", std::string(kOutcomeNames[i])}});
    }
    return counters;
  }
  Histogram& Single(const char* name, const char* help, const Edges& edges) {
    return prometheus::BuildHistogram()
        .Name(name)
        .Help(help)
        .Labels({{"model", model}})
        .Register(registry)
        .Add({}, edges);
  }

  // The decode steps compiled for `batch`; a series of its own from the first call on.
  Histogram& DecodeSteps(int batch) {
    absl::MutexLock lock(&steps_mu);
    Histogram*& entry = steps_by_batch[batch];
    if (entry == nullptr) {
      entry = &decode_steps.Add({{"batch", absl::StrCat(batch)}}, InterTokenEdges());
    }
    return *entry;
  }

  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<prometheus::MetricFamily> families = registry.Collect();
    {
      // The registry leaves out a family without a series; the name is there from the start.
      absl::MutexLock lock(&steps_mu);
      if (steps_by_batch.empty()) {
        families.push_back({kDecodeStepName, kDecodeStepHelp, Histogram::metric_type, {}});
      }
    }
    absl::MutexLock lock(&mu);
    for (auto& f : CollectEngineMetrics(engine, model, vllm_aliases)) {
      families.push_back(std::move(f));
    }
    return families;
  }

  const std::string model;
  const bool vllm_aliases;
  prometheus::Registry registry;
  const std::array<prometheus::Counter*, kOutcomeNames.size()> requests;
  Histogram& first_token;
  Histogram& inter_token;
  Histogram& duration;
  Histogram& queue;
  Histogram& prefill;
  prometheus::Family<Histogram>& decode_steps;
  mutable absl::Mutex mu;
  const Engine* engine ABSL_GUARDED_BY(mu) = nullptr;
  mutable absl::Mutex steps_mu;
  std::map<int, Histogram*> steps_by_batch ABSL_GUARDED_BY(steps_mu);
};

Metrics::Metrics(std::string model, bool vllm_aliases)
    : impl_(std::make_shared<Impl>(std::move(model), vllm_aliases)) {}

Metrics::~Metrics() = default;

void Metrics::CountRequest(Outcome outcome) {
  impl_->requests[static_cast<size_t>(outcome)]->Increment();
}
void Metrics::ObserveTimeToFirstToken(absl::Duration d) {
  impl_->first_token.Observe(absl::ToDoubleSeconds(d));
}
void Metrics::ObserveInterTokenLatency(absl::Duration d) {
  impl_->inter_token.Observe(absl::ToDoubleSeconds(d));
}
void Metrics::ObserveRequestDuration(absl::Duration d) {
  impl_->duration.Observe(absl::ToDoubleSeconds(d));
}
void Metrics::ObserveQueueTime(absl::Duration d) { impl_->queue.Observe(absl::ToDoubleSeconds(d)); }
void Metrics::ObservePrefillTime(absl::Duration d) {
  impl_->prefill.Observe(absl::ToDoubleSeconds(d));
}

void Metrics::ObserveDecodeStep(int batch, absl::Duration d) {
  impl_->DecodeSteps(batch).Observe(absl::ToDoubleSeconds(d));
}

void Metrics::SetEngine(const Engine* engine) {
  if (engine != nullptr) {
    for (const int batch : engine->device().batch_buckets) impl_->DecodeSteps(batch);
  }
  absl::MutexLock lock(&impl_->mu);
  impl_->engine = engine;
}

std::shared_ptr<prometheus::Collectable> Metrics::collectable() const { return impl_; }

std::string Metrics::Text() const {
  return prometheus::TextSerializer().Serialize(impl_->Collect());
}

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Open(const std::string& address,
                                                                       const Metrics& metrics) {
  std::unique_ptr<MetricsEndpoint> endpoint(new MetricsEndpoint());
  endpoint->collectable_ = metrics.collectable();
  try {
    endpoint->exposer_ = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", address, "num_threads", "16", "request_timeout_ms", "3000"});
    endpoint->exposer_->RegisterCollectable(endpoint->collectable_, "/metrics");
    const std::vector<int> ports = endpoint->exposer_->GetListeningPorts();
    if (ports.empty()) throw std::runtime_error("no port was opened");
    endpoint->port_ = ports[0];
  } catch (const std::exception&) {
    return absl::UnavailableError(
        absl::StrCat("--metrics_listen=", address, ": ", WhyNotListening(address),
                     "; choose another address, or none with --metrics_listen="));
  }
  return endpoint;
}

MetricsEndpoint::~MetricsEndpoint() = default;

}  // namespace qwend
