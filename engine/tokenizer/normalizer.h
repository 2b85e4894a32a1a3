// Unicode normal form C, as tokenizer.json's {"type": "NFC"} asks for.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace qwend {

// `text` is valid UTF-8. Time is n log n at worst, also for endless runs of combining marks.
// INTERNAL if the Unicode library fails.
absl::StatusOr<std::string> NormalizeNfc(std::string_view text);

// False only when `text` surely is in form C already (no character from U+0300 on).
bool MayNeedNfc(std::string_view text);

}  // namespace qwend
