// A Tokenizer from the text of its files, for callers that have no folder.
#pragma once

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/tokenizer/tokenizer.h"

namespace qwend {

// `tokenizer_config` is empty when there is no tokenizer_config.json. Errors are INVALID_ARGUMENT
// and name the file and the key at fault.
absl::StatusOr<std::unique_ptr<Tokenizer>> TokenizerFromJson(std::string_view tokenizer,
                                                             std::string_view tokenizer_config);

}  // namespace qwend
