#include "engine/tokenizer/jinja/builtins.h"

#include <array>
#include <ctime>

#include "absl/time/clock.h"
#include "engine/tokenizer/jinja/access.h"
#include "engine/tokenizer/jinja/cat.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/print.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {
namespace {

class Function : public Callable {
 public:
  Function(std::string_view name, Builtin function) : name_(name), function_(function) {}
  absl::StatusOr<Value> Call(Context& context, const Arguments& arguments) const override {
    JINJA_CHECK(context.Spend(1));
    return function_(context, Value(), arguments);
  }
  std::string Repr() const override { return Cat("<function ", name_, ">"); }

 private:
  std::string_view name_;
  Builtin function_;
};

absl::StatusOr<Value> Range(Context& context, const Value&, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("range", arguments, {"start", "stop", "step"}, 1));
  for (size_t i = 0; i < 3; ++i) {
    if (bound.has(i) && bound[i].is_none()) {
      return Error("'NoneType' object cannot be interpreted as an integer");
    }
  }
  JINJA_ASSIGN(const Integer first, bound.Int(0, 0));
  if (!bound.has(1)) return NewRange(context, 0, first, 1);
  JINJA_ASSIGN(const Integer stop, bound.Int(1, 0));
  JINJA_ASSIGN(const Integer step, bound.Int(2, 1));
  return NewRange(context, first, stop, step);
}

// The entries that dict(...) and namespace(...) are called with.
absl::StatusOr<Dict> Entries(Context& context, const Arguments& arguments) {
  Dict dict;
  if (arguments.positional.size() > 1) return Error("dict expected at most 1 argument");
  if (!arguments.positional.empty()) {
    const Value& source = arguments.positional[0];
    JINJA_CHECK(RequireDefined(source));
    if (source.dict() != nullptr) {
      dict = *source.dict();
    } else {
      JINJA_ASSIGN(const std::vector<Value> pairs, Iterate(context, source));
      for (const Value& pair : pairs) {
        JINJA_ASSIGN(const std::vector<Value> parts, Iterate(context, pair));
        if (parts.size() != 2) return Error("dict() takes pairs of a key and a value");
        JINJA_CHECK(RequireHashable(parts[0]));
        JINJA_CHECK(context.Spend(static_cast<int64_t>(dict.entries.size() - dict.index.size())));
        dict.Set(parts[0], parts[1]);
      }
    }
  }
  for (const auto& [name, value] : arguments.named) dict.Set(Value(name), value);
  return dict;
}

absl::StatusOr<Value> MakeDict(Context& context, const Value&, const Arguments& arguments) {
  JINJA_ASSIGN(Dict dict, Entries(context, arguments));
  return context.NewDict(std::move(dict));
}

absl::StatusOr<Value> MakeNamespace(Context& context, const Value&, const Arguments& arguments) {
  JINJA_ASSIGN(Dict dict, Entries(context, arguments));
  JINJA_ASSIGN(Namespace* const ns, context.NewNamespace());
  JINJA_CHECK(context.Allocate(static_cast<int64_t>(dict.entries.size() * 3 * sizeof(Value))));
  ns->attributes = std::move(dict);
  return Value(ns);
}

absl::StatusOr<Value> RaiseException(Context& context, const Value&, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("raise_exception", arguments, {"message"}, 1));
  JINJA_ASSIGN(const std::string message, ToText(context, bound[0]));
  return context.Raise(message);
}

absl::StatusOr<Value> StrftimeNow(Context& context, const Value&, const Arguments& arguments) {
  JINJA_ASSIGN(const BoundArguments bound, Bind("strftime_now", arguments, {"format"}, 1));
  JINJA_ASSIGN(const std::string_view format, bound.Text(0, ""));
  constexpr size_t kMaxFormat = 1024;
  if (format.size() > kMaxFormat) return Error("strftime_now() takes a shorter format");
  if (format.empty()) return context.NewText("");
  const std::time_t seconds = absl::ToTimeT(context.now());
  std::tm local = {};
  localtime_r(&seconds, &local);
  std::string text(kMaxFormat * 64, '\0');
  text.resize(std::strftime(text.data(), text.size(), std::string(format).c_str(), &local));
  return context.NewText(std::move(text));
}

Value Global(std::string_view name, Builtin function) {
  return Value(std::shared_ptr<const Callable>(std::make_shared<const Function>(name, function)));
}

}  // namespace

Builtin FindFilter(std::string_view name) {
  for (const auto find :
       {FindTextFilter, FindSequenceFilter, FindSelectionFilter, FindNumberFilter}) {
    if (const Builtin filter = find(name)) return filter;
  }
  return nullptr;
}

const Value* FindGlobal(std::string_view name) {
  static const auto& kGlobals = *new std::array<std::pair<std::string_view, Value>, 5>{
      {{"range", Global("range", Range)},
       {"dict", Global("dict", MakeDict)},
       {"namespace", Global("namespace", MakeNamespace)},
       {"raise_exception", Global("raise_exception", RaiseException)},
       {"strftime_now", Global("strftime_now", StrftimeNow)}}};
  for (const auto& [global, value] : kGlobals) {
    if (global == name) return &value;
  }
  return nullptr;
}

}  // namespace qwend::jinja
