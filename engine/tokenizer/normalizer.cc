#include "engine/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/utf8.h"

namespace qwend {
namespace {

// Below this every character is its own form C, begins a new combining sequence, and never joins
// the character before it; its first UTF-8 byte is below kFirstByte.
constexpr uint8_t kFirstByte = 0xCC;  // of U+0300

constexpr auto kFormC = static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE);

bool IsInert(char lead) { return static_cast<uint8_t>(lead) < kFirstByte; }

int CombiningClass(utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; }

// Sorts every run of combining marks by class, keeping the order of equals. utf8proc's own sort is
// quadratic in a run's length, and callers choose that length.
void OrderMarks(std::vector<utf8proc_int32_t>* code_points) {
  for (auto it = code_points->begin(); it != code_points->end();) {
    if (CombiningClass(*it) == 0) {
      ++it;
      continue;
    }
    const auto run_end =
        std::find_if(it, code_points->end(), [](auto c) { return CombiningClass(c) == 0; });
    std::stable_sort(it, run_end,
                     [](auto a, auto b) { return CombiningClass(a) < CombiningClass(b); });
    it = run_end;
  }
}

// Appends form C of one stretch of text that begins a combining sequence and ends before another.
absl::Status AppendComposed(std::string_view text, std::vector<utf8proc_int32_t>* scratch,
                            std::string* out) {
  scratch->clear();
  int boundary_class = 0;
  for (size_t position = 0; position < text.size();) {
    const auto c = static_cast<utf8proc_int32_t>(NextCodePoint(text, &position));
    utf8proc_int32_t parts[32];
    const utf8proc_ssize_t count = utf8proc_decompose_char(c, parts, 32, kFormC, &boundary_class);
    if (count < 0 || count > 32) {
      return absl::InternalError(
          absl::StrCat("NFC: utf8proc cannot decompose U+", absl::Hex(c, absl::kZeroPad4)));
    }
    scratch->insert(scratch->end(), parts, parts + count);
  }
  OrderMarks(scratch);
  const utf8proc_ssize_t length =
      utf8proc_normalize_utf32(scratch->data(), scratch->size(), kFormC);
  if (length < 0) {
    return absl::InternalError(absl::StrCat("NFC: utf8proc: ", utf8proc_errmsg(length)));
  }
  for (utf8proc_ssize_t i = 0; i < length; ++i) AppendCodePoint((*scratch)[i], out);
  return absl::OkStatus();
}

}  // namespace

bool MayNeedNfc(std::string_view text) { return !std::all_of(text.begin(), text.end(), IsInert); }

absl::StatusOr<std::string> NormalizeNfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::vector<utf8proc_int32_t> scratch;
  size_t begin = 0;
  while (begin < text.size()) {
    // The stretch of inert characters up to the last one that a mark follows is copied as it is.
    size_t mark = begin;
    size_t last_start = begin;
    while (mark < text.size() && IsInert(text[mark])) {
      if ((static_cast<uint8_t>(text[mark]) & 0xC0) != 0x80) last_start = mark;
      ++mark;
    }
    if (mark == text.size()) last_start = mark;
    out.append(text.substr(begin, last_start - begin));
    if (last_start == text.size()) break;
    size_t end = mark;
    while (end < text.size() &&
           (!IsInert(text[end]) || (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80)) {
      ++end;
    }
    if (absl::Status s = AppendComposed(text.substr(last_start, end - last_start), &scratch, &out);
        !s.ok()) {
      return s;
    }
    begin = end;
  }
  return out;
}

}  // namespace qwend
