#pragma once

namespace qwend {

inline constexpr char kVersion[] = QWEND_VERSION;  // of CMake's project()

}  // namespace qwend
