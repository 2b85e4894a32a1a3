// Text as Python's str sees it: a row of code points. All text is UTF-8; a byte that is not part
// of a character counts as one code point of its own and is kept as it is.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace qwend::jinja {

// The code point at `position`, which moves behind it. A stray byte b gives 0xDC00 + b.
char32_t NextCodePoint(std::string_view text, size_t& position);
void AppendCodePoint(char32_t c, std::string& out);

size_t CountCodePoints(std::string_view text);
// Byte offset of the code point with this index; text.size() when there are not so many.
size_t ByteOffset(std::string_view text, size_t index);
std::vector<std::string_view> Characters(std::string_view text);

bool IsSpace(char32_t c);      // str.isspace
bool IsPrintable(char32_t c);  // what repr() shows unescaped
bool IsAlpha(char32_t c);
bool IsDigit(char32_t c);  // str.isdigit: superscripts count
bool IsDecimal(char32_t c);
bool IsNumeric(char32_t c);
bool IsUpper(char32_t c);
bool IsLower(char32_t c);
bool IsCased(char32_t c);

// Case by Unicode's one-to-one mapping, and capital sharp s as "SS".
std::string Upper(std::string_view text);
std::string Lower(std::string_view text);
std::string SwapCase(std::string_view text);
std::string Title(std::string_view text);       // str.title
std::string Capitalize(std::string_view text);  // str.capitalize

// Without white space at the ends, or without the characters of `chars`.
std::string_view Strip(std::string_view text, bool left, bool right);
std::string_view Strip(std::string_view text, std::string_view chars, bool left, bool right);

// Lines as str.splitlines finds them.
std::vector<std::string_view> SplitLines(std::string_view text, bool keep_ends);

}  // namespace qwend::jinja
