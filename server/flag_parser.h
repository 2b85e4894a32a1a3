// Sets Abseil flags from the environment and from arguments. Abseil's own parser ends the process
// with exit code 1 and several lines on a mistake; this one returns the mistake.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace qwend {

// The names of the flags that ParseArguments knows: those defined in the source file whose path
// ends with `source`. Sorted.
std::vector<std::string> FlagsDefinedIn(const std::string& source);

// Gives every flag its default value.
void ResetFlags(const std::vector<std::string>& flags);

// Sets each of `flags` whose variable <prefix><NAME> is set. INVALID_ARGUMENT names the variable.
absl::Status ParseEnvironment(const std::vector<std::string>& flags, const std::string& prefix,
                              const std::function<const char*(const std::string&)>& environment);

// Takes --name=value, --name value, --bool, --nobool and --flagfile=PATH (one flag a line, # starts
// a comment). Fills `switches` with the names in `known_switches` ("help") that were given.
// INVALID_ARGUMENT names the argument.
absl::Status ParseArguments(const std::vector<std::string>& flags,
                            const std::vector<std::string>& known_switches,
                            const std::vector<std::string>& args,
                            std::vector<std::string>* switches);

// One line per flag: name, help text and default.
std::string DescribeFlags(const std::vector<std::string>& flags);

}  // namespace qwend
