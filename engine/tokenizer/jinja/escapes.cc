#include "absl/strings/ascii.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/lexer.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

// Reads exactly `count` hexadecimal digits and moves behind them.
absl::StatusOr<char32_t> ReadHex(std::string_view text, size_t& position, size_t count,
                                 std::string_view escape) {
  char32_t value = 0;
  for (size_t i = 0; i < count; ++i, ++position) {
    if (position >= text.size() ||
        !absl::ascii_isxdigit(static_cast<unsigned char>(text[position]))) {
      return Error("truncated \\", escape, " escape in a string");
    }
    const char c = absl::ascii_tolower(static_cast<unsigned char>(text[position]));
    value = value * 16 + static_cast<char32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  return value;
}

char SimpleEscape(char c) {
  switch (c) {
    case 'n':
      return '\n';
    case 't':
      return '\t';
    case 'r':
      return '\r';
    case 'a':
      return '\a';
    case 'b':
      return '\b';
    case 'f':
      return '\f';
    case 'v':
      return '\v';
    case '\\':
    case '\'':
    case '"':
      return c;
    default:
      return '\0';
  }
}

absl::Status AppendHexEscape(std::string_view text, size_t& position, char kind, std::string& out) {
  const size_t digits = kind == 'x' ? 2 : (kind == 'u' ? 4 : 8);
  const std::string name(1, kind);
  JINJA_ASSIGN(char32_t c, ReadHex(text, position, digits, name));
  if (c >= 0xd800 && c < 0xdc00 && text.substr(position).starts_with("\\u")) {
    size_t next = position + 2;
    JINJA_ASSIGN(const char32_t low, ReadHex(text, next, 4, "u"));
    if (low >= 0xdc00 && low < 0xe000) {
      c = 0x10000 + ((c - 0xd800) << 10) + (low - 0xdc00);
      position = next;
    }
  }
  if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) {
    return Error("a \\", name, " escape in a string is not a character");
  }
  AppendCodePoint(c, out);
  return absl::OkStatus();
}

void AppendOctalEscape(std::string_view text, size_t& position, std::string& out) {
  char32_t c = 0;
  for (int i = 0; i < 3 && position < text.size() && text[position] >= '0' && text[position] <= '7';
       ++i, ++position) {
    c = c * 8 + static_cast<char32_t>(text[position] - '0');
  }
  AppendCodePoint(c, out);
}

}  // namespace

absl::StatusOr<std::string> Unescape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t position = 0; position < text.size();) {
    const char c = text[position++];
    if (c != '\\' || position == text.size()) {
      out += c;
      continue;
    }
    const char kind = text[position];
    if (kind >= '0' && kind <= '7') {
      AppendOctalEscape(text, position, out);
      continue;
    }
    ++position;
    if (kind == 'x' || kind == 'u' || kind == 'U') {
      JINJA_CHECK(AppendHexEscape(text, position, kind, out));
    } else if (kind == 'N') {
      return Error("\\N{...} in a string is not covered; write the character itself");
    } else if (const char simple = SimpleEscape(kind); simple != '\0') {
      out += simple;
    } else if (kind != '\n') {  // a backslash before a line end joins the lines
      out += '\\';
      out += kind;
    }
  }
  return out;
}

}  // namespace qwend::jinja
