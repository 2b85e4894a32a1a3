// Matching a call's arguments with a builtin's parameters, as Python does.
#pragma once

#include <initializer_list>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

// What a builtin of the interpreter looks like: a filter's input or a method's object comes first.
using Builtin = absl::StatusOr<Value> (*)(Context& context, const Value& self,
                                          const Arguments& arguments);

class BoundArguments {
 public:
  explicit BoundArguments(std::vector<const Value*> values) : values_(std::move(values)) {}
  bool has(size_t i) const { return values_[i] != nullptr; }
  const Value& operator[](size_t i) const { return *values_[i]; }  // only when has(i)

  // With the default for an argument that is absent or none. Errors name the function and argument.
  absl::StatusOr<Integer> Int(size_t i, Integer otherwise) const;
  bool Bool(size_t i, bool otherwise) const { return has(i) ? values_[i]->Truthy() : otherwise; }
  absl::StatusOr<std::string_view> Text(size_t i, std::string_view otherwise) const;
  bool IsNone(size_t i) const { return !has(i) || values_[i]->is_none(); }

 private:
  std::vector<const Value*> values_;  // null: not given
};

// The first `required` parameters must be given. The result refers to `arguments`.
absl::StatusOr<BoundArguments> Bind(std::string_view function, const Arguments& arguments,
                                    std::initializer_list<std::string_view> parameters,
                                    size_t required = 0);

}  // namespace qwend::jinja
