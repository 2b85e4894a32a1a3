// How much memory everything takes, settled and logged before anything is allocated.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/models/model_spec.h"
#include "kernels/backend.h"

namespace qwend {

struct MemoryLimits {
  int max_sequences = 0;         // 0: 16
  int max_context_tokens = 0;    // 0: min(model, 8192 on the CPU, 32768 on CUDA)
  int prefill_chunk_tokens = 0;  // 0: 512
  double memory_fraction = 0.85;
  DecodePlan decode_plan = DecodePlan::kAuto;  // kExplicit needs room for a score matrix
};

struct MemoryPlan {
  DecodePlan decode_plan = DecodePlan::kAuto;  // of the limits; all but kExplicit take the same
  int max_sequences = 0;
  int max_context_tokens = 0;
  int prefill_chunk_tokens = 0;
  int kv_pages = 0;  // usable ones; the pool holds one more, the dummy page
  int64_t weight_bytes = 0;
  int64_t kv_bytes = 0;
  int64_t state_bytes = 0;  // recurrent and convolution, the dummy slot included
  int64_t activation_bytes = 0;
  int64_t workspace_bytes = 0;  // logits, scores, split-K partials, rope tables, sampler rows
  int64_t total() const {
    return weight_bytes + kv_bytes + state_bytes + activation_bytes + workspace_bytes;
  }
  std::string Table() const;  // one line a kind, with sizes a person reads
};

// Gives every sequence its whole context when that fits into memory_fraction of the device, and
// otherwise as many pages as fit, but at least one whole context. RESOURCE_EXHAUSTED with the table
// and what to lower when that does not fit; INVALID_ARGUMENT for a limit outside what the model can
// do.
absl::StatusOr<MemoryPlan> PlanMemory(const ModelSpec& spec, const Backend& backend,
                                      const MemoryLimits& limits);

}  // namespace qwend
