// What tokenizer.json and tokenizer_config.json say, read and checked.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/tokenizer/added_tokens.h"
#include "engine/tokenizer/bpe.h"
#include "engine/tokenizer/pre_tokenizer.h"

namespace qwend::tokenizer_internal {

struct TokenizerParts {
  Bpe bpe;
  PreTokenizer pre_tokenizer;
  AddedTokens added;
  bool nfc = false;  // text is put in normal form C first
  std::string bos_token;
  std::string eos_token;
  std::optional<int32_t> eos_token_id;
};

// See TokenizerFromJson.
absl::StatusOr<std::unique_ptr<TokenizerParts>> ParseTokenizer(std::string_view tokenizer,
                                                               std::string_view tokenizer_config);

}  // namespace qwend::tokenizer_internal
