#!/bin/bash
# Everything that is proved on a GPU, in one command, from what pack.sh gathered: operators and whole models against
# the CPU backend, full-shape parity with transformers, replays, the persistent kernel's watchdog, speed beside
# transformers, and the memory checker.
# Needs an NVIDIA device; python3 with torch and transformers for parity, long, bits and peers, which skip visibly without.
#   tests/gpu/run.sh [PART...]   PART: ops models long service auto parity bits replay watchdog speed peers sweep sanitizer
#                                racecheck archs
#                                (all when none is given). PLANS="explicit fused" names the decode plans to show; all
#                                three when it is not set. CONTEXTS="128 1024" are those of the peers.
set -uo pipefail
cd "$(dirname "$0")/../.."
export LD_LIBRARY_PATH=$PWD/.gpu/lib PYTHONUNBUFFERED=1
bin=$PWD/.gpu/bin
work=${QWEND_GPU_WORK:-/tmp/qwend-gpu}
mkdir -p "$work" || exit 2
failed=0
shapes="qwen3.5-0.8b article-0.8b"
plans=${PLANS:-explicit fused persistent}

parts="ops models long service auto parity bits replay watchdog speed peers sweep sanitizer racecheck archs"
[ $# -gt 0 ] || set -- $parts
for name in "$@"; do
  case " $parts " in *" $name "*) ;;
    *) echo "usage: tests/gpu/run.sh [PART...]   PART: $parts" >&2; exit 2 ;;
  esac
done
[ -n "${plans// /}" ] || { echo "tests/gpu/run.sh: PLANS is empty; explicit, fused and persistent are possible" >&2; exit 2; }
for plan in $plans; do
  case "$plan" in explicit | fused | persistent) ;;
    *) echo "tests/gpu/run.sh: PLANS has '$plan'; explicit, fused and persistent are possible" >&2; exit 2 ;;
  esac
done
[ -e /dev/nvidiactl ] || { echo "SKIP gpu: no NVIDIA device"; exit 0; }
[ -x "$bin/model_probe" ] || { echo "tests/gpu/run.sh: no $bin/model_probe; see tests/gpu/pack.sh" >&2; exit 2; }
step() { echo "== $* ($SECONDS s)"; }
# check SECONDS COMMAND...; in this shell, never in a pipeline, or what failed is forgotten.
check() { timeout "$1" "${@:2}" || { echo "FAILED ($?): ${*:2}" >&2; failed=1; }; }
# A test program here must have run its tests: one that skipped is a failure too, unless the backend refuses a plan.
refusal="--decode_plan=persistent: "
tests() {
  local out
  out=$(timeout 300 "$bin/$1" --gtest_brief=1 2>&1)
  local code=$?
  echo "$out"
  local skipped
  skipped=$(grep -A 1 ": Skipped$" <<<"$out" | grep -vE -e "(: Skipped|^--)$" -e "^$refusal")
  [ "$code" = 0 ] && [ -z "$skipped" ] && ! grep -q "PASSED  \] 0 tests" <<<"$out" && return
  echo "FAILED ($code): $1"
  failed=1
}
have_torch() { python3 -c "import torch, transformers" 2>/dev/null || { echo "SKIP $1: no torch and transformers"; return 1; }; }
checkpoint() { [ -f "$work/$1/config.json" ] || check 120 python3 tests/gpu/make_checkpoint.py "$1" "$work/$1"; }
ids() { python3 -c "
import random, struct, sys
r = random.Random(1)
sys.stdout.buffer.write(struct.pack('<64i', *(r.randrange(500) for _ in range(64))))
open('$work/one-id', 'wb').write(struct.pack('<i', 7))
open('$work/long-ids', 'wb').write(struct.pack('<2600i', *(r.randrange(500) for _ in range(2600))))" >"$work/ids"; }

ops() {
  step ops
  tests cuda_ops_test
  tests fused_ops_test
}
models() {
  step models
  QWEND_SOURCE_DIR=$PWD tests cuda_model_test
}
service() {
  for plan in $plans; do
    step "service $plan"
    check 180 python3 tests/gpu/service.py "$bin" models/demo tests/golden/demo-greedy.json "$plan"
  done
}
# --decode_plan=auto measures the plans and says which one it takes: in the server with its default flags, and for one row
# and for eight at most of the full shapes.
auto() {
  step "auto: the server"
  check 180 python3 tests/gpu/service.py "$bin" models/demo tests/golden/demo-greedy.json auto
  local shape batch
  for shape in $shapes; do
    for batch in 1 1,2,4,8; do
      step "auto: $shape, batch $batch"
      check 60 "$bin/qwend-bench" --backend=cuda --synthetic="$shape" --decode_plan=auto --prompt_tokens=128 \
        --context=1024 --decode_tokens=64 --batch=$batch >"$work/auto.txt"
      grep -E "^(device|decode)  " "$work/auto.txt"
      grep -q "measured over" "$work/auto.txt" || { echo "FAILED: no plan was measured"; failed=1; }
    done
  done
}
parity() {
  have_torch parity || return 0
  for shape in $shapes; do
    checkpoint "$shape"
    step "parity $shape"
    # shellcheck disable=SC2086
    check 240 python3 tests/gpu/parity.py "$bin/model_probe" "$work/$shape" $plans
  done
}
# Long sequences of small checkpoints, many tiles, slots and pages of attention: decoded token by token as the explicit
# plan does, and as by a prefill, whose activations are bf16; and with other bits neither in a batch with shorter ones.
long() {
  have_torch long || return 0
  ids
  local model plan
  checkpoint few-columns
  checkpoint heads-128
  for model in models/demo tests/golden/tiny-qwen35-realheads "$work/few-columns" "$work/heads-128"; do
    check 60 "$bin/model_probe" logits "$model" cuda explicit "$work/long-ids" "$work/long-explicit"
    for plan in $plans; do
      step "long $model $plan"
      check 60 "$bin/model_probe" logits "$model" cuda "$plan" "$work/long-ids" "$work/long"
      check 30 python3 -c "
import numpy, sys
explicit, plan = (numpy.fromfile(f, numpy.float32).reshape(2, 2600, -1)[:, 1:] for f in sys.argv[1:])
def worst(a, b):
    return (numpy.linalg.norm(a - b, axis=1) / numpy.linalg.norm(b, axis=1)).max()
others, prefill = worst(plan[0], explicit[0]), worst(plan[0], plan[1])
print(f'worst row, relative error: {others:.2e} against the explicit plan, {prefill:.2e} against a prefill')
sys.exit(not (others < 5e-3 and prefill < 5e-2))" "$work/long-explicit" "$work/long"
      check 60 "$bin/model_probe" bits "$model" cuda "$plan" "$work/ids" 40 8
      check 60 "$bin/model_probe" bits "$model" cuda "$plan" "$work/one-id" 40 8
    done
  done
}
# 1,000 steps of the full shapes: the same bits alone and in batches, of growing length, and in another process.
bits() {
  have_torch bits || return 0
  ids
  local shape plan
  for shape in $shapes; do
    checkpoint "$shape"
    for plan in $plans; do
      step "bits $shape $plan"
      check 120 "$bin/model_probe" bits "$work/$shape" cuda "$plan" "$work/ids" 1000 8 >"$work/bits-1"
      check 120 "$bin/model_probe" bits "$work/$shape" cuda "$plan" "$work/ids" 1000 8 >"$work/bits-2"
      cat "$work/bits-1"
      if [ ! -s "$work/bits-1" ] || ! cmp "$work/bits-1" "$work/bits-2"; then
        echo "FAILED: two runs differ"
        failed=1
      fi
    done
  done
}
replay() {
  ids
  for plan in $plans; do
    step "replay $plan"
    check 120 "$bin/model_probe" replay models/demo cuda "$plan" "$work/ids" 10000
  done
}
# The persistent kernel waits for itself on the device: 100,000 steps must not hang, and a program that is killed between
# two of its barriers must leave the device to the next one.
watchdog() {
  case " $plans " in *" persistent "*) ;; *) echo "SKIP watchdog: PLANS is without persistent" >&2; return 0 ;; esac
  ids
  step "watchdog: 100,000 persistent steps"
  check 120 "$bin/model_probe" replay models/demo cuda persistent "$work/ids" 100000
  step "watchdog: killed in the middle"
  : >"$work/killed.txt"
  "$bin/model_probe" replay models/demo cuda persistent "$work/ids" 100000000 >"$work/killed.txt" 2>&1 &
  local victim=$!
  for _ in $(seq 600); do  # until it has printed its progress, and so is decoding
    grep -q " steps, " "$work/killed.txt" && break
    sleep 0.1
  done
  grep " steps, " "$work/killed.txt" | tail -n 1
  if ! grep -q " steps, " "$work/killed.txt" || ! kill -KILL "$victim"; then
    echo "FAILED: the program to be killed was not decoding"
    cat "$work/killed.txt"
    kill -KILL "$victim" 2>/dev/null
    failed=1
  fi
  wait "$victim" 2>/dev/null
  [ $? = 137 ] || { echo "FAILED: the program had ended before it was killed"; failed=1; }
  check 60 "$bin/model_probe" replay models/demo cuda persistent "$work/ids" 200
  step "watchdog: a kernel that faults"
  check 30 "$bin/model_probe" fault models/demo cuda persistent "$work/ids"
  check 60 "$bin/model_probe" replay models/demo cuda persistent "$work/ids" 200
}
speed() {
  for shape in $shapes; do
    for plan in $plans; do
      step "speed $shape $plan"
      check 120 "$bin/qwend-bench" --backend=cuda --synthetic="$shape" --decode_plan="$plan" --prompt_tokens=128 \
        --context=1024 --decode_tokens=256 --batch=1,2,4,8
    done
    for context in 128 8192; do
      step "speed $shape, context $context"
      for plan in $plans; do
        echo "$plan:"
        check 120 "$bin/qwend-bench" --backend=cuda --synthetic="$shape" --decode_plan="$plan" --prompt_tokens=1024 \
          --context=$context --decode_tokens=256 >"$work/bench.txt"
        grep -E "^(prefill  |decode  |  +[0-9.]+ %)" "$work/bench.txt"
      done
    done
  done
}
peers() {
  have_torch "peers" || return 0
  for shape in $shapes; do
    checkpoint "$shape"
    step "peers $shape"
    # shellcheck disable=SC2086
    check 560 python3 tests/gpu/peers.py "$work/$shape" ${CONTEXTS:-}
  done
}
sweep() {
  for shape in $shapes; do
    step "sweep $shape"
    check 120 "$bin/qwend-bench" --backend=cuda --synthetic="$shape" --sweep=splitk
  done
}
# Every family and plan under each tool, four at a time.
sanitizer() {
  local tool model plan
  for tool in memcheck racecheck initcheck; do
    step "compute-sanitizer $tool"
    for model in tests/golden/tiny-*; do
      for plan in $plans; do
        # The persistent kernel waits for itself, which racecheck makes slow: by itself, below.
        [ "$tool $plan" = "racecheck persistent" ] || echo "$model $plan"
      done
    done >"$work/runs"
    check 300 xargs -r -a "$work/runs" -P 4 -L 1 bash -c 'out=$(compute-sanitizer --tool '"$tool"' --error-exitcode 1 \
      '"$bin"'/model_probe greedy "$0" cuda "$1" '"$work"'/small-ids 4 2>&1) && echo "  $0 $1: clean" ||
      { why=$(grep -v cudaError <<<"$out" | grep -m 1 -e "'"$refusal"'") && echo "  $0 $1: SKIP: $why"; } ||
      { echo "  $0 $1: FAILED"; echo "$out" | head -n 40; exit 1; }'
  done
}
# The persistent kernel in the build that shows racecheck who has read a slot (kernels/cuda/persistent_shared.cuh): one row,
# and eight.
racecheck() {
  case " $plans " in *" persistent "*) ;; *) echo "SKIP racecheck: PLANS is without persistent" >&2; return 0 ;; esac
  step "compute-sanitizer racecheck, persistent"
  check 400 xargs -r -P 3 -L 1 bash -c 'SECONDS=0; out=$(compute-sanitizer --tool racecheck --show-backtrace no \
    --error-exitcode 1 "'"$bin"'"/model_probe_racecheck "$0" "$1" cuda persistent "'"$work"'/small-ids" "$2" 2>&1) &&
    echo "  $0 $1 $2: clean, $SECONDS s" || { echo "  $0 $1 $2: FAILED, $SECONDS s"; echo "$out" | head -n 40; exit 1; }' <<END
greedy tests/golden/tiny-qwen35-realheads 3
greedy models/demo 3
bits models/demo 1
END
}
# The kernels compile for every architecture that docs/PERFORMANCE.md names.
archs() {
  command -v nvcc >/dev/null || { echo "SKIP archs: no nvcc"; return 0; }
  for arch in 80 89 90a 120; do
    step "nvcc sm_$arch"
    printf '%s\n' kernels/cuda/*.cu >"$work/sources"
    check 300 xargs -r -a "$work/sources" -P "$(nproc)" -I{} nvcc -std=c++20 -O3 -I. --Werror=all-warnings \
      -gencode=arch=compute_$arch,code=sm_$arch -c {} -o /dev/null
  done
}

python3 -c "
import struct, sys
sys.stdout.buffer.write(struct.pack('<70i', *(i * 7 % 500 for i in range(70))))" >"$work/small-ids"
for name in "$@"; do "$name"; done
[ "$failed" = 0 ] && echo "gpu: all passed"
exit "$failed"
