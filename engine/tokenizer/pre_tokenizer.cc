#include "engine/tokenizer/pre_tokenizer.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/json_fields.h"
#include "engine/tokenizer/utf8.h"

namespace qwend {

using nlohmann::json;
using tokenizer_internal::BoolField;
using tokenizer_internal::FieldError;
using tokenizer_internal::FindField;
using tokenizer_internal::StringField;

namespace {

// What ByteLevel splits by when use_regex is on. Source: openai/gpt-2, encoder.py.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr size_t kMaxSteps = 16;

absl::StatusOr<Regex> SplitRegex(const json& config) {
  const std::string behavior = StringField(config, "behavior");
  if (behavior != "Isolated") {
    return FieldError("behavior", absl::StrCat("'", behavior, "' is not supported, only Isolated"));
  }
  const json* pattern = FindField(config, "pattern");
  if (pattern != nullptr) {
    const std::string regex = StringField(*pattern, "Regex");
    if (!regex.empty()) return Regex::Compile(regex);
    const std::string literal = StringField(*pattern, "String");
    if (!literal.empty()) return Regex::CompileLiteral(literal);
  }
  return FieldError("pattern", "needs a non-empty Regex or String");
}

absl::StatusOr<Regex> StepRegex(const json& config) {
  const std::string type = StringField(config, "type");
  if (type == "Split") return SplitRegex(config);
  if (type == "Digits") {
    return Regex::Compile(BoolField(config, "individual_digits", false) ? "\\p{N}" : "\\p{N}+");
  }
  return FieldError("type", absl::StrCat("'", type,
                                         "' is not supported; Sequence, Split, Digits and "
                                         "ByteLevel are"));
}

}  // namespace

absl::StatusOr<PreTokenizer> PreTokenizer::FromJson(const json& config, absl::string_view where) {
  PreTokenizer result;
  if (StringField(config, "type") == "Sequence") {
    const json* steps = FindField(config, "pretokenizers");
    if (steps == nullptr || !steps->is_array()) {
      return FieldError(absl::StrCat(where, ".pretokenizers"), "must be an array");
    }
    for (size_t i = 0; i < steps->size(); ++i) {
      const std::string step = absl::StrCat(where, ".pretokenizers[", i, "]");
      if (absl::Status s = result.AddStep((*steps)[i], step); !s.ok()) return s;
    }
  } else if (absl::Status s = result.AddStep(config, where); !s.ok()) {
    return s;
  }
  if (!result.has_byte_level_) return FieldError(where, "must end in ByteLevel");
  return result;
}

absl::Status PreTokenizer::AddStep(const json& config, absl::string_view where) {
  if (has_byte_level_) return FieldError(where, "ByteLevel must be the last step");
  if (StringField(config, "type") == "ByteLevel") return AddByteLevel(config, where);
  if (splits_.size() == kMaxSteps) return FieldError(where, "too many steps");
  absl::StatusOr<Regex> regex = StepRegex(config);
  if (!regex.ok()) return FieldError(where, regex.status().message());
  splits_.push_back(*std::move(regex));
  return absl::OkStatus();
}

absl::Status PreTokenizer::AddByteLevel(const json& config, absl::string_view where) {
  has_byte_level_ = true;
  add_prefix_space_ = BoolField(config, "add_prefix_space", true);
  prefix_before_ = splits_.size();
  if (!BoolField(config, "use_regex", true)) return absl::OkStatus();
  absl::StatusOr<Regex> regex = Regex::Compile(kGpt2Pattern);
  if (!regex.ok()) return FieldError(where, regex.status().message());
  splits_.push_back(*std::move(regex));
  return absl::OkStatus();
}

absl::Status PreTokenizer::Split(std::string_view text, Sink piece) const {
  return text.empty() ? absl::OkStatus() : SplitFrom(0, text, piece);
}

absl::Status PreTokenizer::SplitFrom(size_t step, std::string_view text, Sink piece) const {
  std::string prefixed;
  if (add_prefix_space_ && step == prefix_before_) {
    size_t position = 0;
    if (!IsWhiteSpace(NextCodePoint(text, &position))) {
      prefixed = std::string(" ").append(text);
      text = prefixed;
    }
  }
  if (step == splits_.size()) return piece(text);
  // The last split hands its pieces on directly, unless they still need their prefix.
  if (step + 1 == splits_.size() && !(add_prefix_space_ && prefix_before_ == splits_.size())) {
    return splits_[step].Partition(text, piece);
  }
  return splits_[step].Partition(
      text, [&](std::string_view part) { return SplitFrom(step + 1, part, piece); });
}

}  // namespace qwend
