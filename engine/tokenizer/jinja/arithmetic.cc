#include <cmath>

#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

std::string_view Symbol(BinaryOp op) {
  switch (op) {
    case BinaryOp::kAdd:
      return "+";
    case BinaryOp::kSubtract:
      return "-";
    case BinaryOp::kMultiply:
      return "*";
    case BinaryOp::kDivide:
      return "/";
    case BinaryOp::kFloorDivide:
      return "//";
    case BinaryOp::kModulo:
      return "%";
    case BinaryOp::kPower:
      return "** or pow()";
  }
  return "";
}

absl::Status Unsupported(BinaryOp op, const Value& a, const Value& b) {
  return Error("unsupported operand type(s) for ", Symbol(op), ": '", a.TypeName(), "' and '",
               b.TypeName(), "'");
}

absl::Status Overflow() { return Error("an integer is too large"); }

absl::StatusOr<Value> PowerOfFloats(double base, double exponent) {
  if (base == 0 && exponent < 0) return Error("0.0 cannot be raised to a negative power");
  if (base < 0 && exponent != std::floor(exponent)) {
    return Error("a negative number to a fractional power is a complex number");
  }
  return Value(std::pow(base, exponent));
}

absl::StatusOr<Value> PowerOfIntegers(Integer base, Integer exponent) {
  if (exponent < 0) {
    return PowerOfFloats(static_cast<double>(base), static_cast<double>(exponent));
  }
  Integer result = 1;
  if (base == 0 || base == 1) return Value(exponent == 0 ? Integer{1} : base);
  if (base == -1) return Value(exponent % 2 == 0 ? Integer{1} : base);
  for (; exponent > 0; --exponent) {
    if (__builtin_mul_overflow(result, base, &result)) return Overflow();
  }
  return Value(result);
}

absl::StatusOr<Value> FloorDivide(BinaryOp op, Integer a, Integer b) {
  if (b == 0) {
    return Error(op == BinaryOp::kModulo ? "integer modulo by zero"
                                         : "integer division or modulo by zero");
  }
  if (b == -1) {  // the one quotient that may overflow
    Integer negated = 0;
    if (op == BinaryOp::kModulo) return Value(Integer{0});
    if (__builtin_sub_overflow(Integer{0}, a, &negated)) return Overflow();
    return Value(negated);
  }
  Integer quotient = a / b;
  Integer remainder = a % b;
  if (remainder != 0 && (remainder < 0) != (b < 0)) {
    --quotient;
    remainder += b;
  }
  return Value(op == BinaryOp::kModulo ? remainder : quotient);
}

absl::StatusOr<Value> OnIntegers(BinaryOp op, Integer a, Integer b) {
  Integer result = 0;
  switch (op) {
    case BinaryOp::kAdd:
      if (__builtin_add_overflow(a, b, &result)) return Overflow();
      return Value(result);
    case BinaryOp::kSubtract:
      if (__builtin_sub_overflow(a, b, &result)) return Overflow();
      return Value(result);
    case BinaryOp::kMultiply:
      if (__builtin_mul_overflow(a, b, &result)) return Overflow();
      return Value(result);
    case BinaryOp::kDivide:
      if (b == 0) return Error("division by zero");
      return Value(static_cast<double>(a) / static_cast<double>(b));
    case BinaryOp::kPower:
      return PowerOfIntegers(a, b);
    case BinaryOp::kFloorDivide:
    case BinaryOp::kModulo:
      return FloorDivide(op, a, b);
  }
  return Overflow();
}

absl::StatusOr<Value> OnFloats(BinaryOp op, double a, double b) {
  switch (op) {
    case BinaryOp::kAdd:
      return Value(a + b);
    case BinaryOp::kSubtract:
      return Value(a - b);
    case BinaryOp::kMultiply:
      return Value(a * b);
    case BinaryOp::kPower:
      return PowerOfFloats(a, b);
    case BinaryOp::kDivide:
    case BinaryOp::kFloorDivide:
    case BinaryOp::kModulo:
      break;
  }
  if (b == 0) {
    return Error(op == BinaryOp::kDivide        ? "float division by zero"
                 : op == BinaryOp::kFloorDivide ? "float floor division by zero"
                                                : "float modulo");
  }
  if (op == BinaryOp::kDivide) return Value(a / b);
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (op == BinaryOp::kModulo) return Value(remainder == 0 ? std::copysign(0.0, b) : remainder);
  return Value(std::round((a - remainder) / b));
}

absl::StatusOr<Value> AddTexts(Context& context, const Value& a, const Value& b) {
  if (!a.is_markup() && !b.is_markup()) {
    JINJA_CHECK(context.SpendBytes(a.text().size() + b.text().size()));
    return context.NewText(Cat(a.text(), b.text()));
  }
  const std::string left = a.is_markup() ? a.text() : EscapeHtml(a.text());
  const std::string right = b.is_markup() ? b.text() : EscapeHtml(b.text());
  return context.NewText(Cat(left, right), /*markup=*/true);
}

bool IsListOrTuple(const Value& value) {
  return value.sequence() != nullptr && (value.sequence()->kind == Sequence::Kind::kList ||
                                         value.sequence()->kind == Sequence::Kind::kTuple);
}

absl::StatusOr<Value> Add(Context& context, const Value& a, const Value& b) {
  if (a.is_string() && b.is_string()) return AddTexts(context, a, b);
  if (a.is_string()) {
    return Error("can only concatenate str (not \"", b.TypeName(), "\") to str");
  }
  if (!IsListOrTuple(a)) return Unsupported(BinaryOp::kAdd, a, b);
  if (!IsListOrTuple(b) || b.sequence()->kind != a.sequence()->kind) {
    return Error("can only concatenate ", a.TypeName(), " (not \"", b.TypeName(), "\") to ",
                 a.TypeName());
  }
  JINJA_CHECK(
      context.Spend(static_cast<int64_t>(a.sequence()->items.size() + b.sequence()->items.size())));
  std::vector<Value> items = a.sequence()->items;
  items.insert(items.end(), b.sequence()->items.begin(), b.sequence()->items.end());
  return context.NewSequence(std::move(items), a.sequence()->kind);
}

absl::StatusOr<Value> Repeat(Context& context, const Value& value, Integer times) {
  if (times < 0) times = 0;
  if (value.is_string()) {
    const std::string& text = value.text();
    if (!text.empty() && times > kMaxOutputBytes / static_cast<Integer>(text.size())) {
      return TooLong();
    }
    std::string repeated;
    repeated.reserve(text.size() * static_cast<size_t>(text.empty() ? 0 : times));
    for (Integer i = 0; i < times && !text.empty(); ++i) repeated += text;
    return context.NewText(std::move(repeated), value.is_markup());
  }
  const std::vector<Value>& items = value.sequence()->items;
  if (!items.empty() && times > kMaxSteps / static_cast<Integer>(items.size())) {
    return Error("the template repeats a list too often");
  }
  JINJA_CHECK(context.Spend(static_cast<int64_t>(times) * static_cast<int64_t>(items.size())));
  std::vector<Value> repeated;
  for (Integer i = 0; i < times && !items.empty(); ++i) {
    repeated.insert(repeated.end(), items.begin(), items.end());
  }
  return context.NewSequence(std::move(repeated), value.sequence()->kind);
}

bool IsInteger(const Value& value) { return value.is_int() || value.is_bool(); }

bool IsRepeatable(const Value& value) { return value.is_string() || IsListOrTuple(value); }

}  // namespace

absl::StatusOr<Value> Apply(Context& context, BinaryOp op, const Value& a, const Value& b) {
  JINJA_CHECK(RequireDefined(a));
  JINJA_CHECK(RequireDefined(b));
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) return OnFloats(op, a.number(), b.number());
    return OnIntegers(op, a.integer(), b.integer());
  }
  if (op == BinaryOp::kAdd) return Add(context, a, b);
  if (op == BinaryOp::kMultiply) {
    if (IsRepeatable(a) && IsInteger(b)) return Repeat(context, a, b.integer());
    if (IsInteger(a) && IsRepeatable(b)) return Repeat(context, b, a.integer());
  }
  if (op == BinaryOp::kModulo && a.is_string()) {
    return Error("formatting with the % operator is not covered; use ~ or +");
  }
  return Unsupported(op, a, b);
}

absl::StatusOr<Value> Negate(const Value& value) {
  JINJA_CHECK(RequireDefined(value));
  if (value.is_float()) return Value(-value.number());
  if (!value.is_number()) {
    return Error("bad operand type for unary -: '", value.TypeName(), "'");
  }
  return OnIntegers(BinaryOp::kSubtract, 0, value.integer());
}

absl::StatusOr<Value> Plus(const Value& value) {
  JINJA_CHECK(RequireDefined(value));
  if (value.is_float()) return value;
  if (!value.is_number()) {
    return Error("bad operand type for unary +: '", value.TypeName(), "'");
  }
  return Value(value.integer());
}

std::string EscapeHtml(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '\'':
        out += "&#39;";
        break;
      case '"':
        out += "&#34;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace qwend::jinja
