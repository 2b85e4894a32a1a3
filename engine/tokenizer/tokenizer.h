// Byte-level BPE as a Hugging Face tokenizer.json describes it.
//
// Source: tokenizer.json (normalizer, pre-tokenizer regex, vocabulary, merges, added tokens) united
// with tokenizer_config.json's added_tokens_decoder. Immutable after Load; every method may be
// called from any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace qwend {

class Tokenizer {
 public:
  // `dir` holds tokenizer.json and maybe tokenizer_config.json. Errors name the file and the key at
  // fault.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::filesystem::path& dir);
  virtual ~Tokenizer() = default;

  // Added tokens written in the text ("<|im_start|>") become their ids only with parse_special;
  // otherwise they are ordinary characters. INVALID_ARGUMENT for text that is not UTF-8.
  virtual absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text,
                                                      bool parse_special) const = 0;
  // The text of ids; bytes that are not UTF-8 become U+FFFD as in Hugging Face's decode. Ids
  // without a token give nothing.
  virtual std::string Decode(std::span<const int32_t> ids, bool skip_special_tokens) const = 0;

  virtual std::string_view TokenBytes(int32_t id) const = 0;  // empty for an id without a token
  virtual bool IsSpecial(int32_t id) const = 0;
  virtual std::optional<int32_t> TokenId(
      std::string_view content) const = 0;                  // added tokens by their text
  virtual std::optional<int32_t> eos_token_id() const = 0;  // of tokenizer_config.json's eos_token
  virtual std::string bos_token() const = 0;                // text, empty when unset
  virtual std::string eos_token() const = 0;
  virtual int size() const = 0;  // highest id + 1
  // Encode gives no fewer ids for this text, which is known from its length alone: so that a text
  // far too long for a context is refused without being encoded.
  virtual int64_t LeastTokens(std::string_view text) const = 0;
};

}  // namespace qwend
