// Pieces of text and whole numbers in a row. Takes std::string_view, which absl::StrCat does not
// where Abseil is built with a string_view of its own.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace qwend::jinja {

template <typename Part>
void AppendPart(std::string& out, const Part& part) {
  if constexpr (std::is_integral_v<Part>) {
    out += std::to_string(part);
  } else if constexpr (std::is_same_v<Part, absl::string_view>) {
    out.append(part.data(), part.size());
  } else {
    out += std::string_view(part);
  }
}

template <typename... Parts>
void Append(std::string& out, const Parts&... parts) {
  (AppendPart(out, parts), ...);
}

template <typename... Parts>
std::string Cat(const Parts&... parts) {
  std::string out;
  Append(out, parts...);
  return out;
}

}  // namespace qwend::jinja
