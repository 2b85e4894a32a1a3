// UTF-8: checking it, and making it out of bytes that need not be it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace qwend {

// Where the first byte lies that starts no whole character; npos when all of `text` is UTF-8.
// Strict: no surrogates, no overlong forms, nothing above U+10FFFF.
size_t FindInvalidUtf8(std::string_view text);

inline bool IsValidUtf8(std::string_view text) {
  return FindInvalidUtf8(text) == std::string_view::npos;
}

// Appends the characters of `bytes` to `out`, with one U+FFFD for every maximal part of a broken
// one (the Unicode standard's recommendation, and Rust's from_utf8_lossy). Leaves alone an
// unfinished character at the end that more bytes could still complete, unless `at_end`. Returns
// how many bytes it took: all of them, or all but at most three.
size_t AppendUtf8Lossy(std::string_view bytes, bool at_end, std::string* out);

void AppendCodePoint(char32_t code_point, std::string* out);

// The character at `*position` of valid UTF-8; moves `*position` behind it.
char32_t NextCodePoint(std::string_view text, size_t* position);

// Unicode's White_Space property.
constexpr bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

}  // namespace qwend
