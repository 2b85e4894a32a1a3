// Values as text: Python's str() and repr(), and json.dumps.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

std::string FormatInteger(Integer value);
std::string FormatFloat(double value);  // shortest text that reads back the same: "1.0", "1e+16"
std::string ReprText(std::string_view text);  // with quotes and escapes

// str(): '' for undefined, text as it is, otherwise repr().
absl::StatusOr<std::string> ToText(Context& context, const Value& value);
absl::StatusOr<std::string> Repr(Context& context, const Value& value);

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool multi_line = false;  // one element a line, `indent` before it once per level
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
absl::StatusOr<std::string> ToJson(Context& context, const Value& value, const JsonStyle& style);

}  // namespace qwend::jinja
