// From a GenerateRequest as it came to one that the engine takes, or to everything wrong with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/request.h"
#include "qwend/v1/inference.pb.h"
#include "server/model_view.h"
#include "server/violations.h"

namespace qwend {

struct RequestLimits {
  static constexpr int kMaxRequestIdBytes = 128;
  static constexpr int kMaxStopStringBytes = 1024;
  // Ids that a sampler row can hold back: the model's EOS ids and the request's stop ids together.
  static constexpr int kMaxBannedIds = 64;
  static constexpr float kMaxTemperature = 100.0f;
  // Below this the largest logit wins anyway, and dividing by it could overflow.
  static constexpr float kGreedyTemperature = 1e-5f;
  static constexpr int kMaxTopLogprobs = 20;

  int max_stop_strings = 16;
};

// What becomes of the tokens on their way to the caller.
struct OutputOptions {
  std::vector<std::string> stop_strings;
  bool include_stop_string = false;
  bool omit_text = false;
  bool omit_token_ids = false;
  bool skip_special_tokens = false;
};

struct PreparedRequest {
  GenerationRequest engine;  // without the deadline; the id is as the caller gave it, maybe empty
  OutputOptions output;
};

// INVALID_ARGUMENT lists all violations, each with its field. Only a request without any gets
// FAILED_PRECONDITION (the model lacks a tokenizer or a chat template) or UNIMPLEMENTED (a field
// whose feature is not built), which name all fields concerned.
absl::StatusOr<PreparedRequest> PrepareRequest(const v1::GenerateRequest& request,
                                               const ModelView& model, const RequestLimits& limits);

// The ids of a prompt or of a text to decode: each one must be below the vocabulary's size.
std::vector<int32_t> CheckedIds(const google::protobuf::RepeatedField<uint32_t>& ids,
                                const std::string& field, int vocab_size, Violations* violations);

}  // namespace qwend
