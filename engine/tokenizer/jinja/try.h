// Early return on a failed absl::Status or absl::StatusOr, for the interpreter's own files.
#pragma once

#include <utility>

#define JINJA_TRY_JOIN_(a, b) a##b
#define JINJA_TRY_NAME_(line) JINJA_TRY_JOIN_(jinja_try_, line)
#define JINJA_TRY_ASSIGN_(temporary, lhs, ...)               \
  auto temporary = (__VA_ARGS__);                            \
  if (!temporary.ok()) return std::move(temporary).status(); \
  lhs = *std::move(temporary)

// JINJA_ASSIGN(auto x, Compute()): x is the value, or the function returns the error.
#define JINJA_ASSIGN(lhs, ...) JINJA_TRY_ASSIGN_(JINJA_TRY_NAME_(__LINE__), lhs, __VA_ARGS__)

// JINJA_CHECK(Do()): the function returns when Do fails.
#define JINJA_CHECK(...)                                                  \
  do {                                                                    \
    if (absl::Status status = (__VA_ARGS__); !status.ok()) return status; \
  } while (false)
