#include "tests/bench/model_bench.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/loader/weights.h"
#include "engine/model_runner.h"
#include "kernels/backend.h"

namespace qwend::bench {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The process's largest resident size so far; 0 where the system does not say.
int64_t PeakResidentBytes() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    std::istringstream fields(line);
    std::string name;
    int64_t kib = 0;
    if (fields >> name >> kib && name == "VmHWM:") return kib * 1024;
  }
  return 0;
}

struct LoadedModel {
  std::string name;
  ModelSpec spec;
  std::unique_ptr<WeightSource> weights;
};

absl::StatusOr<LoadedModel> OpenWeights(const BenchOptions& options) {
  LoadedModel model;
  if (!options.model.empty()) {
    absl::StatusOr<OpenedModel> opened = OpenModel(options.model);
    if (!opened.ok()) return opened.status();
    model.name = options.model;
    model.spec = opened->config.spec;
    model.weights = std::move(opened->weights);
    return model;
  }
  absl::StatusOr<ModelSpec> spec = SyntheticSpec(options.synthetic);
  if (!spec.ok()) return spec.status();
  model.name = absl::StrCat(options.synthetic, ", random weights");
  model.spec = *spec;
  model.weights = MakeSyntheticWeights(*spec, /*seed=*/1);
  return model;
}

class Bench {
 public:
  Bench(const BenchOptions& options, Backend& backend) : options_(options), backend_(backend) {}

  absl::Status Load() {
    absl::StatusOr<LoadedModel> model = OpenWeights(options_);
    if (!model.ok()) return model.status();
    spec_ = model->spec;
    result.model = model->name;
    result.parameters = CountParameters(spec_);
    free_at_start_ = backend_.Info().free_bytes;
    MeasureRead();

    const int max_batch = *std::max_element(options_.batches.begin(), options_.batches.end());
    MemoryLimits limits;
    limits.max_sequences = max_batch;
    limits.max_context_tokens =
        std::max(options_.prompt_tokens, Context() + std::max(options_.decode_tokens, kSeldom) + 1);
    limits.decode_plan = options_.decode_plan;
    limits.memory_fraction = 1.0;
    absl::StatusOr<MemoryPlan> plan = PlanMemory(spec_, backend_, limits);
    if (!plan.ok()) return plan.status();
    result.plan = *plan;
    const double start = Now();
    absl::StatusOr<std::unique_ptr<ModelRunner>> runner =
        ModelRunner::Create(backend_, spec_, *model->weights,
                            {.plan = *plan,
                             .decode_plan = options_.decode_plan,
                             .profile_every = 0,
                             .decode_ahead = backend_.Info().asynchronous});
    if (!runner.ok()) return runner.status();
    runner_ = *std::move(runner);
    result.decode_plan = runner_->plan_choice();
    result.load_seconds = Now() - start;

    const int pages_each = (plan->max_context_tokens + kPageTokens - 1) / kPageTokens;
    if (plan->kv_pages < pages_each * max_batch) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "memory holds ", plan->kv_pages, " cache pages, --batch ", max_batch, " needs ",
          pages_each * max_batch, "; lower --batch, --context or --prompt_tokens"));
    }
    pages_.resize(static_cast<size_t>(max_batch));
    for (int s = 0; s < max_batch; ++s) {
      pages_[s].resize(static_cast<size_t>(pages_each));
      std::iota(pages_[s].begin(), pages_[s].end(), s * pages_each);
    }
    return absl::OkStatus();
  }

  absl::Status TimePrefill() {
    std::vector<double> speeds;
    for (int i = -1; i < options_.repeats; ++i) {  // the first one warms up
      const double start = Now();
      if (absl::Status status = Prefill(options_.prompt_tokens); !status.ok()) return status;
      if (i >= 0) speeds.push_back(options_.prompt_tokens / (Now() - start));
    }
    runner_->set_profile_every(1);
    if (absl::Status status = Prefill(options_.prompt_tokens); !status.ok()) return status;
    runner_->set_profile_every(0);
    result.prompt_tokens = options_.prompt_tokens;
    result.prefill_tokens_per_second = SpreadOf(speeds);
    // Of an embedding that is not tied only one row is read for each token.
    const double embedding =
        spec_.tied_embeddings ? 0.0 : static_cast<double>(spec_.vocab_size) * spec_.hidden;
    const double head = static_cast<double>(spec_.vocab_size) * spec_.hidden;
    result.prefill_flops_per_second = result.prefill_tokens_per_second.median * 2 *
                                      (static_cast<double>(result.parameters) - embedding - head);
    for (const KernelTotals& kernel : runner_->profiler().Totals()) {
      if (kernel.phase == "prefill") result.prefill_kernels.push_back(kernel);
    }
    std::sort(result.prefill_kernels.begin(), result.prefill_kernels.end(),
              [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
    return absl::OkStatus();
  }

  // Sequence 0 continues its real prompt; the other sequences' caches hold what earlier runs left
  // there, which takes the same time to read.
  absl::Status TimeDecode(int batch) {
    if (absl::Status status = Prefill(Context()); !status.ok()) return status;
    std::vector<DecodeRow> rows(static_cast<size_t>(batch));
    for (int s = 0; s < batch; ++s) {
      rows[s].sequence = {.pages = pages_[s], .state_slot = s};
      rows[s].token = (s * 977 + 11) % spec_.vocab_size;
    }
    absl::StatusOr<double> seconds = DecodeSteps(rows, 0, std::min(4, options_.decode_tokens));
    if (!seconds.ok()) return seconds.status();
    // Before the plain reads, whose memory is not the model's.
    if (result.decodes.empty()) {
      result.peak_resident_bytes = PeakResidentBytes();
      if (options_.backend == "cuda")
        result.device_bytes = free_at_start_ - backend_.Info().free_bytes;
    }
    const double step_bytes = StepBytes(batch);
    std::vector<double> speeds;
    std::vector<double> shares;
    double decode_seconds = 0, waited = 0;
    double read_before = MeasureRead();
    for (int i = 0; i < options_.repeats; ++i) {
      const double waited_before = runner_->waited_seconds();
      seconds = DecodeSteps(rows, 0, options_.decode_tokens);
      if (!seconds.ok()) return seconds.status();
      decode_seconds += *seconds;
      waited += runner_->waited_seconds() - waited_before;
      const double read_after = MeasureRead();
      const double steps_per_second = options_.decode_tokens / *seconds;
      speeds.push_back(steps_per_second * batch);
      shares.push_back(steps_per_second * step_bytes / std::max(read_before, read_after));
      read_before = read_after;
    }
    DecodeResult decode;
    decode.batch = batch;
    decode.context = Context();
    decode.tokens_per_second = SpreadOf(speeds);
    decode.bandwidth_share = SpreadOf(shares);
    decode.step_bytes = step_bytes;
    if (backend_.Info().asynchronous)
      decode.host_step_seconds =
          (decode_seconds - waited) / (options_.repeats * options_.decode_tokens);
    if (absl::Status status = TimeInstrumentation(rows, decode); !status.ok()) return status;
    TimeKernelsAlone(decode);
    for (const StepProfile& profile : runner_->profiler().Profiles()) {
      if (profile.batch >= batch) {
        decode.profile = profile;
        break;
      }
    }
    result.decodes.push_back(std::move(decode));
    return absl::OkStatus();
  }

  void Finish() {
    result.device = backend_.Info().device_name;
    result.read_bandwidth = SpreadOf(reads_);
    for (DecodeResult& decode : result.decodes) {
      const double steps_per_second = decode.tokens_per_second.median / decode.batch;
      decode.share_of_best = steps_per_second * decode.step_bytes / result.read_bandwidth.max;
    }
  }

  BenchResult result;

 private:
  int Context() const { return options_.context > 0 ? options_.context : options_.prompt_tokens; }

  double MeasureRead() {
    reads_.push_back(backend_.MeasureReadBandwidth());
    return reads_.back();
  }

  // `steps` tokens of every row from the first-th after the context on, each fed back; the seconds
  // it took.
  absl::StatusOr<double> DecodeSteps(std::vector<DecodeRow>& rows, int first, int steps) {
    const double start = Now();
    for (int step = first; step < first + steps; ++step) {
      for (DecodeRow& row : rows) row.position = Context() + step;
      const std::span<const int32_t> tokens = runner_->Decode(rows);
      for (size_t s = 0; s < rows.size(); ++s) {
        if (tokens[s] == kInvalidToken) {
          return absl::InternalError(absl::StrCat("sequence ", s, " of batch ", rows.size(),
                                                  ": the logits are not finite"));
        }
        rows[s].token = tokens[s];
      }
    }
    return Now() - start;
  }

  absl::Status Prefill(int tokens) {
    std::vector<int32_t> prompt(static_cast<size_t>(tokens));
    for (int i = 0; i < tokens; ++i) prompt[i] = (i * 7919 + 3) % spec_.vocab_size;
    for (int first = 0; first < tokens; first += runner_->max_prefill_tokens()) {
      const int count = std::min(runner_->max_prefill_tokens(), tokens - first);
      PrefillChunk chunk;
      chunk.sequence = {.pages = pages_[0], .state_slot = 0};
      chunk.tokens = std::span<const int32_t>(prompt).subspan(first, count);
      chunk.start_position = first;
      chunk.sample = first + count == tokens;
      if (runner_->Prefill(chunk) == kInvalidToken) {
        return absl::InternalError("prefill: the logits are not finite");
      }
    }
    return absl::OkStatus();
  }

  // The same steps with profiling off, with each kOften-th and with each kSeldom-th instrumented. A
  // device that works ahead lets a step's time fall on its neighbours' calls, so only sums count:
  // two periods are two equations for the plain and the instrumented steps between.
  absl::Status TimeInstrumentation(std::vector<DecodeRow>& rows, DecodeResult& decode) {
    const int steps = std::max(options_.decode_tokens / kSeldom, 1) * kSeldom;
    const auto seconds_per_step = [&](int every) -> absl::StatusOr<double> {
      runner_->set_profile_every(every);
      std::vector<double> seconds;
      for (int repeat = 0; repeat < 3; ++repeat) {
        const absl::StatusOr<double> run = DecodeSteps(rows, 0, steps);
        if (!run.ok()) return run.status();
        seconds.push_back(*run / steps);
      }
      runner_->set_profile_every(0);
      return SpreadOf(seconds).median;
    };
    const absl::StatusOr<double> plain = seconds_per_step(0);
    if (!plain.ok()) return plain.status();
    const absl::StatusOr<double> often = seconds_per_step(kOften),
                                 seldom = seconds_per_step(kSeldom);
    if (!often.ok()) return often.status();
    if (!seldom.ok()) return seldom.status();
    decode.plain_step_seconds = *plain;
    decode.between_step_seconds = (kSeldom * *seldom - kOften * *often) / (kSeldom - kOften);
    decode.instrumented_step_seconds = kOften * *often - (kOften - 1) * decode.between_step_seconds;
    return absl::OkStatus();
  }

  // Seconds of one run of a program, many of them queued before any is waited for.
  double TimeProgram(std::span<const OpCall> calls, DecodePlan plan) {
    const int runs = options_.backend == "cuda" ? 20 : 1;
    std::string why_not;
    const std::unique_ptr<Program> program =
        CompileStep(backend_, plan, calls, /*port=*/nullptr, why_not);
    Require(program != nullptr, "timing the step alone: ", why_not);
    program->Run();
    backend_.Synchronize();
    std::vector<double> seconds;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const double start = Now();
      for (int i = 0; i < runs; ++i) program->Run();
      backend_.Synchronize();
      seconds.push_back((Now() - start) / runs);
    }
    return SpreadOf(seconds).median;
  }

  void TimeKernelsAlone(DecodeResult& decode) {
    const std::vector<int> buckets = runner_->buckets();
    const int bucket = *std::lower_bound(buckets.begin(), buckets.end(), decode.batch);
    const std::span<const OpCall> step = runner_->DecodeCalls(bucket);
    const DecodePlan plan = result.decode_plan.plan;
    decode.device_step_seconds = TimeProgram(step, plan);
    if (plan == DecodePlan::kPersistent) return;  // it has no kernels to take apart
    std::map<std::string, std::vector<OpCall>> kernels;
    for (const OpCall& call : step) kernels[call.tag].push_back(call);
    for (const auto& [kernel, calls] : kernels) {
      const auto count = static_cast<int>(calls.size());
      decode.alone.push_back({kernel, count, TimeProgram(calls, plan) / count});
    }
    std::sort(decode.alone.begin(), decode.alone.end(), [](const auto& a, const auto& b) {
      return a.calls * a.seconds_per_call > b.calls * b.seconds_per_call;
    });
  }

  // What a step cannot do without: every weight but an untied embedding read once, each sequence's
  // states read and written, and its cache read.
  double StepBytes(int batch) const {
    double bytes = static_cast<double>(result.plan.weight_bytes);
    if (!spec_.tied_embeddings) {
      bytes -= static_cast<double>(
          backend_.PackedBytes(spec_.weight_type, spec_.vocab_size, spec_.hidden));
    }
    const double state = static_cast<double>(result.plan.state_bytes) /
                         (result.plan.max_sequences + 1);  // one more for padding
    const double position = static_cast<double>(result.plan.kv_bytes) /
                            ((result.plan.kv_pages + 1) * double{kPageTokens});
    const double mean_length = Context() + (options_.decode_tokens + 1) / 2.0;
    return bytes + batch * (2 * state + mean_length * position);
  }

  const BenchOptions& options_;
  Backend& backend_;
  ModelSpec spec_;
  std::unique_ptr<ModelRunner> runner_;
  std::vector<std::vector<int32_t>> pages_;  // of each sequence
  int64_t free_at_start_ = 0;
  std::vector<double> reads_;  // every plain read so far, bytes per second
};

}  // namespace

Spread SpreadOf(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  const double median = n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
  return {.median = median, .min = values.front(), .max = values.back()};
}

absl::StatusOr<BenchResult> RunBench(const BenchOptions& options) {
  try {
    const std::unique_ptr<Backend> backend = options.backend == "cuda"
                                                 ? MakeCudaBackend(options.device)
                                                 : MakeCpuBackend(options.threads);
    Bench bench(options, *backend);
    if (absl::Status status = bench.Load(); !status.ok()) return status;
    if (absl::Status status = bench.TimePrefill(); !status.ok()) return status;
    for (const int batch : options.batches) {
      if (absl::Status status = bench.TimeDecode(batch); !status.ok()) return status;
    }
    bench.Finish();
    return std::move(bench.result);
  } catch (const std::exception& e) {
    return absl::InternalError(e.what());
  }
}

}  // namespace qwend::bench
