#!/bin/bash
# Installs, builds and runs every test. The last line is "N passed, N failed, N skipped"; the exit
# code is 0 only when none failed.
#   tests/run.sh                 everything: style, Release, ASan + UBSan, TSan, quickstart
#   tests/run.sh --quick         style and Release
#   tests/run.sh --only PHASE    one of: style release asan tsan quickstart gpu
# Build folders: build, build-asan, build-tsan.
set -uo pipefail
cd "$(dirname "$0")/.."

phases="style release asan tsan gpu quickstart"
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) phases="style release" ;;
    --only) phases=${2:-}; shift ;;
    *) echo "usage: tests/run.sh [--quick | --only style|release|asan|tsan|gpu|quickstart]" >&2; exit 2 ;;
  esac
  shift
done
for phase in $phases; do
  case "$phase" in style | release | asan | tsan | gpu | quickstart) ;;
    *) echo "tests/run.sh: no phase '$phase'" >&2; exit 2 ;;
  esac
done
[ -n "$phases" ] || { echo "tests/run.sh: --only needs a phase" >&2; exit 2; }

jobs=$(nproc)
passed=0 failed=0 skipped=0 failures=""
[ -d /usr/local/cuda/bin ] && PATH=$PATH:/usr/local/cuda/bin
unset "${!QWEND_@}"  # the server reads QWEND_<FLAG>
export no_grpc_proxy=127.0.0.1,localhost,::1 PYTHONDONTWRITEBYTECODE=1
export ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1

say() { echo "== $* ($SECONDS s)"; }
pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); failures="$failures"$'\n'"  $*"; echo "FAILED: $*"; }
skip() { skipped=$((skipped + 1)); echo "SKIP $*"; }
# One check that counts as one test: check NAME COMMAND...
check() {
  local name=$1
  shift
  say "$name"
  if "$@"; then pass; else fail "$name"; fi
}

# build FOLDER TARGET [CMAKE OPTION...]
build() {
  local folder=$1 target=$2
  shift 2
  local log=$folder/run.log
  mkdir -p "$folder"
  cmake -G Ninja -S . -B "$folder" -DQWEND_TESTS=ON "$@" >"$log" 2>&1 &&
    cmake --build "$folder" -j "$jobs" --target "$target" >>"$log" 2>&1 && return 0
  grep -E "error|FAILED" "$log" | head -n 40
  tail -n 20 "$log"
  return 1
}

# ctest over one folder; adds what its JUnit file says to the sums: suite NAME FOLDER [CTEST OPTION...]
suite() {
  local name=$1 folder=$2
  shift 2
  local report=$folder/junit.xml counts
  rm -f "$report"
  ctest --test-dir "$folder" -j "$jobs" --output-on-failure --no-tests=error \
    --output-junit "$PWD/$report" "$@"
  local code=$?
  if ! counts=$(/usr/bin/python3 tests/junit_counts.py "$report"); then
    fail "$name: ctest left no report"
    return
  fi
  local p f s names
  read -r p f s names <<<"$counts"
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  [ -z "$names" ] || failures="$failures"$'\n'"  $name: $names"
  [ "$code" = 0 ] || [ "$f" != 0 ] || fail "$name: ctest ended with $code"
}

# build_and_test NAME FOLDER TARGET LABELS [CMAKE OPTION...]: LABELS are options of ctest.
build_and_test() {
  local name=$1 folder=$2 target=$3 labels=$4
  shift 4
  say "$name: build"
  if build "$folder" "$target" "$@"; then
    say "$name: test"
    # shellcheck disable=SC2086
    suite "$name" "$folder" $labels
  else
    fail "$name: build"
  fi
}

style() {
  check "format" tests/format.sh
  check "clang-tidy" tests/tidy.sh
}
release() {
  build_and_test release build all "-LE gpu" -DCMAKE_BUILD_TYPE=Release -DQWEND_SANITIZE= \
    -DQWEND_CUDA=AUTO -DQWEND_CUDA_ARCHS=90a
}
asan() {
  build_and_test asan build-asan all "-LE gpu" -DCMAKE_BUILD_TYPE=Release \
    -DQWEND_SANITIZE=address,undefined -DQWEND_CUDA=OFF
}
tsan() {
  build_and_test tsan build-tsan tsan_tests "-L tsan" -DCMAKE_BUILD_TYPE=Release \
    -DQWEND_SANITIZE=thread -DQWEND_SERVICE=OFF -DQWEND_CUDA=OFF
}
gpu() {
  if [ ! -e /dev/nvidiactl ]; then
    skip "gpu: no NVIDIA device"
  elif ! command -v nvcc >/dev/null; then
    skip "gpu: no nvcc"
  elif say "gpu: build" && build build all -DCMAKE_BUILD_TYPE=Release -DQWEND_SANITIZE= \
    -DQWEND_CUDA=ON -DQWEND_CUDA_ARCHS=90a; then
    say "gpu: test"
    suite gpu build -L gpu -j 1
  else
    fail "gpu: build"
  fi
}
quickstart_answers() {
  local answer
  answer=$(deploy/quickstart.sh "What is the capital of France?") || return 1
  [ "$answer" = "The capital of France is Paris." ] || { echo "answered: $answer"; return 1; }
}
quickstart() { check "quickstart" quickstart_answers; }

say "packages"
if deploy/install-deps.sh --test; then
  for phase in $phases; do "$phase"; done
else
  fail "packages"
fi
say "done"
[ -z "$failures" ] || echo "failed:$failures"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
