// Filters on lists and dicts.
#include <algorithm>
#include <array>

#include "engine/tokenizer/jinja/access.h"
#include "engine/tokenizer/jinja/builtins.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/methods.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/selection.h"
#include "engine/tokenizer/jinja/try.h"
#include "engine/tokenizer/jinja/unicode.h"

namespace qwend::jinja {
namespace {

Value Missing(std::string_view hint) {
  return Value(Undefined{Undefined::Kind::kHint, std::string(hint), ""});
}

absl::StatusOr<Value> LengthFilter(Context& context, const Value& input,
                                   const Arguments& arguments) {
  JINJA_CHECK(Bind("length", arguments, {}).status());
  JINJA_ASSIGN(const size_t length, Length(context, input));
  return Value(length);
}

absl::StatusOr<Value> ListFilter(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("list", arguments, {}).status());
  JINJA_ASSIGN(std::vector<Value> items, Iterate(context, input));
  return context.NewSequence(std::move(items));
}

absl::StatusOr<Value> First(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("first", arguments, {}).status());
  JINJA_ASSIGN(std::vector<Value> items, Iterate(context, input));
  return items.empty() ? Missing("No first item, sequence was empty.") : std::move(items.front());
}

absl::StatusOr<Value> Last(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("last", arguments, {}).status());
  if (input.sequence() != nullptr && input.sequence()->kind == Sequence::Kind::kGenerator) {
    return Error("'generator' object is not reversible");
  }
  JINJA_ASSIGN(std::vector<Value> items, Iterate(context, input));
  return items.empty() ? Missing("No last item, sequence was empty.") : std::move(items.back());
}

absl::StatusOr<Value> Reverse(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("reverse", arguments, {}).status());
  if (input.is_string()) return GetSlice(context, input, Value(), Value(), Value(-1));
  JINJA_ASSIGN(std::vector<Value> items, Iterate(context, input));
  std::reverse(items.begin(), items.end());
  return context.NewSequence(std::move(items), Sequence::Kind::kGenerator);
}

absl::StatusOr<Value> Join(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("join", arguments, {"d", "attribute"}));
  std::string separator;
  if (bound.has(0)) {
    JINJA_ASSIGN(separator, ToText(context, bound[0]));
  }
  JINJA_ASSIGN(const std::vector<Value> items, Iterate(context, input));
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    Value item = items[i];
    if (!bound.IsNone(1)) {
      JINJA_ASSIGN(item, FollowPath(context, item, bound[1]));
    }
    JINJA_ASSIGN(const std::string text, ToText(context, item));
    if (i > 0) out += separator;
    out += text;
    if (static_cast<int64_t>(out.size()) > kMaxOutputBytes) return TooLong();
  }
  return context.NewText(std::move(out));
}

absl::StatusOr<Value> Items(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_CHECK(Bind("items", arguments, {}).status());
  std::vector<Value> items;
  if (!input.is_undefined()) {
    const Dict* dict = input.dict();
    if (dict == nullptr) return Error("Can only get item pairs from a mapping.");
    for (const auto& [key, value] : dict->entries) {
      JINJA_ASSIGN(Value pair, context.NewSequence({key, value}, Sequence::Kind::kTuple));
      items.push_back(std::move(pair));
    }
  }
  return context.NewSequence(std::move(items), Sequence::Kind::kGenerator);
}

absl::StatusOr<Value> DictSort(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound,
               Bind("dictsort", arguments, {"case_sensitive", "by", "reverse"}));
  JINJA_ASSIGN(const std::string_view by, bound.Text(1, "key"));
  if (by != "key" && by != "value")
    return Error("You can only sort by either \"key\" or \"value\"");
  JINJA_CHECK(RequireDefined(input));
  const Dict* dict = input.dict();
  if (dict == nullptr) return Error("dictsort() takes a mapping, not '", input.TypeName(), "'");
  std::vector<Value> items;
  std::vector<Value> keys;
  for (const auto& [key, value] : dict->entries) {
    JINJA_ASSIGN(Value pair, context.NewSequence({key, value}, Sequence::Kind::kTuple));
    JINJA_ASSIGN(Value sort_key,
                 FoldCase(context, by == "key" ? key : value, bound.Bool(0, false)));
    items.push_back(std::move(pair));
    keys.push_back(std::move(sort_key));
  }
  JINJA_CHECK(SortByKeys(context, items, keys, bound.Bool(2, false)));
  return context.NewSequence(std::move(items));
}

// The key to sort by: the item, or the values at the comma-separated paths of `attribute`.
absl::StatusOr<Value> SortKey(Context& context, const Value& item, const Value* attribute,
                              bool case_sensitive) {
  if (attribute == nullptr) return FoldCase(context, item, case_sensitive);
  std::vector<Value> parts;
  if (attribute->is_string()) {
    for (const std::string_view path : SplitPath(attribute->text(), ',')) {
      parts.emplace_back(std::string(path));
    }
  } else {
    parts.push_back(*attribute);
  }
  for (Value& part : parts) {
    JINJA_ASSIGN(part, FollowPath(context, item, part));
    JINJA_ASSIGN(part, FoldCase(context, part, case_sensitive));
  }
  return context.NewSequence(std::move(parts));
}

absl::StatusOr<Value> Sort(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound,
               Bind("sort", arguments, {"reverse", "case_sensitive", "attribute"}));
  JINJA_ASSIGN(std::vector<Value> items, Iterate(context, input));
  std::vector<Value> keys;
  for (const Value& item : items) {
    JINJA_ASSIGN(Value key, SortKey(context, item, bound.IsNone(2) ? nullptr : &bound[2],
                                    bound.Bool(1, false)));
    keys.push_back(std::move(key));
  }
  JINJA_CHECK(SortByKeys(context, items, keys, bound.Bool(0, false)));
  return context.NewSequence(std::move(items));
}

// The value that unique, min and max compare by.
absl::StatusOr<Value> PlainKey(Context& context, const Value& item, const BoundArguments& bound) {
  Value key = item;
  if (!bound.IsNone(1)) {
    JINJA_ASSIGN(key, FollowPath(context, item, bound[1]));
  }
  return FoldCase(context, key, bound.Bool(0, false));
}

absl::StatusOr<Value> Unique(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound,
               Bind("unique", arguments, {"case_sensitive", "attribute"}));
  JINJA_ASSIGN(const std::vector<Value> items, Iterate(context, input));
  Dict seen;
  std::vector<Value> kept;
  for (const Value& item : items) {
    JINJA_ASSIGN(const Value key, PlainKey(context, item, bound));
    if (!key.is_undefined()) JINJA_CHECK(RequireHashable(key));
    JINJA_CHECK(context.Spend(1 + static_cast<int64_t>(seen.entries.size() - seen.index.size())));
    if (seen.Find(key) != nullptr) continue;
    seen.Set(key, Value());
    kept.push_back(item);
  }
  return context.NewSequence(std::move(kept), Sequence::Kind::kGenerator);
}

template <bool kMax>
absl::StatusOr<Value> Extreme(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound,
               Bind(kMax ? "max" : "min", arguments, {"case_sensitive", "attribute"}));
  JINJA_ASSIGN(const std::vector<Value> items, Iterate(context, input));
  if (items.empty()) return Missing("No aggregated item, sequence was empty.");
  const Value* best = nullptr;
  Value best_key;
  for (const Value& item : items) {
    JINJA_ASSIGN(Value key, PlainKey(context, item, bound));
    bool better = best == nullptr;
    if (!better) {
      JINJA_ASSIGN(better, kMax ? Less(context, best_key, key) : Less(context, key, best_key));
    }
    if (!better) continue;
    best = &item;
    best_key = std::move(key);
  }
  return *best;
}

absl::StatusOr<Value> Sum(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("sum", arguments, {"attribute", "start"}));
  JINJA_ASSIGN(const std::vector<Value> items, Iterate(context, input));
  Value sum = bound.has(1) ? bound[1] : Value(0);
  if (sum.is_string()) return Error("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& item : items) {
    Value value = item;
    if (!bound.IsNone(0)) {
      JINJA_ASSIGN(value, FollowPath(context, item, bound[0]));
    }
    JINJA_ASSIGN(sum, Apply(context, BinaryOp::kAdd, sum, value));
  }
  return sum;
}

constexpr std::array kFilters = {
    NamedBuiltin{"count", LengthFilter},
    NamedBuiltin{"dictsort", DictSort},
    NamedBuiltin{"first", First},
    NamedBuiltin{"items", Items},
    NamedBuiltin{"join", Join},
    NamedBuiltin{"last", Last},
    NamedBuiltin{"length", LengthFilter},
    NamedBuiltin{"list", ListFilter},
    NamedBuiltin{"max", Extreme<true>},
    NamedBuiltin{"min", Extreme<false>},
    NamedBuiltin{"reverse", Reverse},
    NamedBuiltin{"sort", Sort},
    NamedBuiltin{"sum", Sum},
    NamedBuiltin{"unique", Unique},
};

}  // namespace

Builtin FindSequenceFilter(std::string_view name) { return FindBuiltin(kFilters, name); }

}  // namespace qwend::jinja
