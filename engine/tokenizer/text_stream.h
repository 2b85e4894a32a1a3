// From token ids to what a caller may see: whole UTF-8 characters, and nothing of a stop string.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer/tokenizer.h"

namespace qwend {

// Turns ids into text as they come, holding back the bytes of an unfinished character.
class Detokenizer {
 public:
  Detokenizer(const Tokenizer& tokenizer, bool skip_special_tokens);
  std::string Append(int32_t id);  // the text that this id completes; may be empty
  std::string Flush();  // what is left, with U+FFFD for bytes that never became a character
 private:
  const Tokenizer& tokenizer_;
  bool skip_special_;
  std::string pending_;
};

// Finds the first complete stop string in a stream of text, and holds back whatever could still
// become one. Among stop strings that end at the same character the earliest beginning wins.
class StopMatcher {
 public:
  explicit StopMatcher(std::vector<std::string> stop_strings, bool include_stop_string);
  struct Result {
    std::string text;                        // may be released now
    std::optional<std::string> stop_string;  // complete: the stream ends here
  };
  Result Append(std::string_view text);
  std::string Flush();  // the end came without a stop string: the held text is free
 private:
  std::vector<std::string> stops_;
  bool include_;
  std::string held_;
};

}  // namespace qwend
