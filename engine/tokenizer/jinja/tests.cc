// Jinja's tests: `value is name`.
#include <array>

#include "engine/tokenizer/jinja/builtins.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/methods.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

bool IsInteger(const Value& value) { return value.is_int(); }
bool IsDefined(const Value& value) { return !value.is_undefined(); }
bool IsMapping(const Value& value) { return value.dict() != nullptr; }
bool IsTrue(const Value& value) { return value.is_bool() && value.boolean(); }
bool IsFalse(const Value& value) { return value.is_bool() && !value.boolean(); }
bool IsCallable(const Value& value) { return value.is_undefined() || value.callable() != nullptr; }

// An undefined value passes, as in Jinja, whose Undefined has the methods of both.
bool IsSequence(const Value& value) {
  const Sequence* sequence = value.sequence();
  return value.is_undefined() || value.is_string() || value.dict() != nullptr ||
         (sequence != nullptr && sequence->indexable());
}
bool IsIterable(const Value& value) {
  return value.is_undefined() || value.is_string() || value.dict() != nullptr ||
         value.sequence() != nullptr || value.loop() != nullptr;
}

template <bool (*kPredicate)(const Value&)>
absl::StatusOr<Value> Check(Context&, const Value& value, const Arguments& arguments) {
  JINJA_CHECK(Bind("the test", arguments, {}).status());
  return Value(kPredicate(value));
}

template <bool (Value::*kPredicate)() const>
absl::StatusOr<Value> CheckKind(Context&, const Value& value, const Arguments& arguments) {
  JINJA_CHECK(Bind("the test", arguments, {}).status());
  return Value((value.*kPredicate)());
}

template <CompareOp kOp>
absl::StatusOr<Value> CompareWith(Context& context, const Value& value,
                                  const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("the test", arguments, {"other"}, 1));
  JINJA_ASSIGN(const bool holds, Compare(context, kOp, value, bound[0]));
  return Value(holds);
}

absl::StatusOr<Value> IsSameAs(Context&, const Value& value, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("sameas", arguments, {"other"}, 1));
  return Value(value.Same(bound[0]));
}

absl::StatusOr<Value> IsDivisibleBy(Context& context, const Value& value,
                                    const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("divisibleby", arguments, {"num"}, 1));
  JINJA_ASSIGN(const Value rest, Apply(context, BinaryOp::kModulo, value, bound[0]));
  return Value(ScalarEqual(rest, Value(0)));
}

template <int kRest>
absl::StatusOr<Value> HasParity(Context& context, const Value& value, const Arguments& arguments) {
  JINJA_CHECK(Bind("the test", arguments, {}).status());
  JINJA_ASSIGN(const Value rest, Apply(context, BinaryOp::kModulo, value, Value(2)));
  return Value(ScalarEqual(rest, Value(kRest)));
}

template <bool kUpper>
absl::StatusOr<Value> HasCase(Context& context, const Value& value, const Arguments& arguments) {
  JINJA_ASSIGN(std::string text, ToText(context, value));
  const Method* method = FindStringMethod(kUpper ? "isupper" : "islower");
  return method->function(context, Value(std::move(text)), arguments);
}

absl::StatusOr<Value> IsFilter(Context&, const Value& value, const Arguments&) {
  return Value(value.is_string() && FindFilter(value.text()) != nullptr);
}

absl::StatusOr<Value> IsTest(Context&, const Value& value, const Arguments&) {
  return Value(value.is_string() && FindTest(value.text()) != nullptr);
}

constexpr std::array kTests = {
    NamedBuiltin{"defined", Check<IsDefined>},
    NamedBuiltin{"undefined", CheckKind<&Value::is_undefined>},
    NamedBuiltin{"none", CheckKind<&Value::is_none>},
    NamedBuiltin{"string", CheckKind<&Value::is_string>},
    NamedBuiltin{"number", CheckKind<&Value::is_number>},
    NamedBuiltin{"integer", Check<IsInteger>},
    NamedBuiltin{"float", CheckKind<&Value::is_float>},
    NamedBuiltin{"boolean", CheckKind<&Value::is_bool>},
    NamedBuiltin{"true", Check<IsTrue>},
    NamedBuiltin{"false", Check<IsFalse>},
    NamedBuiltin{"mapping", Check<IsMapping>},
    NamedBuiltin{"sequence", Check<IsSequence>},
    NamedBuiltin{"iterable", Check<IsIterable>},
    NamedBuiltin{"callable", Check<IsCallable>},
    NamedBuiltin{"escaped", CheckKind<&Value::is_markup>},
    NamedBuiltin{"odd", HasParity<1>},
    NamedBuiltin{"even", HasParity<0>},
    NamedBuiltin{"divisibleby", IsDivisibleBy},
    NamedBuiltin{"sameas", IsSameAs},
    NamedBuiltin{"lower", HasCase<false>},
    NamedBuiltin{"upper", HasCase<true>},
    NamedBuiltin{"filter", IsFilter},
    NamedBuiltin{"test", IsTest},
    NamedBuiltin{"in", CompareWith<CompareOp::kIn>},
    NamedBuiltin{"==", CompareWith<CompareOp::kEqual>},
    NamedBuiltin{"eq", CompareWith<CompareOp::kEqual>},
    NamedBuiltin{"equalto", CompareWith<CompareOp::kEqual>},
    NamedBuiltin{"!=", CompareWith<CompareOp::kNotEqual>},
    NamedBuiltin{"ne", CompareWith<CompareOp::kNotEqual>},
    NamedBuiltin{">", CompareWith<CompareOp::kGreater>},
    NamedBuiltin{"gt", CompareWith<CompareOp::kGreater>},
    NamedBuiltin{"greaterthan", CompareWith<CompareOp::kGreater>},
    NamedBuiltin{">=", CompareWith<CompareOp::kGreaterEqual>},
    NamedBuiltin{"ge", CompareWith<CompareOp::kGreaterEqual>},
    NamedBuiltin{"<", CompareWith<CompareOp::kLess>},
    NamedBuiltin{"lt", CompareWith<CompareOp::kLess>},
    NamedBuiltin{"lessthan", CompareWith<CompareOp::kLess>},
    NamedBuiltin{"<=", CompareWith<CompareOp::kLessEqual>},
    NamedBuiltin{"le", CompareWith<CompareOp::kLessEqual>},
};

}  // namespace

Builtin FindTest(std::string_view name) { return FindBuiltin(kTests, name); }

}  // namespace qwend::jinja
