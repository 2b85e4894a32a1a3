// Debian's Abseil has a string_view of its own, which std::string_view does not turn into.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace qwend {

inline absl::string_view AbslView(std::string_view text) { return {text.data(), text.size()}; }

}  // namespace qwend
