// What filters over sequences share: attribute paths and orders.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

std::vector<std::string_view> SplitPath(std::string_view path, char separator);

// item.a.0.b for the path "a.0.b" or a whole number; `otherwise`, when not null, stands in for
// undefined results.
absl::StatusOr<Value> FollowPath(Context& context, const Value& item, const Value& path,
                                 const Value* otherwise = nullptr);

// Text in lower case unless `case_sensitive`; other values as they are.
absl::StatusOr<Value> FoldCase(Context& context, const Value& value, bool case_sensitive);

// Sorts stably by the keys at the same positions. Fails when two keys have no order.
absl::Status SortByKeys(Context& context, std::vector<Value>& items, const std::vector<Value>& keys,
                        bool reverse);

}  // namespace qwend::jinja
