#include "engine/tokenizer/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

constexpr size_t kNone = std::string_view::npos;

bool IsNameStart(char c) {
  return absl::ascii_isalpha(static_cast<unsigned char>(c)) || c == '_' ||
         static_cast<unsigned char>(c) >= 0x80;
}

bool IsNamePart(char c) {
  return IsNameStart(c) || absl::ascii_isdigit(static_cast<unsigned char>(c));
}

// Line ends as \n, and without the last one.
std::string NormalizeNewlines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
      continue;
    }
    out += '\n';
    if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(source) {}
  absl::StatusOr<std::vector<Token>> Run();

 private:
  absl::Status Fail(std::string_view what) const {
    return Error("chat template, line ", line_, ": ", what);
  }
  char At(size_t position) const { return position < source_.size() ? source_[position] : '\0'; }
  bool Ahead(std::string_view text) const { return source_.substr(position_).starts_with(text); }
  void Advance(size_t end);  // counts lines
  size_t SkipSpace(size_t position) const;
  void Push(Token::Kind kind, std::string_view text = {});

  // Text up to a tag whose white space sign is `sign`; `is_variable` tags keep blanks before them.
  void PushData(std::string_view text, char sign, bool is_variable);
  size_t FindTag() const;
  // The end of "{%- raw %}" or of "{%- endraw %}" at `position`, or kNone.
  size_t MatchRawTag(size_t position, std::string_view word, bool is_end) const;
  // The end of a closing tag of two characters at `position` with its sign and white space, or
  // kNone. Variables take no plus sign and keep the newline.
  size_t MatchClose(size_t position, std::string_view close, bool is_variable) const;

  absl::Status LexRaw(size_t begin_end);
  absl::Status LexComment();
  absl::Status LexTag(bool is_variable);
  absl::Status LexNumber();
  absl::Status LexString();
  absl::Status LexOperator();

  std::string_view source_;
  size_t position_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // what was read last ended a line
  std::string brackets_;       // open ones; a closing tag counts only when there are none
  std::vector<Token> tokens_;
};

void Lexer::Advance(size_t end) {
  line_ += static_cast<int>(std::count(source_.begin() + static_cast<ptrdiff_t>(position_),
                                       source_.begin() + static_cast<ptrdiff_t>(end), '\n'));
  if (end > position_) line_starting_ = source_[end - 1] == '\n';
  position_ = end;
}

size_t Lexer::SkipSpace(size_t position) const {
  while (position < source_.size()) {
    size_t next = position;
    if (!IsSpace(NextCodePoint(source_, next))) break;
    position = next;
  }
  return position;
}

void Lexer::Push(Token::Kind kind, std::string_view text) {
  Token token;
  token.kind = kind;
  token.line = line_;
  token.text = std::string(text);
  tokens_.push_back(std::move(token));
}

void Lexer::PushData(std::string_view text, char sign, bool is_variable) {
  if (sign == '-') {
    text = Strip(text, /*left=*/false, /*right=*/true);
  } else if (sign != '+' && !is_variable) {
    const size_t newline = text.rfind('\n');
    const size_t begin = newline == kNone ? 0 : newline + 1;
    if ((begin > 0 || line_starting_) &&
        Strip(text.substr(begin), /*left=*/true, /*right=*/false).empty()) {
      text = text.substr(0, begin);
    }
  }
  if (!text.empty()) Push(Token::Kind::kData, text);
}

size_t Lexer::FindTag() const {
  for (size_t at = source_.find('{', position_); at != kNone; at = source_.find('{', at + 1)) {
    const char next = At(at + 1);
    if (next == '{' || next == '%' || next == '#') return at;
  }
  return kNone;
}

size_t Lexer::MatchRawTag(size_t position, std::string_view word, bool is_end) const {
  if (!source_.substr(position).starts_with("{%")) return kNone;
  position += 2;
  if (At(position) == '-' || At(position) == '+') ++position;
  position = SkipSpace(position);
  if (!source_.substr(position).starts_with(word)) return kNone;
  position = SkipSpace(position + word.size());
  if (is_end) return MatchClose(position, "%}", /*is_variable=*/false);
  if (source_.substr(position).starts_with("-%}")) return SkipSpace(position + 3);
  return source_.substr(position).starts_with("%}") ? position + 2 : kNone;
}

size_t Lexer::MatchClose(size_t position, std::string_view close, bool is_variable) const {
  const char sign = At(position);
  const size_t at = sign == '-' || (sign == '+' && !is_variable) ? position + 1 : position;
  if (at > source_.size() || !source_.substr(at).starts_with(close)) return kNone;
  const size_t end = at + close.size();
  if (sign == '-') return SkipSpace(end);
  if (at == position && !is_variable && At(end) == '\n') return end + 1;
  return end;
}

absl::StatusOr<std::vector<Token>> Lexer::Run() {
  while (position_ < source_.size()) {
    const size_t tag = FindTag();
    if (tag == kNone) {
      Push(Token::Kind::kData, source_.substr(position_));
      Advance(source_.size());
      break;
    }
    const bool is_variable = source_[tag + 1] == '{';
    const char sign = At(tag + 2);
    PushData(source_.substr(position_, tag - position_), sign, is_variable);
    Advance(tag);
    if (const size_t end = MatchRawTag(tag, "raw", /*is_end=*/false); end != kNone) {
      JINJA_CHECK(LexRaw(end));
      continue;
    }
    const bool is_comment = source_[tag + 1] == '#';
    Advance(tag + (sign == '-' || sign == '+' ? 3 : 2));
    JINJA_CHECK(is_comment ? LexComment() : LexTag(is_variable));
  }
  Push(Token::Kind::kEnd);
  return std::move(tokens_);
}

absl::Status Lexer::LexRaw(size_t begin_end) {
  Advance(begin_end);
  for (size_t at = source_.find("{%", position_); at != kNone; at = source_.find("{%", at + 2)) {
    const size_t end = MatchRawTag(at, "endraw", /*is_end=*/true);
    if (end == kNone) continue;
    PushData(source_.substr(position_, at - position_), At(at + 2), /*is_variable=*/false);
    Advance(end);
    return absl::OkStatus();
  }
  return Fail("missing end of the raw block");
}

absl::Status Lexer::LexComment() {
  const size_t close = source_.find("#}", position_);
  if (close == kNone) return Fail("missing end of the comment");
  const bool has_sign =
      close > position_ && (source_[close - 1] == '-' || source_[close - 1] == '+');
  Advance(MatchClose(has_sign ? close - 1 : close, "#}", /*is_variable=*/false));
  return absl::OkStatus();
}

absl::Status Lexer::LexTag(bool is_variable) {
  Push(is_variable ? Token::Kind::kVariableBegin : Token::Kind::kBlockBegin);
  brackets_.clear();
  while (true) {
    Advance(SkipSpace(position_));
    if (position_ >= source_.size()) {
      return Fail(is_variable ? "missing }} of an expression" : "missing %} of a statement");
    }
    if (brackets_.empty()) {
      const size_t end = MatchClose(position_, is_variable ? "}}" : "%}", is_variable);
      if (end != kNone) {
        Push(is_variable ? Token::Kind::kVariableEnd : Token::Kind::kBlockEnd);
        Advance(end);
        return absl::OkStatus();
      }
    }
    const char c = source_[position_];
    if (absl::ascii_isdigit(static_cast<unsigned char>(c))) {
      JINJA_CHECK(LexNumber());
    } else if (IsNameStart(c)) {
      size_t end = position_;
      while (IsNamePart(At(end))) ++end;
      Push(Token::Kind::kName, source_.substr(position_, end - position_));
      Advance(end);
    } else if (c == '\'' || c == '"') {
      JINJA_CHECK(LexString());
    } else {
      JINJA_CHECK(LexOperator());
    }
  }
}

absl::Status Lexer::LexNumber() {
  const auto digits = [&](size_t position, int base) {
    size_t end = position;
    const auto is_digit = [&](char c) {
      if (base == 16) return absl::ascii_isxdigit(static_cast<unsigned char>(c));
      return c >= '0' && c < '0' + base;
    };
    while (is_digit(At(end)) || (At(end) == '_' && end > position && is_digit(At(end + 1)))) ++end;
    return end;
  };
  Token token;
  token.line = line_;
  size_t begin = position_;
  const char marker = absl::ascii_tolower(static_cast<unsigned char>(At(position_ + 1)));
  const int base = source_[position_] != '0' ? 10
                   : marker == 'x'           ? 16
                   : marker == 'o'           ? 8
                   : marker == 'b'           ? 2
                                             : 10;
  if (base != 10) begin += 2;
  size_t end = digits(begin, base);
  bool is_float = false;
  // Behind a dot only a whole number may stand: a.0.1 takes two items.
  const bool after_dot = !tokens_.empty() && tokens_.back().IsOperator(".");
  if (base == 10 && !after_dot) {
    if (At(end) == '.' && absl::ascii_isdigit(static_cast<unsigned char>(At(end + 1)))) {
      end = digits(end + 1, 10);
      is_float = true;
    }
    size_t exponent = end + 1;
    if (At(exponent) == '+' || At(exponent) == '-') ++exponent;
    if ((At(end) == 'e' || At(end) == 'E') && digits(exponent, 10) > exponent) {
      end = digits(exponent, 10);
      is_float = true;
    }
  }
  std::string text(source_.substr(begin, end - begin));
  text.erase(std::remove(text.begin(), text.end(), '_'), text.end());
  if (text.empty()) return Fail("a number has no digits");
  if (is_float) {
    token.kind = Token::Kind::kFloat;
    token.value = Value(std::strtod(text.c_str(), nullptr));
  } else {
    token.kind = Token::Kind::kInteger;
    Integer value = 0;
    for (const char c : text) {
      const int digit = absl::ascii_isdigit(static_cast<unsigned char>(c))
                            ? c - '0'
                            : absl::ascii_tolower(static_cast<unsigned char>(c)) - 'a' + 10;
      if (__builtin_mul_overflow(value, base, &value) ||
          __builtin_add_overflow(value, digit, &value)) {
        return Fail("an integer is too large");
      }
    }
    token.value = Value(value);
  }
  token.text = text;
  tokens_.push_back(std::move(token));
  Advance(end);
  return absl::OkStatus();
}

absl::Status Lexer::LexString() {
  const char quote = source_[position_];
  size_t end = position_ + 1;
  while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
  if (end >= source_.size()) return Fail("missing end of a string");
  auto text = Unescape(source_.substr(position_ + 1, end - position_ - 1));
  if (!text.ok()) return Fail(Cat(text.status().message()));
  Push(Token::Kind::kString, *text);
  Advance(end + 1);
  return absl::OkStatus();
}

absl::Status Lexer::LexOperator() {
  static constexpr std::array<std::string_view, 26> kOperators = {
      "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
      "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"};
  const auto* const op = std::find_if(kOperators.begin(), kOperators.end(),
                                      [&](std::string_view candidate) { return Ahead(candidate); });
  if (op == kOperators.end()) {
    size_t end = position_;
    NextCodePoint(source_, end);
    return Fail(Cat("unexpected character ", ReprText(source_.substr(position_, end - position_))));
  }
  const char c = (*op)[0];
  if (c == '(' || c == '[' || c == '{') brackets_ += c == '(' ? ')' : (c == '[' ? ']' : '}');
  if (c == ')' || c == ']' || c == '}') {
    if (brackets_.empty()) return Fail(Cat("unexpected '", *op, "'"));
    if (brackets_.back() != c) {
      return Fail(Cat("unexpected '", *op, "', expected '", std::string(1, brackets_.back()), "'"));
    }
    brackets_.pop_back();
  }
  Push(Token::Kind::kOperator, *op);
  Advance(position_ + op->size());
  return absl::OkStatus();
}

}  // namespace

std::string Token::Describe() const {
  switch (kind) {
    case Kind::kData:
      return "text";
    case Kind::kVariableBegin:
      return "'{{'";
    case Kind::kVariableEnd:
      return "'}}'";
    case Kind::kBlockBegin:
      return "'{%'";
    case Kind::kBlockEnd:
      return "'%}'";
    case Kind::kEnd:
      return "the end of the template";
    case Kind::kString:
      return Cat("the string ", ReprText(text));
    default:
      return Cat("'", text, "'");
  }
}

absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source) {
  const std::string normalized = NormalizeNewlines(source);
  return Lexer(normalized).Run();
}

}  // namespace qwend::jinja
