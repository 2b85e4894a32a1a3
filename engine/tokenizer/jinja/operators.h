// Python's operators on values. An undefined operand is an error that says what is undefined.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

enum class BinaryOp { kAdd, kSubtract, kMultiply, kDivide, kFloorDivide, kModulo, kPower };
enum class CompareOp { kEqual, kNotEqual, kLess, kLessEqual, kGreater, kGreaterEqual, kIn, kNotIn };

absl::StatusOr<Value> Apply(Context& context, BinaryOp op, const Value& a, const Value& b);
absl::StatusOr<Value> Negate(const Value& value);
absl::StatusOr<Value> Plus(const Value& value);

absl::StatusOr<bool> Compare(Context& context, CompareOp op, const Value& a, const Value& b);
absl::StatusOr<bool> Equal(Context& context, const Value& a, const Value& b);
absl::StatusOr<bool> Less(Context& context, const Value& a, const Value& b);
absl::StatusOr<bool> Contains(Context& context, const Value& container, const Value& item);

// & < > ' " as HTML entities, as the filter `escape`.
std::string EscapeHtml(std::string_view text);

}  // namespace qwend::jinja
