// Which instruction sets Highway compiles the hot operators for: AVX-512, AVX2, and plain C++ for
// everything older. Include before any Highway header.
#pragma once

#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
