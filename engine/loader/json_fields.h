// Typed access to the keys of one JSON object. The first thing wrong is kept as the status; getters
// return a harmless value from then on, so that a reader can be written straight down and checked
// once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace qwend {

class JsonFields {
 public:
  // `object` must outlive this. `where` is how messages name the place ("config.json",
  // "config.json: text_config").
  JsonFields(const nlohmann::json& object, std::string where)
      : object_(&object), where_(std::move(where)) {}

  // Absent and null are the same.
  bool Has(const char* key) const;

  // Whole numbers within [min, max]; 5.0 is one. Without `fallback` the key must be there.
  int64_t Int(const char* key, int64_t min, int64_t max);
  int64_t Int(const char* key, int64_t min, int64_t max, int64_t fallback);
  // Finite numbers within [min, max].
  double Number(const char* key, double min, double max);
  double Number(const char* key, double min, double max, double fallback);
  bool Bool(const char* key, bool fallback);
  std::string String(const char* key, const std::string& fallback);
  std::vector<std::string> Strings(const char* key);  // empty when absent
  std::vector<int32_t> TokenIds(const char* key);     // a number or a list; empty when absent
  const nlohmann::json* Object(const char* key);      // null when absent

  // Keeps the first failure: "<where>: <key> <what>".
  void Fail(const std::string& key, const std::string& what);
  // Keeps the first failure of fields below these, whose message has its own place.
  void Adopt(const absl::Status& below) {
    if (status_.ok()) status_ = below;
  }
  const absl::Status& status() const { return status_; }
  const std::string& where() const { return where_; }

 private:
  const nlohmann::json* Find(const char* key) const;

  const nlohmann::json* object_;
  std::string where_;
  absl::Status status_;
};

}  // namespace qwend
