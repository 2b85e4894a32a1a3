#!/bin/sh
# clang-tidy (.clang-tidy) over a few translation units that reach most headers below the service:
# a bounded time, about a minute. tests/tidy.sh FILE... takes the files given instead.
cd "$(dirname "$0")/.." || exit 1
[ $# -gt 0 ] || set -- kernels/op_check.cc kernels/cpu/norm.cc engine/scheduler.cc \
  engine/loader/safetensors.cc client/bench_stats.cc
# The Release folder of tests/run.sh, configured here when it is not yet.
cmake -G Ninja -S . -B build -DQWEND_TESTS=ON >/dev/null || exit 1
printf '%s\n' "$@" | xargs -P "$(nproc)" -n 1 clang-tidy -p build --quiet 2>/dev/null
