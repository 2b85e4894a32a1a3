#include "engine/tokenizer/jinja/unicode.h"

#include <utf8proc.h>

#include <algorithm>

namespace qwend::jinja {
namespace {

constexpr char32_t kSharpS = 0xdf;

bool IsContinuation(std::string_view text, size_t position) {
  return position < text.size() && (static_cast<unsigned char>(text[position]) & 0xc0) == 0x80;
}

utf8proc_category_t Category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

void AppendUpper(char32_t c, bool title, std::string& out) {
  if (c == kSharpS) {
    out += title ? "Ss" : "SS";
    return;
  }
  const auto code = static_cast<utf8proc_int32_t>(c);
  AppendCodePoint(static_cast<char32_t>(title ? utf8proc_totitle(code) : utf8proc_toupper(code)),
                  out);
}

void AppendLower(char32_t c, std::string& out) {
  AppendCodePoint(static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))), out);
}

bool IsLineEnd(char32_t c) {
  return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

template <typename InSet>
std::string_view StripIf(std::string_view text, bool left, bool right, const InSet& in_set) {
  size_t begin = 0;
  while (left && begin < text.size()) {
    size_t next = begin;
    if (!in_set(NextCodePoint(text, next))) break;
    begin = next;
  }
  size_t end = text.size();
  while (right && end > begin) {
    size_t previous = end - 1;
    while (previous > begin && end - previous < 4 && IsContinuation(text, previous)) --previous;
    size_t next = previous;
    char32_t c = NextCodePoint(text, next);
    if (next != end) {  // a stray byte stands at the end
      previous = end - 1;
      next = previous;
      c = NextCodePoint(text.substr(0, end), next);
    }
    if (!in_set(c)) break;
    end = previous;
  }
  return text.substr(begin, end - begin);
}

}  // namespace

char32_t NextCodePoint(std::string_view text, size_t& position) {
  const auto first = static_cast<unsigned char>(text[position]);
  if (first < 0x80) {
    ++position;
    return first;
  }
  utf8proc_int32_t c = 0;
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data() + position);
  const utf8proc_ssize_t size =
      utf8proc_iterate(bytes, static_cast<utf8proc_ssize_t>(text.size() - position), &c);
  if (size <= 0) {
    ++position;
    return 0xdc00 + char32_t{first};
  }
  position += static_cast<size_t>(size);
  return static_cast<char32_t>(c);
}

void AppendCodePoint(char32_t c, std::string& out) {
  if (c >= 0xdc80 && c <= 0xdcff) {
    out += static_cast<char>(c - 0xdc00);
    return;
  }
  utf8proc_uint8_t buffer[4];
  const utf8proc_ssize_t size = utf8proc_encode_char(static_cast<utf8proc_int32_t>(c), buffer);
  out.append(reinterpret_cast<const char*>(buffer), static_cast<size_t>(size));
}

size_t CountCodePoints(std::string_view text) {
  size_t count = 0;
  for (size_t position = 0; position < text.size(); ++count) NextCodePoint(text, position);
  return count;
}

size_t ByteOffset(std::string_view text, size_t index) {
  size_t position = 0;
  for (; index > 0 && position < text.size(); --index) NextCodePoint(text, position);
  return position;
}

std::vector<std::string_view> Characters(std::string_view text) {
  std::vector<std::string_view> characters;
  for (size_t position = 0; position < text.size();) {
    const size_t begin = position;
    NextCodePoint(text, position);
    characters.push_back(text.substr(begin, position - begin));
  }
  return characters;
}

bool IsSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

bool IsPrintable(char32_t c) {
  if (c < 0x7f) return c >= 0x20;
  switch (Category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    default:
      return true;
  }
}

bool IsAlpha(char32_t c) {
  const utf8proc_category_t category = Category(c);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
}

bool IsDecimal(char32_t c) { return Category(c) == UTF8PROC_CATEGORY_ND; }

bool IsDigit(char32_t c) {
  return IsDecimal(c) || c == 0xb2 || c == 0xb3 || c == 0xb9 || c == 0x2070 ||
         (c >= 0x2074 && c <= 0x2079) || (c >= 0x2080 && c <= 0x2089) ||
         (c >= 0x2460 && c <= 0x2468);
}

bool IsNumeric(char32_t c) {
  const utf8proc_category_t category = Category(c);
  return category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
         category == UTF8PROC_CATEGORY_NO;
}

bool IsUpper(char32_t c) { return Category(c) == UTF8PROC_CATEGORY_LU; }
bool IsLower(char32_t c) { return Category(c) == UTF8PROC_CATEGORY_LL; }
bool IsCased(char32_t c) {
  const utf8proc_category_t category = Category(c);
  return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LT;
}

std::string Upper(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t p = 0; p < text.size();) AppendUpper(NextCodePoint(text, p), false, out);
  return out;
}

std::string Lower(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t p = 0; p < text.size();) AppendLower(NextCodePoint(text, p), out);
  return out;
}

std::string SwapCase(std::string_view text) {
  std::string out;
  for (size_t p = 0; p < text.size();) {
    const char32_t c = NextCodePoint(text, p);
    if (IsUpper(c)) {
      AppendLower(c, out);
    } else {
      AppendUpper(c, false, out);
    }
  }
  return out;
}

std::string Title(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  bool in_word = false;
  for (size_t p = 0; p < text.size();) {
    const char32_t c = NextCodePoint(text, p);
    if (in_word) {
      AppendLower(c, out);
    } else {
      AppendUpper(c, true, out);
    }
    in_word = IsCased(c);
  }
  return out;
}

std::string Capitalize(std::string_view text) {
  std::string out;
  if (text.empty()) return out;
  size_t p = 0;
  AppendUpper(NextCodePoint(text, p), true, out);
  return out + Lower(text.substr(p));
}

std::string_view Strip(std::string_view text, bool left, bool right) {
  return StripIf(text, left, right, IsSpace);
}

std::string_view Strip(std::string_view text, std::string_view chars, bool left, bool right) {
  std::vector<char32_t> set;
  for (size_t p = 0; p < chars.size();) set.push_back(NextCodePoint(chars, p));
  std::sort(set.begin(), set.end());
  return StripIf(text, left, right,
                 [&](char32_t c) { return std::binary_search(set.begin(), set.end(), c); });
}

std::vector<std::string_view> SplitLines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t p = 0; p < text.size();) {
    const size_t end = p;
    const char32_t c = NextCodePoint(text, p);
    if (!IsLineEnd(c)) continue;
    if (c == '\r' && p < text.size() && text[p] == '\n') ++p;
    lines.push_back(text.substr(begin, (keep_ends ? p : end) - begin));
    begin = p;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

}  // namespace qwend::jinja
