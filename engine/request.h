// A generation request as the engine takes it: validated, in token ids. Text, templates and stop
// strings are the caller's side of the border (engine/tokenizer).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace qwend {

struct SamplingParams {
  float temperature = 1.0f;  // 0: greedy
  float top_p = 1.0f;        // (0, 1]
  float min_p = 0.0f;        // [0, 1)
  int top_k = 0;             // 0: off
  uint64_t seed = 0;
};

struct GenerationRequest {
  std::string id;  // unique among live requests
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  int max_tokens = 0;                   // at least 1; prompt + max_tokens may equal the context
  int min_tokens = 0;                   // until then neither an EOS nor a stop id is sampled
  std::vector<int32_t> stop_token_ids;  // on top of the model's EOS ids
  bool ignore_eos = false;
  int priority = 0;                              // higher first among waiting requests
  absl::Time deadline = absl::InfiniteFuture();  // dropped when it passes, also while queued
};

// Why the engine stopped producing. kStopped: the caller said so through Engine::Stop (a stop
// string was complete).
enum class CloseReason {
  kEos,
  kStopToken,
  kLength,
  kStopped,
  kAborted,
  kCancelled,
  kDeadline,
  kNonFiniteLogits,  // this request alone
  kDeviceFault,      // every request
};

}  // namespace qwend
