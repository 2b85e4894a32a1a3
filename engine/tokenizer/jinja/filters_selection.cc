// map, select, reject, selectattr and rejectattr: filters and tests by name over every item.
#include <array>

#include "engine/tokenizer/jinja/access.h"
#include "engine/tokenizer/jinja/builtins.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/selection.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

// The arguments without the first `count` positional ones.
Arguments Rest(const Arguments& arguments, size_t count) {
  Arguments rest = arguments;
  rest.positional.erase(rest.positional.begin(),
                        rest.positional.begin() + static_cast<ptrdiff_t>(count));
  return rest;
}

absl::StatusOr<Builtin> Lookup(const Value& name, Builtin (*find)(std::string_view),
                               std::string_view what) {
  JINJA_CHECK(RequireDefined(name));
  const Builtin found = name.is_string() ? find(name.text()) : nullptr;
  if (found != nullptr) return found;
  return Error("no ", what, " named ",
               name.is_string() ? ReprText(name.text()) : std::string(name.TypeName()));
}

absl::StatusOr<Value> MapAttribute(Context& context, const std::vector<Value>& items,
                                   const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("map", arguments, {"attribute", "default"}, 1));
  std::vector<Value> mapped;
  for (const Value& item : items) {
    JINJA_ASSIGN(Value value,
                 FollowPath(context, item, bound[0], bound.IsNone(1) ? nullptr : &bound[1]));
    mapped.push_back(std::move(value));
  }
  return context.NewSequence(std::move(mapped), Sequence::Kind::kGenerator);
}

absl::StatusOr<Value> Map(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const std::vector<Value> items, Iterate(context, input));
  if (arguments.positional.empty()) {
    if (!arguments.named.empty()) return MapAttribute(context, items, arguments);
    return Error("map requires a filter argument");
  }
  JINJA_ASSIGN(const Builtin filter, Lookup(arguments.positional[0], FindFilter, "filter"));
  const Arguments rest = Rest(arguments, 1);
  std::vector<Value> mapped;
  for (const Value& item : items) {
    JINJA_CHECK(context.Spend(1));
    JINJA_ASSIGN(Value value, filter(context, item, rest));
    mapped.push_back(std::move(value));
  }
  return context.NewSequence(std::move(mapped), Sequence::Kind::kGenerator);
}

template <bool kKeep, bool kByAttribute>
absl::StatusOr<Value> Select(Context& context, const Value& input, const Arguments& arguments) {
  JINJA_ASSIGN(const std::vector<Value> items, Iterate(context, input));
  constexpr size_t kTestAt = kByAttribute ? 1 : 0;
  if (kByAttribute && arguments.positional.empty())
    return Error("Missing parameter for attribute name");
  Builtin test = nullptr;
  Arguments rest;
  if (arguments.positional.size() > kTestAt) {
    JINJA_ASSIGN(test, Lookup(arguments.positional[kTestAt], FindTest, "test"));
    rest = Rest(arguments, kTestAt + 1);
  }
  std::vector<Value> kept;
  for (const Value& item : items) {
    JINJA_CHECK(context.Spend(1));
    Value value = item;
    if (kByAttribute) {
      JINJA_ASSIGN(value, FollowPath(context, item, arguments.positional[0]));
    }
    if (test != nullptr) {
      JINJA_ASSIGN(value, test(context, value, rest));
    }
    if (value.Truthy() == kKeep) kept.push_back(item);
  }
  return context.NewSequence(std::move(kept), Sequence::Kind::kGenerator);
}

constexpr std::array kFilters = {
    NamedBuiltin{"map", Map},
    NamedBuiltin{"reject", Select<false, false>},
    NamedBuiltin{"rejectattr", Select<false, true>},
    NamedBuiltin{"select", Select<true, false>},
    NamedBuiltin{"selectattr", Select<true, true>},
};

}  // namespace

Builtin FindSelectionFilter(std::string_view name) { return FindBuiltin(kFilters, name); }

}  // namespace qwend::jinja
