// From a Chat message to the text that the model's template makes of it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "qwend/v1/inference.pb.h"
#include "server/model_view.h"
#include "server/violations.h"

namespace qwend {

// JSON that a caller sent. INVALID_ARGUMENT: not JSON, or nested so deep that handling it could
// exhaust a stack.
absl::StatusOr<nlohmann::ordered_json> ParseCallerJson(const std::string& text);

// FAILED_PRECONDITION when the model has no tokenizer, no template, or one that this server cannot
// read.
absl::Status RequireChat(const ModelView& model);

// Renders a chat. What is wrong with it, the template's own objections included, goes to
// `violations` under "chat", and the result is empty then. RequireChat must hold.
std::string RenderChat(const v1::Chat& chat, const ModelView& model, Violations* violations);

// The checks of RenderChat alone, for a model that cannot render.
void CheckChat(const v1::Chat& chat, Violations* violations);

}  // namespace qwend
