// Random changes to a JSON text that leave it JSON, for targets that read files in that form.
#pragma once

#include <string>

namespace qwend::fuzz {

// `text` with one to three values replaced, removed, doubled, renamed or moved. What is no JSON
// comes back as it is. The same seed gives the same result.
std::string MutateJson(const std::string& text, unsigned seed);

}  // namespace qwend::fuzz
