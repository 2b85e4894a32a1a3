#include "engine/tokenizer/jinja/arguments.h"

#include <algorithm>

#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/try.h"

namespace qwend::jinja {

absl::StatusOr<Integer> BoundArguments::Int(size_t i, Integer otherwise) const {
  if (IsNone(i)) return otherwise;
  JINJA_CHECK(RequireDefined(*values_[i]));
  if (values_[i]->is_int() || values_[i]->is_bool()) return values_[i]->integer();
  return Error("'", values_[i]->TypeName(), "' object cannot be interpreted as an integer");
}

absl::StatusOr<std::string_view> BoundArguments::Text(size_t i, std::string_view otherwise) const {
  if (IsNone(i)) return otherwise;
  JINJA_CHECK(RequireDefined(*values_[i]));
  if (values_[i]->is_string()) return std::string_view(values_[i]->text());
  return Error("expected a string, not '", values_[i]->TypeName(), "'");
}

absl::StatusOr<BoundArguments> Bind(std::string_view function, const Arguments& arguments,
                                    std::initializer_list<std::string_view> parameters,
                                    size_t required) {
  if (arguments.positional.size() > parameters.size()) {
    return Error(function, "() takes at most ", parameters.size(), " argument(s), ",
                 arguments.positional.size(), " given");
  }
  std::vector<const Value*> values(parameters.size(), nullptr);
  for (size_t i = 0; i < arguments.positional.size(); ++i) values[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    const auto* const parameter = std::find(parameters.begin(), parameters.end(), name);
    if (parameter == parameters.end()) {
      return Error(function, "() got an unexpected keyword argument '", name, "'");
    }
    const auto i = static_cast<size_t>(parameter - parameters.begin());
    if (values[i] != nullptr) {
      return Error(function, "() got multiple values for argument '", name, "'");
    }
    values[i] = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (values[i] == nullptr) {
      return Error(function, "() is missing the argument '", parameters.begin()[i], "'");
    }
  }
  return BoundArguments(std::move(values));
}

}  // namespace qwend::jinja
