#include "engine/engine.h"

#include <algorithm>
#include <array>
#include <exception>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/engine_impl.h"
#include "engine/loader/weights.h"
#include "engine/memory_plan.h"
#include "engine/model_runner.h"
#include "kernels/backend.h"
#include "kernels/ops.h"
#include "spdlog/spdlog.h"

namespace qwend {
namespace {

absl::StatusOr<std::unique_ptr<Backend>> OpenBackend(const EngineOptions& options) {
  std::string name = options.backend;
  if (name == "auto") name = CudaBackendBuilt() && CudaDeviceCount() > 0 ? "cuda" : "cpu";
  if (name == "cpu") return MakeCpuBackend(options.threads);
  if (name != "cuda") {
    return absl::InvalidArgumentError(
        absl::StrCat("--backend ", name, ": is none of auto, cuda and cpu"));
  }
  if (!CudaBackendBuilt()) {
    return absl::FailedPreconditionError(
        "--backend cuda: this build has no CUDA backend; configure it with -DQWEND_CUDA=ON, or use "
        "--backend cpu");
  }
  const int devices = CudaDeviceCount();
  if (devices == 0) {
    return absl::FailedPreconditionError(
        "--backend cuda: there is no CUDA device; check that nvidia-smi lists one, or use "
        "--backend cpu");
  }
  if (options.device < 0 || options.device >= devices) {
    return absl::InvalidArgumentError(absl::StrCat("--device ", options.device, ": there are ",
                                                   devices, " CUDA devices, numbered from 0"));
  }
  return MakeCudaBackend(options.device);
}

// "/models/demo/", "." and links all name the folder itself.
std::string FolderName(const std::filesystem::path& dir) {
  std::error_code error;
  std::filesystem::path path = std::filesystem::weakly_canonical(dir, error);
  if (error) path = dir;
  if (path.filename().empty()) path = path.parent_path();
  return path.filename().string();
}

// A missing or unusable template fails the requests that need one, not the start.
absl::Status LoadChatTemplate(const std::filesystem::path& dir,
                              std::unique_ptr<ChatTemplate>& chat_template) {
  auto loaded = ChatTemplate::Load(dir);
  if (loaded.ok()) {
    chat_template = *std::move(loaded);
    return absl::OkStatus();
  }
  if (absl::IsNotFound(loaded.status())) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the model folder ", dir.string(),
        " has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); "
        "send text or token ids"));
  }
  const std::string reason(loaded.status().message());
  spdlog::warn("chat requests will be refused: {}", reason);
  return absl::FailedPreconditionError(
      absl::StrCat("the model's chat template cannot be used: ", reason));
}

ModelDescription Describe(const EngineOptions& options, const ModelConfig& config,
                          const MemoryPlan& plan, const Tokenizer* tokenizer) {
  const ModelSpec& spec = config.spec;
  std::vector<int32_t> eos = spec.eos_token_ids;
  eos.insert(eos.end(), config.generation.eos_token_ids.begin(),
             config.generation.eos_token_ids.end());
  int sampleable = spec.vocab_size;
  if (tokenizer != nullptr) {
    sampleable = std::min(sampleable, tokenizer->size());
    if (const auto id = tokenizer->eos_token_id()) eos.push_back(*id);
  }
  std::sort(eos.begin(), eos.end());
  eos.erase(std::unique(eos.begin(), eos.end()), eos.end());
  return {.model_id = FolderName(options.model_dir),
          .architecture = spec.family,
          .parameters = CountParameters(spec),
          .weight_dtype = Name(spec.weight_type),
          .vocab_size = spec.vocab_size,
          .sampleable_tokens = sampleable,
          .max_context_tokens = plan.max_context_tokens,
          .num_layers = spec.num_layers(),
          .num_full_attention_layers = spec.num_full_attention_layers(),
          .eos_token_ids = std::move(eos),
          .default_sampling = config.generation.sampling};
}

DeviceDescription Describe(const Backend& backend, const MemoryPlan& plan,
                           const ModelRunner& runner, double bandwidth) {
  const BackendInfo info = backend.Info();
  return {.backend = info.name,
          .device_name = info.device_name,
          .decode_plan = PlanName(runner.decode_plan()),
          .max_sequences = plan.max_sequences,
          .kv_page_tokens = kPageTokens,
          .kv_pages_total = plan.kv_pages,
          .batch_buckets = runner.buckets(),
          .weight_bytes = plan.weight_bytes,
          .kv_bytes = plan.kv_bytes,
          .state_bytes = plan.state_bytes,
          .activation_bytes = plan.activation_bytes,
          .workspace_bytes = plan.workspace_bytes,
          .peak_bandwidth = bandwidth};
}

// A short generation, so that the first request finds everything in place. It leaves nothing
// behind: a sequence that starts at position 0 zeroes its slot and reads only what it wrote.
absl::Status WarmUp(StepExecutor& executor, const ModelDescription& model) {
  constexpr int kSteps = 4;
  constexpr std::array<int32_t, 1> kPages = {0};
  const SequenceView sequence{.pages = kPages, .state_slot = 0};
  const std::array<int32_t, 2> prompt = {0, std::min(1, model.vocab_size - 1)};
  const int steps = std::min(kSteps, model.max_context_tokens - static_cast<int>(prompt.size()));
  int position = static_cast<int>(prompt.size());
  int32_t token = executor.Prefill({.sequence = sequence,
                                    .tokens = prompt,
                                    .start_position = 0,
                                    .sample = true,
                                    .sampling = {.position = position}});
  for (int i = 0; i < steps && token != kInvalidToken; ++i, ++position) {
    const DecodeRow row{.sequence = sequence,
                        .token = token,
                        .position = position,
                        .sampling = {.position = position + 1}};
    token = executor.Decode({&row, 1})[0];
  }
  if (token == kInvalidToken) {
    return absl::FailedPreconditionError(
        "the warm-up generation gave NaN or infinite logits: the weights are damaged, or not what "
        "config.json says; check the model folder");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Engine>> Assemble(const EngineOptions& options) {
  EngineParts parts;
  auto opened = OpenModel(options.model_dir);
  if (!opened.ok()) return opened.status();
  for (const std::string& warning : opened->config.warnings) spdlog::warn("{}", warning);
  const ModelSpec& spec = opened->config.spec;

  if (std::filesystem::exists(options.model_dir / "tokenizer.json")) {
    auto tokenizer = Tokenizer::Load(options.model_dir);
    if (!tokenizer.ok()) return tokenizer.status();
    parts.tokenizer = *std::move(tokenizer);
  } else {
    spdlog::warn("{} has no tokenizer.json: only token ids are served", options.model_dir.string());
  }
  parts.chat_template_status = LoadChatTemplate(options.model_dir, parts.chat_template);

  auto backend = OpenBackend(options);
  if (!backend.ok()) return backend.status();
  parts.backend = *std::move(backend);
  const double bandwidth = parts.backend->MeasureReadBandwidth();
  const BackendInfo info = parts.backend->Info();
  spdlog::info("backend {} on {}, {:.1f} GB/s read", info.name, info.device_name, bandwidth / 1e9);

  auto plan = PlanMemory(spec, *parts.backend,
                         {.max_sequences = options.max_sequences,
                          .max_context_tokens = options.max_context_tokens,
                          .prefill_chunk_tokens = options.prefill_chunk_tokens,
                          .memory_fraction = options.memory_fraction,
                          .decode_plan = options.decode_plan});
  if (!plan.ok()) return plan.status();
  spdlog::info("memory:\n{}", plan->Table());

  parts.model = Describe(options, opened->config, *plan, parts.tokenizer.get());
  auto created = ModelRunner::Create(*parts.backend, spec, *opened->weights,
                                     {.plan = *plan,
                                      .decode_plan = options.decode_plan,
                                      .profile_every = options.profile_every,
                                      .sampleable_tokens = parts.model.sampleable_tokens,
                                      .decode_ahead = parts.backend->Info().asynchronous});
  if (!created.ok()) return created.status();
  ModelRunner* runner = created->get();
  parts.executor = *std::move(created);
  parts.device = Describe(*parts.backend, *plan, *runner, bandwidth);
  spdlog::info("decode plan {}", runner->plan_choice().ToString());
  parts.kernel_stats = [runner](EngineStats& stats) {
    stats.buckets = runner->BucketCounters();
    stats.kernels = runner->profiler().Totals();
    stats.profiles = runner->profiler().Profiles();
  };
  parts.max_queued = options.max_queued;

  if (absl::Status status = WarmUp(*runner, parts.model); !status.ok()) return status;
  spdlog::info("{}: {}, {} parameters, {} layers, context {}", parts.model.model_id,
               parts.model.architecture, parts.model.parameters, parts.model.num_layers,
               parts.model.max_context_tokens);
  return std::make_unique<EngineImpl>(std::move(parts));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options) {
  if (options.max_queued < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--max_queued ", options.max_queued, ": is below 0"));
  }
  try {
    return Assemble(options);
  } catch (const DeviceError& e) {
    return absl::InternalError(absl::StrCat("the device failed at start-up: ", e.what()));
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("start-up failed: ", e.what()));
  }
}

}  // namespace qwend
