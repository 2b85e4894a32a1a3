// One model on one backend: weights, caches and step buffers at fixed addresses, one compiled
// decode program per batch bucket, and eager prefill.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/decode_plan_choice.h"
#include "engine/engine.h"
#include "engine/kernel_profiler.h"
#include "engine/memory_plan.h"
#include "engine/models/model_spec.h"
#include "engine/step_executor.h"
#include "kernels/backend.h"

namespace qwend {

class WeightSource;

struct RunnerOptions {
  MemoryPlan plan;
  DecodePlan decode_plan = DecodePlan::kAuto;
  int profile_every = 64;
  int sampleable_tokens = 0;  // 0: the whole vocabulary
  // Queue step n + 1 before step n is read. Rows must then continue with the sampled tokens, and
  // DecodeEagerly is not possible. Of no use where a step runs on the caller's own processor.
  bool decode_ahead = false;
};

// Thread: the engine thread, but for profiler() and counters, which any thread may read.
class ModelRunner : public StepExecutor {
 public:
  // Uploads the weights and compiles the decode programs; kAuto measures which plan is faster.
  // `backend` must outlive the runner. Errors name the flag, tensor or operator at fault.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(Backend& backend,
                                                             const ModelSpec& spec,
                                                             WeightSource& weights,
                                                             const RunnerOptions& options);

  virtual const KernelProfiler& profiler() const = 0;
  virtual std::vector<EngineStats::PerBucket> BucketCounters() const = 0;
  virtual std::vector<int> buckets() const = 0;
  virtual const DecodePlanChoice& plan_choice() const = 0;
  DecodePlan decode_plan() const { return plan_choice().plan; }  // never kAuto
  // The operators of a bucket's decode program; the bucket must be one of buckets().
  virtual std::span<const OpCall> DecodeCalls(int bucket) const = 0;
  // As RunnerOptions::profile_every; counting starts anew. Engine thread.
  virtual void set_profile_every(int steps) = 0;

  // Seconds that the engine thread has waited for sampled tokens so far, instrumented steps apart.
  // Engine thread.
  virtual double waited_seconds() const = 0;

  // For tests and tools: the logits (fp32 [rows, vocab]) of every position of a prefill, or of the
  // last decode. PrefillAllLogits runs like Prefill but keeps all rows. `observer`, when set, sees
  // each operator after it ran, with the device idle.
  using OpObserver = std::function<void(const OpCall&)>;
  virtual std::vector<float> PrefillAllLogits(const PrefillChunk& chunk,
                                              const OpObserver& observer) = 0;
  // The same step as Decode, operator by operator instead of as a compiled program. The persistent
  // plan's step is run as the fused plan's, whose operators it shares.
  virtual std::span<const int32_t> DecodeEagerly(std::span<const DecodeRow> rows,
                                                 const OpObserver& observer) = 0;
  virtual std::vector<float> LastDecodeLogits(int rows) = 0;
};

}  // namespace qwend
