// How a fuzz target says that something is wrong: it aborts, and the driver keeps the input.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace qwend::fuzz {

inline void Check(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz check failed: %s\n", what);
  std::abort();
}

}  // namespace qwend::fuzz
