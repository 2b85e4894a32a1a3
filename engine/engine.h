// The engine: one model on one device, and one thread that schedules, prefills, decodes and hands
// out tokens.
//
// Threads: Submit, End, AbortAll, Stats and the accessors may be called from any thread and
// never wait for the device. Everything else happens on the engine thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/request.h"
#include "engine/token_sink.h"

namespace qwend {

class ChatTemplate;
class Tokenizer;

enum class DecodePlan { kAuto, kExplicit, kFused, kPersistent };

struct EngineOptions {
  std::filesystem::path model_dir;
  std::string backend = "auto";  // auto | cuda | cpu
  int device = 0;
  int threads = 0;  // CPU backend; 0 = all cores
  DecodePlan decode_plan = DecodePlan::kAuto;
  int max_sequences = 0;       // 0: the backend's default (16)
  int max_context_tokens = 0;  // 0: the model's, bounded by the backend's default (8192 on the CPU)
  int max_queued = 256;
  int prefill_chunk_tokens = 0;  // 0: the backend's default; a multiple of 64
  double memory_fraction = 0.85;
  int profile_every = 64;  // one decode replay in N is the instrumented one; 0: off
};

// What a model folder and the engine's choices add up to. Fixed after Create.
struct ModelDescription {
  std::string model_id;       // the folder's name
  std::string architecture;   // qwen3_5 | qwen3 | qwen2 | llama
  uint64_t parameters = 0;    // tied weights counted once
  std::string weight_dtype;   // bf16 | f16 | f32
  int vocab_size = 0;         // rows of the embedding
  int sampleable_tokens = 0;  // ids below this may be sampled
  int max_context_tokens = 0;
  int num_layers = 0;
  int num_full_attention_layers = 0;
  std::vector<int32_t> eos_token_ids;
  SamplingParams
      default_sampling;  // generation_config.json, then {temperature 1, top_p 1, top_k off}
};

struct DeviceDescription {
  std::string backend;  // cpu | cuda
  std::string device_name;
  std::string decode_plan;  // explicit | fused | persistent
  int max_sequences = 0;
  int kv_page_tokens = 0;
  int kv_pages_total = 0;
  std::vector<int> batch_buckets;
  int64_t weight_bytes = 0;
  int64_t kv_bytes = 0;
  int64_t state_bytes = 0;
  int64_t activation_bytes = 0;
  int64_t workspace_bytes = 0;
  double peak_bandwidth = 0;  // bytes per second, measured at start-up
};

// One kernel's totals since the start, from instrumented runs only.
struct KernelTotals {
  std::string kernel;  // operator map name, without the prefill_ prefix
  std::string phase;   // decode | prefill
  uint64_t calls = 0;
  double seconds = 0;
  double bytes = 0;
};

// The mean instrumented decode step of one batch bucket.
struct StepProfile {
  int batch = 0;
  uint64_t steps = 0;
  double step_seconds = 0;
  struct Kernel {
    std::string kernel;
    double calls_per_step = 0;
    double seconds_per_step = 0;
    double bytes_per_step = 0;
  };
  std::vector<Kernel> kernels;  // longest first
};

// Counters and gauges as of now. Counters only grow.
struct EngineStats {
  int running = 0;
  int waiting = 0;
  int kv_pages_used = 0;
  uint64_t prompt_tokens = 0;  // of admitted requests
  uint64_t cached_prompt_tokens = 0;
  uint64_t generation_tokens = 0;
  uint64_t preemptions = 0;
  struct PerBucket {
    int batch = 0;
    uint64_t replays = 0;
    uint64_t captures = 0;
  };
  std::vector<PerBucket> buckets;
  std::vector<KernelTotals> kernels;
  std::vector<StepProfile> profiles;
  absl::Time heartbeat;  // when the engine thread last went round its loop
  bool failed = false;   // device fault: nothing will be served any more
};

class Engine {
 public:
  // Called on the engine thread after every decode step: the batch bucket, and the step's wall
  // time.
  using StepObserver = std::function<void(int batch, absl::Duration)>;
  // Called once on the engine thread when the device has failed, after every sink was closed.
  using FaultObserver = std::function<void(const absl::Status&)>;

  // Loads the model folder, sizes and allocates all memory (logging the table), compiles the decode
  // programs and runs a warm-up generation. Errors name the file or flag at fault and the remedy.
  // The thread starts with Start().
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options);
  virtual ~Engine() = default;  // aborts what still runs, closes every sink, joins the thread

  virtual void Start(StepObserver on_step, FaultObserver on_fault) = 0;

  // OK: the sink will be closed exactly once. Otherwise the sink is never called:
  //   INVALID_ARGUMENT    empty prompt, id outside the vocabulary, a limit or sampling value out of
  //                       range, prompt + max_tokens above the context
  //   ALREADY_EXISTS      a live request has this id; free again before OnClose is called
  //   RESOURCE_EXHAUSTED  the queue is full: max_sequences + max_queued requests are live
  //   UNAVAILABLE         the engine failed or is shutting down
  virtual absl::Status Submit(GenerationRequest request, std::shared_ptr<TokenSink> sink) = 0;

  // Ends a live request with `reason` (kStopped, kCancelled, kAborted or kDeadline); its pages and
  // slot are free within one decode step. NOT_FOUND when no live request has this id.
  virtual absl::Status End(const std::string& id, CloseReason reason) = 0;
  // Ends all of them with kAborted.
  virtual void AbortAll() = 0;

  virtual const ModelDescription& model() const = 0;
  virtual const DeviceDescription& device() const = 0;
  virtual const Tokenizer* tokenizer() const = 0;         // null: the folder has no tokenizer.json
  virtual const ChatTemplate* chat_template() const = 0;  // null: none that could be used
  // OK with a chat template; otherwise FAILED_PRECONDITION with the reason: the folder has none, or
  // its line and the construct that is not covered. For the request that asks for it.
  virtual absl::Status chat_template_status() const = 0;
  virtual EngineStats Stats() const = 0;
};

}  // namespace qwend
