// Added tokens: texts such as "<|im_start|>" that stand for one id wherever they are written,
// outside the byte-pair vocabulary.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace qwend {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;      // left out of decoded text on request
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // looked for in the normalized text, not in the raw one
};

// A set of texts to look for, the longest at the leftmost place first.
class AddedTokenMatcher {
 public:
  // `patterns`: text to look for (not empty) and the token it stands for. The tokens must outlive
  // the matcher.
  using Pattern = std::pair<std::string, const AddedToken*>;
  explicit AddedTokenMatcher(std::vector<Pattern> patterns);

  bool empty() const { return patterns_.empty(); }

  // Calls `sink` for the stretches between tokens (with null) and for the tokens (with no text), in
  // order. Stops at an error.
  using Sink = absl::FunctionRef<absl::Status(std::string_view, const AddedToken*)>;
  absl::Status Partition(std::string_view text, Sink sink) const;

 private:
  const Pattern* LongestAt(std::string_view text) const;

  std::vector<Pattern> patterns_;   // sorted by text
  std::array<bool, 256> begins_{};  // the byte begins a pattern
};

// Tokens by id and by content, collected from several files.
class AddedTokens {
 public:
  // The first to come wins where a later one has the same id and content. INVALID_ARGUMENT when
  // only one of the two is the same, or the content is empty.
  absl::Status Add(AddedToken token);

  const std::vector<AddedToken>& all() const { return tokens_; }
  const AddedToken* FindContent(std::string_view content) const;

 private:
  std::vector<AddedToken> tokens_;
  absl::flat_hash_map<std::string, size_t> by_content_;
  absl::flat_hash_map<int32_t, size_t> by_id_;
};

}  // namespace qwend
