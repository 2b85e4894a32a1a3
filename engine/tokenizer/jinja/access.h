// Attributes, items, slices and iteration, as Jinja's immutable sandbox allows them.
#pragma once

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/context.h"
#include "engine/tokenizer/jinja/value.h"

namespace qwend::jinja {

// object.name: a method, or else the item of that name, or else undefined.
absl::StatusOr<Value> GetAttribute(Context& context, const Value& object, std::string_view name);
// object[key]: an item, or else for text keys the attribute, or else undefined.
absl::StatusOr<Value> GetItem(Context& context, const Value& object, const Value& key);
// object[start:stop:step]; none stands for a bound that is not given.
absl::StatusOr<Value> GetSlice(Context& context, const Value& object, const Value& start,
                               const Value& stop, const Value& step);

// The elements that a `for` visits: items, keys of a dict, characters; none of undefined.
absl::StatusOr<std::vector<Value>> Iterate(Context& context, const Value& value);
absl::StatusOr<size_t> Length(Context& context, const Value& value);

absl::StatusOr<Value> NewRange(Context& context, Integer start, Integer stop, Integer step);

}  // namespace qwend::jinja
