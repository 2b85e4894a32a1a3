// Regular expressions as tokenizer.json writes them: Oniguruma's Ruby syntax, run by PCRE2.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace qwend {

// The PCRE2 pattern that means in UCP mode what `pattern` means to Oniguruma. \s, \w and \h differ
// between the two and are spelled out; a construct that PCRE2 reads differently, or not at all, is
// INVALID_ARGUMENT and named.
absl::StatusOr<std::string> TranslateOniguruma(std::string_view pattern);

// Immutable after Compile; one object serves any number of threads.
class Regex {
 public:
  // INVALID_ARGUMENT says what in `pattern` is wrong, and where.
  static absl::StatusOr<Regex> Compile(std::string_view pattern);
  // Matches the characters of `literal` and nothing else.
  static absl::StatusOr<Regex> CompileLiteral(std::string_view literal);

  // Calls `piece` for every part of `text` between matches and for every match, left to right,
  // leaving out empty ones: a partition of `text`. `text` is valid UTF-8. INTERNAL when a match
  // runs into PCRE2's limits. `piece` may stop the walk with an error.
  absl::Status Partition(std::string_view text,
                         absl::FunctionRef<absl::Status(std::string_view)> piece) const;

 private:
  explicit Regex(std::shared_ptr<const void> code) : code_(std::move(code)) {}
  static absl::StatusOr<Regex> CompilePcre(std::string_view pattern, unsigned options);
  std::shared_ptr<const void> code_;  // pcre2_code
};

}  // namespace qwend
