// Filters, tests and global functions by name.
#pragma once

#include <string_view>

#include "engine/tokenizer/jinja/arguments.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

Builtin FindFilter(std::string_view name);  // null when there is none
Builtin FindTest(std::string_view name);    // gives a bool; null when there is none
// range, namespace, dict, raise_exception, strftime_now; null when there is none.
const Value* FindGlobal(std::string_view name);

// The parts of FindFilter's table.
Builtin FindTextFilter(std::string_view name);
Builtin FindNumberFilter(std::string_view name);
Builtin FindSequenceFilter(std::string_view name);
Builtin FindSelectionFilter(std::string_view name);

struct NamedBuiltin {
  std::string_view name;
  Builtin function;
};
template <typename Table>
Builtin FindBuiltin(const Table& table, std::string_view name) {
  for (const NamedBuiltin& entry : table) {
    if (entry.name == name) return entry.function;
  }
  return nullptr;
}

}  // namespace qwend::jinja
