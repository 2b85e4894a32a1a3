#include "engine/tokenizer/jinja/print.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "absl/strings/str_format.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

void AppendEscaped(char32_t c, std::string& out) {
  if (c < 0x100) {
    absl::StrAppendFormat(&out, "\\x%02x", static_cast<uint32_t>(c));
  } else if (c < 0x10000) {
    absl::StrAppendFormat(&out, "\\u%04x", static_cast<uint32_t>(c));
  } else {
    absl::StrAppendFormat(&out, "\\U%08x", static_cast<uint32_t>(c));
  }
}

class ReprWriter {
 public:
  explicit ReprWriter(Context& context) : context_(context) {}
  absl::Status Write(const Value& value);
  std::string out;

 private:
  absl::Status WriteList(const std::vector<Value>& items, std::string_view open,
                         std::string_view close);
  absl::Status WriteSequence(const Sequence& sequence);
  absl::Status WriteDict(const Dict& dict);

  Context& context_;
};

absl::Status ReprWriter::WriteList(const std::vector<Value>& items, std::string_view open,
                                   std::string_view close) {
  Append(out, open);
  bool first = true;
  for (const Value& item : items) {
    if (!first) out += ", ";
    first = false;
    JINJA_CHECK(Write(item));
  }
  Append(out, close);
  return absl::OkStatus();
}

absl::Status ReprWriter::WriteSequence(const Sequence& sequence) {
  switch (sequence.kind) {
    case Sequence::Kind::kList:
      return WriteList(sequence.items, "[", "]");
    case Sequence::Kind::kTuple:
      return WriteList(sequence.items, "(", sequence.items.size() == 1 ? ",)" : ")");
    case Sequence::Kind::kDictKeys:
      return WriteList(sequence.items, "dict_keys([", "])");
    case Sequence::Kind::kDictValues:
      return WriteList(sequence.items, "dict_values([", "])");
    case Sequence::Kind::kDictItems:
      return WriteList(sequence.items, "dict_items([", "])");
    case Sequence::Kind::kRange:
      Append(out, "range(", FormatInteger(sequence.range[0]), ", ",
             FormatInteger(sequence.range[1]));
      if (sequence.range[2] != 1) Append(out, ", ", FormatInteger(sequence.range[2]));
      out += ")";
      return absl::OkStatus();
    case Sequence::Kind::kGenerator:
      out += "<generator object>";
      return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status ReprWriter::WriteDict(const Dict& dict) {
  out += "{";
  bool first = true;
  for (const auto& [key, value] : dict.entries) {
    if (!first) out += ", ";
    first = false;
    JINJA_CHECK(Write(key));
    out += ": ";
    JINJA_CHECK(Write(value));
  }
  out += "}";
  return absl::OkStatus();
}

absl::Status ReprWriter::Write(const Value& value) {
  // A namespace may hold itself, so depth and size are watched here and not only where made.
  const Context::Level level(context_);
  JINJA_CHECK(level.Check());
  JINJA_CHECK(context_.Spend(1));
  if (static_cast<int64_t>(out.size()) > kMaxOutputBytes) return TooLong();
  if (value.is_undefined()) {
    out += "Undefined";
  } else if (value.is_none()) {
    out += "None";
  } else if (value.is_bool()) {
    out += value.boolean() ? "True" : "False";
  } else if (value.is_int()) {
    out += FormatInteger(value.integer());
  } else if (value.is_float()) {
    out += FormatFloat(value.number());
  } else if (value.is_markup()) {
    Append(out, "Markup(", ReprText(value.text()), ")");
  } else if (value.is_string()) {
    out += ReprText(value.text());
  } else if (const Sequence* sequence = value.sequence()) {
    return WriteSequence(*sequence);
  } else if (const Dict* dict = value.dict()) {
    return WriteDict(*dict);
  } else if (const Namespace* ns = value.name_space()) {
    out += "<Namespace ";
    JINJA_CHECK(WriteDict(ns->attributes));
    out += ">";
  } else if (const Callable* callable = value.callable()) {
    out += callable->Repr();
  } else if (const LoopState* loop = value.loop()) {
    Append(out, "<LoopContext ", loop->index + 1, "/", loop->items->items.size(), ">");
  }
  return absl::OkStatus();
}

}  // namespace

std::string FormatInteger(Integer value) {
  char digits[48];
  char* end = digits + sizeof(digits);
  char* begin = end;
  const bool negative = value < 0;
  do {
    const int digit = static_cast<int>(value % 10);
    *--begin = static_cast<char>('0' + (digit < 0 ? -digit : digit));
    value /= 10;
  } while (value != 0);
  if (negative) *--begin = '-';
  return std::string(begin, end);
}

std::string FormatFloat(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char buffer[64];
  const auto result =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  const std::string_view shortest(buffer, static_cast<size_t>(result.ptr - buffer));
  const size_t e = shortest.find('e');
  const int exponent = std::atoi(std::string(shortest.substr(e + 1)).c_str());
  if (exponent < -4 || exponent >= 16) return std::string(shortest);

  std::string sign, digits;
  for (const char c : shortest.substr(0, e)) {
    if (c == '-') sign += c;
    if (c >= '0' && c <= '9') digits += c;
  }
  if (exponent < 0) return Cat(sign, "0.", std::string(-exponent - 1, '0'), digits);
  const size_t whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) {
    return Cat(sign, digits, std::string(whole - digits.size(), '0'), ".0");
  }
  return Cat(sign, digits.substr(0, whole), ".", digits.substr(whole));
}

std::string ReprText(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const bool has_double = text.find('"') != std::string_view::npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  std::string out(1, quote);
  for (size_t position = 0; position < text.size();) {
    const size_t begin = position;
    const char32_t c = NextCodePoint(text, position);
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (c == '\\' || c == static_cast<char32_t>(quote)) {
      out += '\\';
      out += static_cast<char>(c);
    } else if (IsPrintable(c)) {
      out.append(text.substr(begin, position - begin));
    } else {
      AppendEscaped(c, out);
    }
  }
  out += quote;
  return out;
}

absl::StatusOr<std::string> Repr(Context& context, const Value& value) {
  ReprWriter writer(context);
  JINJA_CHECK(writer.Write(value));
  return std::move(writer.out);
}

absl::StatusOr<std::string> ToText(Context& context, const Value& value) {
  if (value.is_undefined()) return std::string();
  if (value.is_string()) {
    JINJA_CHECK(context.SpendBytes(value.text().size()));
    return value.text();
  }
  return Repr(context, value);
}

}  // namespace qwend::jinja
