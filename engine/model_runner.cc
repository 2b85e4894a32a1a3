#include "engine/model_runner.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/decode_ahead.h"
#include "engine/loader/upload.h"
#include "engine/models/decoder.h"
#include "engine/op_list.h"
#include "engine/rope_tables.h"
#include "engine/step_buffers.h"
#include "engine/step_input_writer.h"

namespace qwend {
namespace {

// True once in `every` calls; never when `every` is 0.
class EveryNth {
 public:
  explicit EveryNth(int every) : every_(every) {}
  void set(int every) {
    every_ = every;
    count_ = 0;
  }
  bool Next() {
    if (every_ == 0 || ++count_ < every_) return false;
    count_ = 0;
    return true;
  }

 private:
  int every_;
  int count_ = 0;
};

class ModelRunnerImpl final : public ModelRunner, private StepQueue {
 public:
  // `asked` may be kAuto.
  ModelRunnerImpl(Backend& backend, const ModelSpec& spec, const RunnerOptions& options,
                  DecodePlan asked)
      : backend_(backend),
        spec_(spec),
        asked_(asked),
        list_plan_(asked == DecodePlan::kExplicit ? asked : DecodePlan::kFused),
        sizes_(options.plan, backend.Info()),
        max_sequences_(options.plan.max_sequences),
        vocab_limit_(options.sampleable_tokens == 0
                         ? spec.vocab_size
                         : std::min(options.sampleable_tokens, spec.vocab_size)),
        timed_decode_(options.profile_every),
        timed_prefill_(options.profile_every),
        replays_(sizes_.buckets.size()) {
    if (options.decode_ahead) ahead_.emplace(static_cast<StepQueue&>(*this), sizes_.max_context);
  }

  // A step that was queued ahead may still run on what is freed next.
  ~ModelRunnerImpl() override {
    try {
      backend_.Synchronize();
    } catch (const std::exception&) {
      // The device has failed, which whoever ran it has learned.
    }
  }

  absl::Status Load(const MemoryPlan& plan, WeightSource& source) {
    memory_ = backend_.Allocate(plan.total());
    MemoryCursor cursor(memory_.data());
    absl::StatusOr<ModelWeights> weights = UploadWeights(spec_, source, backend_, cursor);
    if (!weights.ok()) return weights.status();
    weights_ = *std::move(weights);
    caches_ = LayOutKv(spec_, sizes_, cursor);
    LayOutStates(spec_, sizes_, cursor, caches_);
    activations_ = LayOutActivations(spec_, sizes_, cursor);
    workspace_ = LayOutWorkspace(spec_, sizes_, cursor);
    if (cursor.used() != plan.total()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the memory plan has ", plan.total(), " bytes, the model takes ",
                       cursor.used(), "; make the plan from this model and backend"));
    }
    const RopeTables rope = MakeRopeTables(sizes_.max_context, spec_.rotary_dim, spec_.rope_theta);
    backend_.CopyToDevice(workspace_.rope_cos.data, rope.cos.data(), workspace_.rope_cos.bytes());
    backend_.CopyToDevice(workspace_.rope_sin.data, rope.sin.data(), workspace_.rope_sin.bytes());
    backend_.Synchronize();
    inputs_.emplace(backend_, spec_.vocab_size, sizes_, workspace_);
    port_ = backend_.MakeStepPort(workspace_.inputs, workspace_.inputs_bytes, workspace_.inputs,
                                  int64_t{sizes_.max_bucket} * int64_t{sizeof(int32_t)});
    if (absl::Status status = CompileBuckets(); !status.ok()) return status;
    PrefillLayers(sizes_.chunk);
    return absl::OkStatus();
  }

  int max_prefill_tokens() const override { return sizes_.chunk; }
  int max_decode_rows() const override { return max_sequences_; }

  int32_t Prefill(const PrefillChunk& chunk) override {
    const int rows = static_cast<int>(chunk.tokens.size());
    if (ahead_) ahead_->BeforePrefill(chunk.sequence.state_slot, chunk.start_position == 0);
    const StepInputs inputs = inputs_->Prefill(chunk);
    if (chunk.start_position == 0) ZeroState(chunk.sequence.state_slot);
    const OpList& layers = PrefillLayers(rows);
    OpList head("prefill_");
    if (chunk.sample) {
      AppendHead(Context(), inputs.sampling, workspace_.tokens, rows - 1, 1, HeadForm::kPlain,
                 head);
    }

    if (timed_prefill_.Next()) {
      const double mean_length = chunk.start_position + (rows + 1) / 2.0;
      RunTimed(layers, mean_length, rows);
      RunTimed(head, mean_length, 1);
    } else {
      for (const OpCall& call : layers.calls()) backend_.Run(call.op);
      for (const OpCall& call : head.calls()) backend_.Run(call.op);
    }
    int32_t token = 0;
    if (chunk.sample) {
      backend_.CopyToHost(&token, workspace_.tokens.data, sizeof(token));
    } else {
      backend_.Synchronize();
    }
    return token;
  }

  std::span<const int32_t> Decode(std::span<const DecodeRow> rows) override {
    if (ahead_) {
      tokens_ = ahead_->Decode(rows);
    } else {
      Launch(rows, /*tokens_on_device=*/false);
      tokens_ = Collect();
    }
    return tokens_;
  }

  void Launch(std::span<const DecodeRow> rows, bool tokens_on_device) override {
    const size_t index = BucketIndex(rows);
    const int bucket = sizes_.buckets[index];
    const WrittenInputs inputs = inputs_->Decode(rows, bucket, tokens_on_device);
    port_->Put(inputs.image, inputs.begin, inputs.end);
    Program& program = *decode_.programs[index];
    if (timed_decode_.Next()) {
      const std::span<const double> seconds = program.RunTimed();
      profiler_.Record("decode", bucket, decode_lists_[index].calls(), seconds, inputs.mean_length,
                       static_cast<int64_t>(rows.size()));
    } else {
      program.Run();
    }
    replays_[index].fetch_add(1, std::memory_order_relaxed);
    launched_rows_.push_back(rows.size());
  }

  std::vector<int32_t> Collect() override {
    const auto start = std::chrono::steady_clock::now();
    const auto* tokens = static_cast<const int32_t*>(port_->Collect());
    waited_ += std::chrono::steady_clock::now() - start;
    const size_t rows = launched_rows_.front();
    launched_rows_.pop_front();
    return {tokens, tokens + rows};
  }

  const KernelProfiler& profiler() const override { return profiler_; }

  std::vector<EngineStats::PerBucket> BucketCounters() const override {
    std::vector<EngineStats::PerBucket> out;
    for (size_t i = 0; i < sizes_.buckets.size(); ++i) {
      out.push_back({.batch = sizes_.buckets[i],
                     .replays = replays_[i].load(std::memory_order_relaxed),
                     .captures = 1});
    }
    return out;
  }

  std::vector<int> buckets() const override { return sizes_.buckets; }
  const DecodePlanChoice& plan_choice() const override { return decode_.choice; }
  std::span<const OpCall> DecodeCalls(int bucket) const override {
    const auto at = std::find(sizes_.buckets.begin(), sizes_.buckets.end(), bucket);
    Require(at != sizes_.buckets.end(), "DecodeCalls: there is no bucket ", bucket);
    return decode_lists_[at - sizes_.buckets.begin()].calls();
  }
  double waited_seconds() const override { return std::chrono::duration<double>(waited_).count(); }
  void set_profile_every(int steps) override {
    timed_decode_.set(steps);
    timed_prefill_.set(steps);
  }

  std::vector<float> PrefillAllLogits(const PrefillChunk& chunk,
                                      const OpObserver& observer) override {
    Require(!ahead_, "PrefillAllLogits: the runner decodes ahead; make one with decode_ahead off");
    const int rows = static_cast<int>(chunk.tokens.size());
    inputs_->Prefill(chunk);
    if (chunk.start_position == 0) ZeroState(chunk.sequence.state_slot);
    RunObserved(PrefillLayers(rows), observer);
    std::vector<float> logits(int64_t{rows} * spec_.vocab_size);
    for (int first = 0; first < rows; first += sizes_.max_bucket) {
      const int count = std::min(sizes_.max_bucket, rows - first);
      OpList head("prefill_");
      AppendHead(Context(), {}, {}, first, count, HeadForm::kPlain, head);
      RunObserved(head, observer);
      CopyLogits(count, logits.data() + int64_t{first} * spec_.vocab_size);
    }
    return logits;
  }

  std::span<const int32_t> DecodeEagerly(std::span<const DecodeRow> rows,
                                         const OpObserver& observer) override {
    Require(!ahead_, "DecodeEagerly: the runner decodes ahead; make one with decode_ahead off");
    const size_t index = BucketIndex(rows);
    inputs_->CopyToDevice(inputs_->Decode(rows, sizes_.buckets[index], /*tokens_on_device=*/false));
    RunObserved(decode_lists_[index], observer);
    tokens_.resize(rows.size());
    backend_.CopyToHost(tokens_.data(), workspace_.inputs,
                        static_cast<int64_t>(rows.size() * sizeof(int32_t)));
    return tokens_;
  }

  std::vector<float> LastDecodeLogits(int rows) override {
    Require(rows >= 1 && rows <= sizes_.max_bucket, "LastDecodeLogits: ", rows, " rows");
    std::vector<float> logits(int64_t{rows} * spec_.vocab_size);
    CopyLogits(rows, logits.data());
    return logits;
  }

 private:
  DecoderContext Context() const {
    return {.spec = spec_,
            .weights = weights_,
            .caches = caches_,
            .activations = activations_,
            .workspace = workspace_,
            .split_k = sizes_.split_k,
            .vocab_limit = vocab_limit_};
  }

  // Which bucket a decode of these rows takes.
  size_t BucketIndex(std::span<const DecodeRow> rows) const {
    Require(!rows.empty() && rows.size() <= static_cast<size_t>(max_sequences_),
            "Decode: ", rows.size(), " rows; 1 to ", max_sequences_, " are possible");
    return std::lower_bound(sizes_.buckets.begin(), sizes_.buckets.end(),
                            static_cast<int>(rows.size())) -
           sizes_.buckets.begin();
  }

  void RunObserved(const OpList& list, const OpObserver& observer) {
    for (const OpCall& call : list.calls()) {
      backend_.Run(call.op);
      if (!observer) continue;
      backend_.Synchronize();
      observer(call);
    }
  }

  absl::Status CompileBuckets() {
    for (const int bucket : sizes_.buckets) {
      const StepInputs inputs = LayOutInputs(sizes_, bucket, bucket, workspace_.inputs);
      OpList& list = decode_lists_.emplace_back();
      AppendLayers(Context(), inputs, StepPhase::kDecode, list_plan_, list);
      AppendHead(Context(), inputs.sampling, inputs.token_ids, 0, bucket,
                 list_plan_ == DecodePlan::kFused ? HeadForm::kFused : HeadForm::kPlain, list);
    }
    absl::StatusOr<DecodePrograms> decode =
        CompileDecode(backend_, asked_, decode_lists_, sizes_.buckets, port_.get(),
                      [this](size_t i) { inputs_->Rehearse(sizes_.buckets[i]); });
    if (!decode.ok()) return decode.status();
    decode_ = *std::move(decode);
    return absl::OkStatus();
  }

  // Lists of recent chunk lengths are kept: checking every operator takes longer than a short
  // prompt.
  const OpList& PrefillLayers(int rows) {
    constexpr size_t kKept = 8;
    if (const auto it = prefill_.find(rows); it != prefill_.end()) return it->second;
    if (prefill_.size() >= kKept) prefill_.clear();
    OpList list("prefill_");
    AppendLayers(Context(), LayOutInputs(sizes_, rows, 1, workspace_.inputs), StepPhase::kPrefill,
                 list_plan_, list);
    return prefill_.emplace(rows, std::move(list)).first->second;
  }

  void ZeroState(int slot) {
    for (const LayerCache& cache : caches_) {
      for (const TensorView& state : {cache.recurrent, cache.conv}) {
        if (!state) continue;
        const TensorView part = state.Slice(0, slot, 1);
        backend_.Zero(part.data, part.bytes());
      }
    }
  }

  void RunTimed(const OpList& list, double mean_length, int rows) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> seconds;
    seconds.reserve(list.calls().size());
    backend_.Synchronize();
    Clock::time_point before = Clock::now();
    for (const OpCall& call : list.calls()) {
      backend_.Run(call.op);
      backend_.Synchronize();
      const Clock::time_point after = Clock::now();
      seconds.push_back(std::chrono::duration<double>(after - before).count());
      before = after;
    }
    profiler_.Record("prefill", 0, list.calls(), seconds, mean_length, rows);
  }

  void CopyLogits(int rows, float* to) {
    backend_.CopyToHost(to, workspace_.logits.data,
                        int64_t{rows} * spec_.vocab_size * int64_t{sizeof(float)});
  }

  Backend& backend_;
  const ModelSpec spec_;
  const DecodePlan asked_;
  const DecodePlan list_plan_;  // what the operator lists are built for: explicit or fused
  const StepSizes sizes_;
  const int max_sequences_;
  const int vocab_limit_;

  Buffer memory_;  // everything below is cut from it
  ModelWeights weights_;
  std::vector<LayerCache> caches_;
  Activations activations_;
  Workspace workspace_;

  std::optional<StepInputWriter> inputs_;
  std::unique_ptr<StepPort> port_;    // of decode's inputs and the tokens that its sampler leaves
  std::vector<OpList> decode_lists_;  // one per bucket
  DecodePrograms decode_;             // likewise
  std::map<int, OpList> prefill_;     // the layers, by rows
  std::vector<int32_t> tokens_;

  std::deque<size_t> launched_rows_;              // of the steps that are not collected yet
  std::chrono::steady_clock::duration waited_{};  // for their tokens
  std::optional<DecodeAhead> ahead_;

  KernelProfiler profiler_;
  EveryNth timed_decode_;
  EveryNth timed_prefill_;
  std::vector<std::atomic<uint64_t>> replays_;  // one per bucket
};

}  // namespace

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(Backend& backend,
                                                                 const ModelSpec& spec,
                                                                 WeightSource& weights,
                                                                 const RunnerOptions& options) {
  const DecodePlan asked =
      options.decode_plan == DecodePlan::kAuto ? options.plan.decode_plan : options.decode_plan;
  if (asked == DecodePlan::kExplicit && options.plan.decode_plan != DecodePlan::kExplicit) {
    return absl::InvalidArgumentError(
        "the memory plan has no room for the explicit plan's score matrix; set "
        "MemoryLimits::decode_plan too");
  }
  if (options.profile_every < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--profile_every is ", options.profile_every, "; 0 turns it off"));
  }
  try {
    auto runner = std::make_unique<ModelRunnerImpl>(backend, spec, options, asked);
    if (absl::Status status = runner->Load(options.plan, weights); !status.ok()) return status;
    return runner;
  } catch (const DeviceError& e) {
    return absl::ResourceExhaustedError(absl::StrCat("loading the model: ", e.what()));
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat("loading the model: ", e.what()));
  }
}

}  // namespace qwend
