// Filters that give numbers.
#include <array>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "engine/tokenizer/jinja/builtins.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

// Digits without the underscores that Python allows between them; nullopt when one is misplaced.
std::optional<std::string> WithoutUnderscores(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      out += text[i];
      continue;
    }
    const bool between = i > 0 && i + 1 < text.size() &&
                         absl::ascii_isalnum(static_cast<unsigned char>(text[i - 1])) &&
                         absl::ascii_isalnum(static_cast<unsigned char>(text[i + 1]));
    if (!between) return std::nullopt;
  }
  return out;
}

// Python's int(text, base); nullopt when it is not such a number.
std::optional<Integer> ParseInteger(std::string_view text, int base) {
  const auto cleaned = WithoutUnderscores(Strip(text, true, true));
  if (!cleaned.has_value()) return std::nullopt;
  std::string_view digits = *cleaned;
  const bool negative = digits.starts_with('-');
  if (negative || digits.starts_with('+')) digits.remove_prefix(1);
  if (digits.size() > 2 && digits[0] == '0') {
    const char marker = absl::ascii_tolower(static_cast<unsigned char>(digits[1]));
    const int marked = marker == 'x' ? 16 : (marker == 'o' ? 8 : (marker == 'b' ? 2 : 0));
    if (marked != 0 && (base == 0 || base == marked)) {
      base = marked;
      digits.remove_prefix(2);
    }
  }
  if (base == 0) base = 10;
  if (digits.empty()) return std::nullopt;
  Integer value = 0;
  for (const char c : digits) {
    const char lower = absl::ascii_tolower(static_cast<unsigned char>(c));
    const int digit = lower >= '0' && lower <= '9'   ? lower - '0'
                      : lower >= 'a' && lower <= 'z' ? lower - 'a' + 10
                                                     : 36;
    if (digit >= base || __builtin_mul_overflow(value, base, &value) ||
        __builtin_add_overflow(value, digit, &value)) {
      return std::nullopt;
    }
  }
  return negative ? -value : value;
}

// Python's float(text).
std::optional<double> ParseFloat(std::string_view text) {
  const auto cleaned = WithoutUnderscores(Strip(text, true, true));
  if (!cleaned.has_value() || cleaned->empty()) return std::nullopt;
  const std::string lower = absl::AsciiStrToLower(*cleaned);
  if (lower.find_first_of("xp(") != std::string::npos || IsSpace(static_cast<uint8_t>(lower[0]))) {
    return std::nullopt;
  }
  char* end = nullptr;
  const double value = std::strtod(cleaned->c_str(), &end);
  if (end != cleaned->c_str() + cleaned->size()) return std::nullopt;
  return value;
}

// Towards zero; nullopt for what no integer holds.
std::optional<Integer> Truncate(double value) {
  constexpr double kLimit = 1e38;
  if (!(std::fabs(value) < kLimit)) return std::nullopt;
  return static_cast<Integer>(value);
}

absl::StatusOr<Value> IntFilter(Context&, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("int", arguments, {"default", "base"}));
  JINJA_CHECK(RequireDefined(input));
  JINJA_ASSIGN(const Integer base, bound.Int(1, 10));
  std::optional<Integer> value;
  if (input.is_float()) {
    value = Truncate(input.number());
  } else if (input.is_number()) {
    value = input.integer();
  } else if (input.is_string()) {
    if (base != 0 && (base < 2 || base > 36)) return Error("int() base must be 2 to 36, or 0");
    value = ParseInteger(input.text(), static_cast<int>(base));
    const auto number = value.has_value() ? std::nullopt : ParseFloat(input.text());
    if (number.has_value()) value = Truncate(*number);
  }
  if (value.has_value()) return Value(*value);
  return bound.has(0) ? bound[0] : Value(0);
}

absl::StatusOr<Value> FloatFilter(Context&, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("float", arguments, {"default"}));
  JINJA_CHECK(RequireDefined(input));
  if (input.is_number()) return Value(input.number());
  const auto value = input.is_string() ? ParseFloat(input.text()) : std::nullopt;
  if (value.has_value()) return Value(*value);
  return bound.has(0) ? bound[0] : Value(0.0);
}

absl::StatusOr<Value> Absolute(Context&, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("abs", arguments, {}).status());
  JINJA_CHECK(RequireDefined(input));
  if (!input.is_number()) return Error("bad operand type for abs(): '", input.TypeName(), "'");
  if (input.is_float()) return Value(std::fabs(input.number()));
  if (input.integer() < 0) return Negate(input);
  return Value(input.integer());
}

// To the nearest value with so many decimals, ties to even, decided on the exact value as Python.
double RoundDecimals(double value, int precision) {
  if (!std::isfinite(value)) return value;
  if (precision >= 0) {
    return std::strtod(absl::StrFormat("%.*f", precision, value).c_str(), nullptr);
  }
  const double unit = std::pow(10.0, -precision);
  return std::nearbyint(value / unit) * unit;
}

absl::StatusOr<Value> Round(Context&, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("round", arguments, {"precision", "method"}));
  JINJA_CHECK(RequireDefined(input));
  JINJA_ASSIGN(const Integer precision, bound.Int(0, 0));
  JINJA_ASSIGN(const std::string_view method, bound.Text(1, "common"));
  if (method != "common" && method != "ceil" && method != "floor") {
    return Error("method must be common, ceil or floor");
  }
  if (!input.is_number()) return Error("type ", input.TypeName(), " cannot be rounded");
  if (precision > 300 || precision < -300) return Error("round() takes a smaller precision");
  const int places = static_cast<int>(precision);
  if (method == "common") {
    if (input.is_float()) return Value(RoundDecimals(input.number(), places));
    if (places >= 0) return Value(input.integer());
    const auto rounded = Truncate(RoundDecimals(input.number(), places));
    return rounded.has_value() ? Value(*rounded) : input;
  }
  const double scale = std::pow(10.0, places);
  const double scaled = input.number() * scale;
  return Value((method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / scale);
}

constexpr std::array kFilters = {
    NamedBuiltin{"abs", Absolute},
    NamedBuiltin{"float", FloatFilter},
    NamedBuiltin{"int", IntFilter},
    NamedBuiltin{"round", Round},
};

}  // namespace

Builtin FindNumberFilter(std::string_view name) { return FindBuiltin(kFilters, name); }

}  // namespace qwend::jinja
