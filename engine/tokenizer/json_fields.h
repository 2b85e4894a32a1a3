// Reading fields of a JSON object with errors that name the place.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace qwend::tokenizer_internal {

// "tokenizer.json: model.type: what"
inline absl::Status FieldError(absl::string_view where, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(where, ": ", what));
}

// The field, or null when `object` is no object, lacks it, or has null there.
inline const nlohmann::json* FindField(const nlohmann::json& object, const std::string& key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

inline std::string StringField(const nlohmann::json& object, const std::string& key) {
  const nlohmann::json* field = FindField(object, key);
  return field != nullptr && field->is_string() ? field->get<std::string>() : std::string();
}

inline bool BoolField(const nlohmann::json& object, const std::string& key, bool otherwise) {
  const nlohmann::json* field = FindField(object, key);
  return field != nullptr && field->is_boolean() ? field->get<bool>() : otherwise;
}

}  // namespace qwend::tokenizer_internal
