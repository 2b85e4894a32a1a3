#include "engine/memory_plan.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/models/model_tensors.h"
#include "engine/step_buffers.h"

namespace qwend {
namespace {

constexpr int kMaxSequences = 64;
constexpr int kMinContext = 2;  // one token of a prompt, and one to generate
constexpr int kDefaultSequences = 16;
constexpr int kDefaultChunk = 512;
constexpr int kMaxChunk = 8192;

std::string Size(int64_t bytes) {
  if (bytes >= int64_t{1} << 30) return absl::StrFormat("%.2f GiB", bytes * 0x1p-30);
  if (bytes >= int64_t{1} << 20) return absl::StrFormat("%.1f MiB", bytes * 0x1p-20);
  return absl::StrFormat("%.1f KiB", bytes * 0x1p-10);
}

absl::Status OutOfRange(const char* flag, int64_t value, int64_t min, int64_t max,
                        const char* why = "") {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is ", value, "; it must be between ", min, " and ", max, why));
}

int64_t KvBytes(const ModelSpec& spec, const MemoryPlan& plan, const BackendInfo& info) {
  MemoryCursor cursor;
  LayOutKv(spec, StepSizes(plan, info), cursor);
  return cursor.used();
}

// Everything but the KV pages, which depend on what is left.
void SizeFixedParts(const ModelSpec& spec, const Backend& backend, MemoryPlan& plan) {
  const BackendInfo info = backend.Info();
  const StepSizes sizes(plan, info);
  MemoryCursor weights;
  ModelWeights unused;
  for (const WeightSlot& slot : WeightSlots(spec, unused)) {
    weights.Take(SlotBytes(slot, spec, backend));
  }
  plan.weight_bytes = weights.used();
  MemoryCursor states;
  std::vector<LayerCache> caches(spec.layers.size());
  LayOutStates(spec, sizes, states, caches);
  plan.state_bytes = states.used();
  MemoryCursor activations;
  LayOutActivations(spec, sizes, activations);
  plan.activation_bytes = activations.used();
  MemoryCursor workspace;
  LayOutWorkspace(spec, sizes, workspace);
  plan.workspace_bytes = workspace.used();
}

absl::Status ReadLimits(const ModelSpec& spec, const BackendInfo& info, const MemoryLimits& limits,
                        MemoryPlan& plan) {
  plan.decode_plan = limits.decode_plan;
  plan.max_sequences = limits.max_sequences == 0 ? kDefaultSequences : limits.max_sequences;
  if (plan.max_sequences < 1 || plan.max_sequences > kMaxSequences) {
    return OutOfRange("max_sequences", plan.max_sequences, 1, kMaxSequences);
  }
  const int default_context = info.name == "cuda" ? 32768 : 8192;
  plan.max_context_tokens = limits.max_context_tokens == 0
                                ? std::min(spec.max_positions, default_context)
                                : limits.max_context_tokens;
  if (plan.max_context_tokens < kMinContext || plan.max_context_tokens > spec.max_positions) {
    return OutOfRange("max_context_tokens", plan.max_context_tokens, kMinContext,
                      spec.max_positions, ", the model's max_position_embeddings");
  }
  const int whole_context = (plan.max_context_tokens + kPageTokens - 1) / kPageTokens * kPageTokens;
  plan.prefill_chunk_tokens = limits.prefill_chunk_tokens == 0
                                  ? std::min(kDefaultChunk, whole_context)
                                  : limits.prefill_chunk_tokens;
  if (plan.prefill_chunk_tokens < kPageTokens || plan.prefill_chunk_tokens > kMaxChunk ||
      plan.prefill_chunk_tokens % kPageTokens != 0) {
    return OutOfRange("prefill_chunk_tokens", plan.prefill_chunk_tokens, kPageTokens, kMaxChunk,
                      " and a multiple of 64");
  }
  if (!(limits.memory_fraction > 0.0 && limits.memory_fraction <= 1.0)) {
    return absl::InvalidArgumentError(absl::StrCat("--memory_fraction is ", limits.memory_fraction,
                                                   "; it must be above 0 and at most 1"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string MemoryPlan::Table() const {
  std::string out;
  const auto line = [&](const char* kind, int64_t bytes, const std::string& what) {
    absl::StrAppend(&out, absl::StrFormat("  %-12s %12s%s\n", kind, Size(bytes),
                                          what.empty() ? "" : "  " + what));
  };
  line("weights", weight_bytes, "");
  line("kv cache", kv_bytes, absl::StrCat(kv_pages, " pages of ", kPageTokens, " tokens"));
  line("states", state_bytes, absl::StrCat(max_sequences, " sequences"));
  line("activations", activation_bytes, absl::StrCat(prefill_chunk_tokens, " tokens a chunk"));
  line("workspace", workspace_bytes, absl::StrCat(max_context_tokens, " tokens of context"));
  line("total", total(), "");
  return out;
}

absl::StatusOr<MemoryPlan> PlanMemory(const ModelSpec& spec, const Backend& backend,
                                      const MemoryLimits& limits) {
  const BackendInfo info = backend.Info();
  MemoryPlan plan;
  if (absl::Status status = ReadLimits(spec, info, limits, plan); !status.ok()) return status;
  SizeFixedParts(spec, backend, plan);

  const int pages_per_sequence = (plan.max_context_tokens + kPageTokens - 1) / kPageTokens;
  const auto budget = std::min(
      static_cast<int64_t>(limits.memory_fraction * static_cast<double>(info.memory_bytes)),
      info.free_bytes);
  const auto fits = [&](int pages) {
    plan.kv_pages = pages;
    plan.kv_bytes = KvBytes(spec, plan, info);
    return plan.total() <= budget;
  };
  int low = pages_per_sequence;
  int high = pages_per_sequence * plan.max_sequences;
  if (fits(high)) return plan;
  if (!fits(low)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the model does not fit into ", Size(budget), " (--memory_fraction ",
        limits.memory_fraction, " of ", Size(info.memory_bytes), ", ", Size(info.free_bytes),
        " free) even with one sequence's context in the cache:\n", plan.Table(),
        "lower --max_context_tokens, --max_sequences or --prefill_chunk_tokens, raise "
        "--memory_fraction, or free memory"));
  }
  while (high - low > 1) {  // low fits, high does not
    const int middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  fits(low);
  return plan;
}

}  // namespace qwend
