// Methods of strings, dicts, lists and of the variable `loop`.
#pragma once

#include <optional>
#include <string_view>

#include "engine/tokenizer/jinja/arguments.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

// object.name as something to call; nullopt when the object has no such method. Defined in
// methods.cc; the tables it reads stand in the files of their types.
std::optional<Value> BindMethod(const Value& object, std::string_view name);

struct Method {
  std::string_view name;
  Builtin function;
};
const Method* FindStringMethod(std::string_view name);  // null when there is none

// str.replace, which the filter of this name shares. A negative limit means all.
absl::StatusOr<Value> ReplaceText(Context& context, std::string_view text, std::string_view from,
                                  std::string_view to, Integer limit, bool markup);

}  // namespace qwend::jinja
