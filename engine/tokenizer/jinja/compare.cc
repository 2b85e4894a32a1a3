#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

absl::StatusOr<bool> EqualSequences(Context& context, const Sequence& a, const Sequence& b) {
  if (&a == &b) return true;
  if (a.kind != b.kind || !(a.indexable() || a.kind == Sequence::Kind::kDictKeys)) return false;
  if (a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i) {
    JINJA_ASSIGN(const bool equal, Equal(context, a.items[i], b.items[i]));
    if (!equal) return false;
  }
  return true;
}

absl::StatusOr<bool> EqualDicts(Context& context, const Dict& a, const Dict& b) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    const Value* other = b.Find(key);
    if (other == nullptr) return false;
    JINJA_ASSIGN(const bool equal, Equal(context, value, *other));
    if (!equal) return false;
  }
  return true;
}

absl::Status NotOrdered(std::string_view symbol, const Value& a, const Value& b) {
  JINJA_CHECK(RequireDefined(a));
  JINJA_CHECK(RequireDefined(b));
  return Error("'", symbol, "' not supported between instances of '", a.TypeName(), "' and '",
               b.TypeName(), "'");
}

// Three-way order: negative, zero or positive. `symbol` is for the message.
absl::StatusOr<int> Order(Context& context, std::string_view symbol, const Value& a,
                          const Value& b) {
  JINJA_CHECK(context.Spend(1));
  if (a.is_number() && b.is_number()) {
    if (a.is_float() || b.is_float()) {
      return a.number() < b.number() ? -1 : (a.number() > b.number() ? 1 : 0);
    }
    return a.integer() < b.integer() ? -1 : (a.integer() > b.integer() ? 1 : 0);
  }
  if (a.is_string() && b.is_string()) {  // the order of UTF-8 bytes is that of code points
    JINJA_CHECK(context.SpendBytes(std::min(a.text().size(), b.text().size())));
    return a.text().compare(b.text());
  }
  const Sequence* x = a.sequence();
  const Sequence* y = b.sequence();
  if (x == nullptr || y == nullptr || x->kind != y->kind ||
      (x->kind != Sequence::Kind::kList && x->kind != Sequence::Kind::kTuple)) {
    return NotOrdered(symbol, a, b);
  }
  for (size_t i = 0; i < x->items.size() && i < y->items.size(); ++i) {
    JINJA_ASSIGN(const bool equal, Equal(context, x->items[i], y->items[i]));
    if (!equal) return Order(context, symbol, x->items[i], y->items[i]);
  }
  return x->items.size() < y->items.size() ? -1 : (x->items.size() > y->items.size() ? 1 : 0);
}

bool IsNan(const Value& value) { return value.is_float() && value.number() != value.number(); }

}  // namespace

absl::StatusOr<bool> Equal(Context& context, const Value& a, const Value& b) {
  JINJA_CHECK(context.Spend(1));
  if (a.is_string() && b.is_string()) {
    JINJA_CHECK(context.SpendBytes(std::min(a.text().size(), b.text().size())));
    return a.text() == b.text();
  }
  if (a.sequence() != nullptr && b.sequence() != nullptr) {
    return EqualSequences(context, *a.sequence(), *b.sequence());
  }
  if (a.dict() != nullptr && b.dict() != nullptr) {
    return EqualDicts(context, *a.dict(), *b.dict());
  }
  return ScalarEqual(a, b) || (!IsNan(a) && a.Same(b));
}

absl::StatusOr<bool> Less(Context& context, const Value& a, const Value& b) {
  if (IsNan(a) || IsNan(b)) return false;
  JINJA_ASSIGN(const int order, Order(context, "<", a, b));
  return order < 0;
}

absl::StatusOr<bool> Contains(Context& context, const Value& container, const Value& item) {
  if (container.is_undefined()) return false;
  if (container.is_string()) {
    JINJA_CHECK(RequireDefined(item));
    if (!item.is_string()) {
      return Error("'in <string>' requires string as left operand, not ", item.TypeName());
    }
    JINJA_CHECK(context.SpendBytes(container.text().size()));
    return container.text().find(item.text()) != std::string::npos;
  }
  if (const Dict* dict = container.dict()) {
    if (item.dict() != nullptr ||
        (item.sequence() != nullptr && item.sequence()->kind == Sequence::Kind::kList)) {
      return Error("unhashable type: '", item.TypeName(), "'");
    }
    if (!item.is_string()) JINJA_CHECK(context.Spend(static_cast<int64_t>(dict->entries.size())));
    return dict->Find(item) != nullptr;
  }
  const Sequence* sequence = container.sequence();
  if (sequence == nullptr) {
    return Error("argument of type '", container.TypeName(), "' is not iterable");
  }
  if (sequence->kind == Sequence::Kind::kGenerator) {
    if (sequence->consumed) return false;
    sequence->consumed = true;
  }
  for (const Value& candidate : sequence->items) {
    JINJA_ASSIGN(const bool equal, Equal(context, candidate, item));
    if (equal) return true;
  }
  return false;
}

absl::StatusOr<bool> Compare(Context& context, CompareOp op, const Value& a, const Value& b) {
  switch (op) {
    case CompareOp::kEqual:
      return Equal(context, a, b);
    case CompareOp::kNotEqual: {
      JINJA_ASSIGN(const bool equal, Equal(context, a, b));
      return !equal;
    }
    case CompareOp::kIn:
      return Contains(context, b, a);
    case CompareOp::kNotIn: {
      JINJA_ASSIGN(const bool contains, Contains(context, b, a));
      return !contains;
    }
    default:
      break;
  }
  if (IsNan(a) || IsNan(b)) return false;
  const std::string_view symbol = op == CompareOp::kLess        ? "<"
                                  : op == CompareOp::kLessEqual ? "<="
                                  : op == CompareOp::kGreater   ? ">"
                                                                : ">=";
  JINJA_ASSIGN(const int order, Order(context, symbol, a, b));
  switch (op) {
    case CompareOp::kLess:
      return order < 0;
    case CompareOp::kLessEqual:
      return order <= 0;
    case CompareOp::kGreater:
      return order > 0;
    default:
      return order >= 0;
  }
}

}  // namespace qwend::jinja
