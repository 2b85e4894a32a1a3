// A template's source as tokens, with the white space rules of Hugging Face's environment:
// trim_blocks (the newline behind a block is dropped) and lstrip_blocks (blanks before a block that
// begins its line are dropped).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

struct Token {
  enum class Kind {
    kData,           // text between tags
    kVariableBegin,  // {{
    kVariableEnd,    // }}
    kBlockBegin,     // {%
    kBlockEnd,       // %}
    kName,
    kString,    // text is the unescaped value
    kInteger,   // value
    kFloat,     // value
    kOperator,  // text is the operator's characters
    kEnd,       // of the source
  };
  Kind kind = Kind::kEnd;
  int line = 1;
  std::string text;
  Value value;

  bool IsName(std::string_view name) const { return kind == Kind::kName && text == name; }
  bool IsOperator(std::string_view op) const { return kind == Kind::kOperator && text == op; }
  std::string Describe() const;  // for messages
};

// INVALID_ARGUMENT names the line.
absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source);

// The value of a string literal's inside: Python's escapes. INVALID_ARGUMENT without a line.
absl::StatusOr<std::string> Unescape(std::string_view text);

}  // namespace qwend::jinja
