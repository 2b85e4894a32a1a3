#include "engine/tokenizer/jinja/methods.h"

#include <algorithm>
#include <array>

#include "engine/tokenizer/jinja/cat.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/operators.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

class BoundMethod : public Callable {
 public:
  BoundMethod(Value self, std::string_view name, Builtin function)
      : self_(std::move(self)), name_(name), function_(function) {}
  absl::StatusOr<Value> Call(Context& context, const Arguments& arguments) const override {
    JINJA_CHECK(context.Spend(1));
    return function_(context, self_, arguments);
  }
  std::string Repr() const override {
    return Cat("<built-in method ", name_, " of ", self_.TypeName(), " object>");
  }
  std::string_view type_name() const override { return "builtin_function_or_method"; }
  int depth() const override { return self_.Depth() + 1; }

 private:
  Value self_;
  std::string_view name_;  // of the static table
  Builtin function_;
};

absl::StatusOr<Value> DictItems(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_CHECK(Bind("items", arguments, {}).status());
  std::vector<Value> items;
  for (const auto& [key, value] : self.dict()->entries) {
    JINJA_ASSIGN(Value pair, context.NewSequence({key, value}, Sequence::Kind::kTuple));
    items.push_back(std::move(pair));
  }
  return context.NewSequence(std::move(items), Sequence::Kind::kDictItems);
}

absl::StatusOr<Value> DictKeys(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_CHECK(Bind("keys", arguments, {}).status());
  std::vector<Value> keys;
  for (const auto& [key, value] : self.dict()->entries) keys.push_back(key);
  return context.NewSequence(std::move(keys), Sequence::Kind::kDictKeys);
}

absl::StatusOr<Value> DictValues(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_CHECK(Bind("values", arguments, {}).status());
  std::vector<Value> values;
  for (const auto& [key, value] : self.dict()->entries) values.push_back(value);
  return context.NewSequence(std::move(values), Sequence::Kind::kDictValues);
}

absl::StatusOr<Value> DictGet(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("get", arguments, {"key", "default"}, 1));
  JINJA_ASSIGN(const bool contains, Contains(context, self, bound[0]));
  if (contains) return *self.dict()->Find(bound[0]);
  return bound.has(1) ? bound[1] : Value();
}

absl::StatusOr<Value> Copy(Context&, const Value& self, const Arguments& arguments) {
  JINJA_CHECK(Bind("copy", arguments, {}).status());
  return self;  // values never change, so one is as good as its copy
}

absl::StatusOr<Value> ListIndex(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("index", arguments, {"value"}, 1));
  const std::vector<Value>& items = self.sequence()->items;
  for (size_t i = 0; i < items.size(); ++i) {
    JINJA_ASSIGN(const bool equal, Equal(context, items[i], bound[0]));
    if (equal) return Value(i);
  }
  return Error("the value is not in the ", self.TypeName());
}

absl::StatusOr<Value> ListCount(Context& context, const Value& self, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("count", arguments, {"value"}, 1));
  size_t count = 0;
  for (const Value& item : self.sequence()->items) {
    JINJA_ASSIGN(const bool equal, Equal(context, item, bound[0]));
    if (equal) ++count;
  }
  return Value(count);
}

absl::StatusOr<Value> LoopCycle(Context&, const Value& self, const Arguments& arguments) {
  if (arguments.positional.empty()) return Error("no items for cycling given");
  return arguments.positional[self.loop()->index % arguments.positional.size()];
}

constexpr std::array kDictMethods = {Method{"copy", Copy}, Method{"get", DictGet},
                                     Method{"items", DictItems}, Method{"keys", DictKeys},
                                     Method{"values", DictValues}};
constexpr std::array kSequenceMethods = {Method{"count", ListCount}, Method{"index", ListIndex}};
constexpr std::array kListMethods = {Method{"copy", Copy}};
constexpr std::array kLoopMethods = {Method{"cycle", LoopCycle}};

template <size_t N>
const Method* Find(const std::array<Method, N>& methods, std::string_view name) {
  for (const Method& method : methods) {
    if (method.name == name) return &method;
  }
  return nullptr;
}

const Method* FindMethod(const Value& object, std::string_view name) {
  if (object.dict() != nullptr) return Find(kDictMethods, name);
  if (object.loop() != nullptr) return Find(kLoopMethods, name);
  if (object.is_string()) return FindStringMethod(name);
  const Sequence* sequence = object.sequence();
  if (sequence == nullptr || !sequence->indexable()) return nullptr;
  if (sequence->kind == Sequence::Kind::kList) {
    if (const Method* method = Find(kListMethods, name)) return method;
  }
  return Find(kSequenceMethods, name);
}

}  // namespace

std::optional<Value> BindMethod(const Value& object, std::string_view name) {
  const Method* method = FindMethod(object, name);
  if (method == nullptr) return std::nullopt;
  return Value(std::shared_ptr<const Callable>(
      std::make_shared<BoundMethod>(object, method->name, method->function)));
}

}  // namespace qwend::jinja
