// JSON as values of a template.
#pragma once

#include "absl/status/statusor.h"
#include "engine/tokenizer/jinja/context.h"
#include "nlohmann/json.hpp"

namespace qwend::jinja {

// INVALID_ARGUMENT for JSON that is nested too deeply or too large for the context.
absl::StatusOr<Value> FromJson(Context& context, const nlohmann::ordered_json& json);

}  // namespace qwend::jinja
