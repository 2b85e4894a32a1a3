#include "engine/loader/json_fields.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace qwend {
namespace {

using nlohmann::json;

// The value as a message shows it: short, whatever the file holds.
std::string Shown(const json& value) {
  if (value.is_array()) return "a list";
  if (value.is_object()) return "an object";
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > 40) text = text.substr(0, 37) + "...";
  return text;
}

// False unless `value` is a whole number that fits.
bool AsInt(const json& value, int64_t& out) {
  if (value.is_number_unsigned()) {
    const auto u = value.get<uint64_t>();
    out = static_cast<int64_t>(u);
    return u <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  }
  if (value.is_number_integer()) {
    out = value.get<int64_t>();
    return true;
  }
  if (!value.is_number_float()) return false;
  const double d = value.get<double>();
  if (!(std::abs(d) < 1e15) || d != std::floor(d)) return false;
  out = static_cast<int64_t>(d);
  return true;
}

}  // namespace

const json* JsonFields::Find(const char* key) const {
  if (!object_->is_object()) return nullptr;
  const auto it = object_->find(key);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

bool JsonFields::Has(const char* key) const { return Find(key) != nullptr; }

void JsonFields::Fail(const std::string& key, const std::string& what) {
  if (status_.ok()) {
    status_ = absl::InvalidArgumentError(absl::StrCat(where_, ": ", key, " ", what));
  }
}

int64_t JsonFields::Int(const char* key, int64_t min, int64_t max) {
  if (!Has(key)) {
    Fail(key, "is missing");
    return min;
  }
  return Int(key, min, max, min);
}

int64_t JsonFields::Int(const char* key, int64_t min, int64_t max, int64_t fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  int64_t n = 0;
  if (!AsInt(*value, n)) {
    Fail(key, absl::StrCat("must be a whole number, not ", Shown(*value)));
    return fallback;
  }
  if (n < min || n > max) {
    Fail(key, absl::StrCat("is ", n, "; it must be between ", min, " and ", max));
    return fallback;
  }
  return n;
}

double JsonFields::Number(const char* key, double min, double max) {
  if (!Has(key)) {
    Fail(key, "is missing");
    return min;
  }
  return Number(key, min, max, min);
}

double JsonFields::Number(const char* key, double min, double max, double fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_number()) {
    Fail(key, absl::StrCat("must be a number, not ", Shown(*value)));
    return fallback;
  }
  const double d = value->get<double>();
  if (!(d >= min && d <= max)) {
    Fail(key, absl::StrCat("is ", d, "; it must be between ", min, " and ", max));
    return fallback;
  }
  return d;
}

bool JsonFields::Bool(const char* key, bool fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    Fail(key, absl::StrCat("must be true or false, not ", Shown(*value)));
    return fallback;
  }
  return value->get<bool>();
}

std::string JsonFields::String(const char* key, const std::string& fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string()) {
    Fail(key, absl::StrCat("must be a string, not ", Shown(*value)));
    return fallback;
  }
  return value->get<std::string>();
}

std::vector<std::string> JsonFields::Strings(const char* key) {
  std::vector<std::string> out;
  const json* value = Find(key);
  if (value == nullptr) return out;
  if (!value->is_array()) {
    Fail(key, absl::StrCat("must be a list of strings, not ", Shown(*value)));
    return out;
  }
  for (const json& item : *value) {
    if (!item.is_string()) {
      Fail(key, absl::StrCat("must hold strings only, not ", Shown(item)));
      return {};
    }
    out.push_back(item.get<std::string>());
  }
  return out;
}

std::vector<int32_t> JsonFields::TokenIds(const char* key) {
  std::vector<int32_t> out;
  const json* value = Find(key);
  if (value == nullptr) return out;
  const size_t count = value->is_array() ? value->size() : 1;
  for (size_t i = 0; i < count; ++i) {
    const json& item = value->is_array() ? (*value)[i] : *value;
    int64_t id = 0;
    if (!AsInt(item, id) || id < 0 || id > std::numeric_limits<int32_t>::max()) {
      Fail(key, absl::StrCat("must be a token id or a list of them, not ", Shown(item)));
      return {};
    }
    out.push_back(static_cast<int32_t>(id));
  }
  return out;
}

const json* JsonFields::Object(const char* key) {
  const json* value = Find(key);
  if (value == nullptr) return nullptr;
  if (!value->is_object()) {
    Fail(key, absl::StrCat("must be an object, not ", Shown(*value)));
    return nullptr;
  }
  return value;
}

}  // namespace qwend
