// model_probe's arguments: each bad one ends the program with a line that names it.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"

namespace qwend {

[[noreturn]] inline void Die(const std::string& message) {
  std::fprintf(stderr, "model_probe: %s\n", message.c_str());
  std::exit(1);
}

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Die(std::string(value.status().message()));
  return *std::move(value);
}

inline std::vector<int32_t> ReadIds(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) Die(path + ": cannot be read");
  const std::vector<char> bytes((std::istreambuf_iterator<char>(in)), {});
  std::vector<int32_t> ids(bytes.size() / sizeof(int32_t));
  std::memcpy(ids.data(), bytes.data(), ids.size() * sizeof(int32_t));
  if (ids.empty() || bytes.size() % sizeof(int32_t) != 0)
    Die(path + ": " + std::to_string(bytes.size()) + " bytes are not a number of int32 ids");
  return ids;
}

inline DecodePlan ReadPlan(const std::string& name) {
  for (const DecodePlan plan :
       {DecodePlan::kAuto, DecodePlan::kExplicit, DecodePlan::kFused, DecodePlan::kPersistent}) {
    if (name == PlanName(plan)) return plan;
  }
  Die("PLAN is '" + name + "'; it must be explicit, fused, persistent or auto");
}

// All of `text` as a number of at least `least`.
inline double Number(const char* what, const std::string& text, double least) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= least && std::isfinite(value)))
    Die(std::string(what) + " is '" + text + "'; a number of at least " + std::to_string(least) +
        " is needed");
  return value;
}

// All of `text` as a whole number of at least `least` that an int holds.
inline int Count(const char* what, const std::string& text, int least) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least)
    Die(std::string(what) + " is '" + text + "'; a whole number from " + std::to_string(least) +
        " to " + std::to_string(std::numeric_limits<int>::max()) + " is needed");
  return value;
}

}  // namespace qwend
