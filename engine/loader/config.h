// config.json and generation_config.json of a model folder.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/models/model_spec.h"
#include "engine/request.h"

namespace qwend {

// What generation_config.json asks for. A folder without that file gives the values below.
struct GenerationDefaults {
  SamplingParams sampling;             // temperature 1, top_p 1, top_k off; do_sample false: 0
  std::vector<int32_t> eos_token_ids;  // of generation_config.json alone; config.json's are in spec
};

struct ModelConfig {
  ModelSpec spec;
  GenerationDefaults generation;
  std::vector<std::string> warnings;  // what was assumed or is not applied; for the start-up log
};

// Reads both files. NOT_FOUND for a missing folder or config.json, INVALID_ARGUMENT for anything
// absent, ill-typed, absurd or not supported; the message names the file and the key.
// spec.weight_type is what config.json says; the tensors themselves decide (OpenModel).
absl::StatusOr<ModelConfig> LoadModelConfig(const std::filesystem::path& dir);

// The same on the text of the files. `file` is how messages name it; a warning is appended for
// each assumption.
absl::StatusOr<ModelSpec> ParseModelConfig(std::string_view text, const std::string& file,
                                           std::vector<std::string>& warnings);
absl::StatusOr<GenerationDefaults> ParseGenerationConfig(std::string_view text,
                                                         const std::string& file,
                                                         std::vector<std::string>& warnings);

}  // namespace qwend
