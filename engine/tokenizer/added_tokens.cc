#include "engine/tokenizer/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/absl_view.h"
#include "engine/tokenizer/utf8.h"

namespace qwend {
namespace {

// \w of Rust's regex crate: Alphabetic, marks, decimal digits, connectors and joiners. Alphabetic
// is letters, letter numbers, some marks, and the circled and squared letters.
bool IsWordCharacter(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) ||
             (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
             (c >= 0x1F170 && c <= 0x1F189);
  }
}

// Where the character before `end` begins; `end` is not 0.
size_t PreviousStart(std::string_view text, size_t end) {
  do --end;
  while (end > 0 && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80);
  return end;
}

char32_t CharacterAt(std::string_view text, size_t position) {
  return NextCodePoint(text, &position);
}

bool WordTouches(std::string_view text, size_t begin, size_t end) {
  return (begin > 0 && IsWordCharacter(CharacterAt(text, PreviousStart(text, begin)))) ||
         (end < text.size() && IsWordCharacter(CharacterAt(text, end)));
}

size_t WhiteSpaceBegin(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t previous = PreviousStart(text, end);
    if (!IsWhiteSpace(CharacterAt(text, previous))) break;
    end = previous;
  }
  return end;
}

size_t WhiteSpaceEnd(std::string_view text, size_t begin) {
  while (begin < text.size()) {
    size_t next = begin;
    if (!IsWhiteSpace(NextCodePoint(text, &next))) break;
    begin = next;
  }
  return begin;
}

}  // namespace

AddedTokenMatcher::AddedTokenMatcher(std::vector<Pattern> patterns)
    : patterns_(std::move(patterns)) {
  // Of equal texts the first one stays.
  std::stable_sort(patterns_.begin(), patterns_.end(),
                   [](const Pattern& a, const Pattern& b) { return a.first < b.first; });
  patterns_.erase(
      std::unique(patterns_.begin(), patterns_.end(),
                  [](const Pattern& a, const Pattern& b) { return a.first == b.first; }),
      patterns_.end());
  for (const Pattern& pattern : patterns_) begins_[static_cast<uint8_t>(pattern.first[0])] = true;
}

// Narrows the sorted patterns to those that begin with one more byte of `text` at a time.
const AddedTokenMatcher::Pattern* AddedTokenMatcher::LongestAt(std::string_view text) const {
  const Pattern* longest = nullptr;
  auto low = patterns_.begin();
  auto high = patterns_.end();
  for (size_t depth = 0; depth < text.size(); ++depth) {
    const auto byte = static_cast<uint8_t>(text[depth]);
    // All of [low, high) are longer than `depth`: a shorter one was stepped over below.
    low = std::partition_point(
        low, high, [&](const Pattern& p) { return static_cast<uint8_t>(p.first[depth]) < byte; });
    high = std::partition_point(
        low, high, [&](const Pattern& p) { return static_cast<uint8_t>(p.first[depth]) == byte; });
    if (low == high) break;
    if (low->first.size() == depth + 1) longest = &*low++;
  }
  return longest;
}

absl::Status AddedTokenMatcher::Partition(std::string_view text, Sink sink) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const Pattern* match =
        begins_[static_cast<uint8_t>(text[at])] ? LongestAt(text.substr(at)) : nullptr;
    if (match == nullptr) {
      ++at;
      continue;
    }
    const AddedToken& token = *match->second;
    size_t begin = at;
    size_t end = at + match->first.size();
    at = end;
    if (token.single_word && WordTouches(text, begin, end)) continue;
    if (token.lstrip) begin = WhiteSpaceBegin(text, begin);
    if (token.rstrip) end = WhiteSpaceEnd(text, end);
    // White space that an earlier token has taken is not text any more.
    if (done < begin) {
      if (absl::Status s = sink(text.substr(done, begin - done), nullptr); !s.ok()) return s;
    }
    if (absl::Status s = sink({}, &token); !s.ok()) return s;
    done = std::max(done, end);
  }
  return done < text.size() ? sink(text.substr(done), nullptr) : absl::OkStatus();
}

absl::Status AddedTokens::Add(AddedToken token) {
  if (token.content.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("added token ", token.id, " has no content"));
  }
  const auto same_id = by_id_.find(token.id);
  const auto same_content = by_content_.find(token.content);
  const bool known_id = same_id != by_id_.end();
  const bool known_content = same_content != by_content_.end();
  if (known_id && known_content && same_id->second == same_content->second) {
    return absl::OkStatus();
  }
  if (known_id) {
    return absl::InvalidArgumentError(absl::StrCat("added token id ", token.id, " is given to '",
                                                   tokens_[same_id->second].content, "' and to '",
                                                   token.content, "'"));
  }
  if (known_content) {
    return absl::InvalidArgumentError(absl::StrCat("added token '", token.content, "' has the ids ",
                                                   tokens_[same_content->second].id, " and ",
                                                   token.id));
  }
  by_id_.emplace(token.id, tokens_.size());
  by_content_.emplace(token.content, tokens_.size());
  tokens_.push_back(std::move(token));
  return absl::OkStatus();
}

const AddedToken* AddedTokens::FindContent(std::string_view content) const {
  const auto it = by_content_.find(AbslView(content));
  return it == by_content_.end() ? nullptr : &tokens_[it->second];
}

}  // namespace qwend
