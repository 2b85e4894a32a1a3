#!/bin/bash
# Everything that is proved on a GPU, in one command, from what pack.sh gathered: operators and whole models against
# the CPU backend, full-shape parity with transformers, replays, speed beside transformers, and the memory checker.
# Needs an NVIDIA device; python3 with torch and transformers for the parity part, which skips visibly without them.
#   tests/gpu/run.sh [PART...]     PART: ops models service parity replay speed sweep sanitizer (none given: all)
set -uo pipefail
cd "$(dirname "$0")/../.."
export LD_LIBRARY_PATH=$PWD/.gpu/lib PYTHONUNBUFFERED=1
bin=$PWD/.gpu/bin
work=${QWEND_GPU_WORK:-/tmp/qwend-gpu}
mkdir -p "$work"
failed=0
shapes="qwen3.5-0.8b article-0.8b"

[ -e /dev/nvidiactl ] || { echo "SKIP gpu: no NVIDIA device"; exit 0; }
step() { echo "== $* ($SECONDS s)"; }
check() { timeout "$1" "${@:2}" || { echo "FAILED ($?): ${*:2}"; failed=1; }; }
have_torch() { python3 -c "import torch, transformers" 2>/dev/null || { echo "SKIP $1: no torch and transformers"; return 1; }; }
checkpoint() { [ -f "$work/$1/config.json" ] || check 120 python3 tests/gpu/make_checkpoint.py "$1" "$work/$1"; }
ids() { python3 -c "
import random, struct, sys
r = random.Random(1)
sys.stdout.buffer.write(struct.pack('<64i', *(r.randrange(3000) for _ in range(64))))" >"$work/ids"; }

ops() { step ops; check 240 "$bin/cuda_ops_test" --gtest_brief=1; }
models() { step models; QWEND_SOURCE_DIR=$PWD check 240 "$bin/cuda_model_test" --gtest_brief=1; }
service() { step service; check 180 python3 tests/gpu/service.py "$bin" models/demo tests/golden/demo-greedy.json; }
parity() {
  have_torch parity || return 0
  for shape in $shapes; do
    step "parity $shape"
    checkpoint "$shape"
    check 240 python3 tests/gpu/parity.py "$bin/model_probe" "$work/$shape"
  done
}
replay() {
  ids
  for model in models/demo; do
    step "replay $model"
    check 120 "$bin/model_probe" replay "$model" cuda explicit "$work/ids" 10000
  done
}
speed() {
  for shape in $shapes; do
    step "speed $shape"
    check 120 "$bin/qwend-bench" --backend=cuda --synthetic="$shape" --prompt_tokens=1024 --decode_tokens=256 --batch=1,8
  done
  have_torch "peers" || return 0
  for shape in $shapes; do
    step "peers $shape"
    checkpoint "$shape"
    check 240 python3 tests/gpu/peers.py "$work/$shape"
  done
}
sweep() {
  for shape in $shapes; do
    step "sweep $shape"
    check 120 "$bin/qwend-bench" --backend=cuda --synthetic="$shape" --sweep=splitk
  done
}
sanitizer() {
  for tool in memcheck racecheck initcheck; do
    step "compute-sanitizer $tool"
    check 240 compute-sanitizer --tool "$tool" --error-exitcode 1 "$bin/model_probe" greedy tests/golden/tiny-qwen35 cuda \
      explicit "$work/small-ids" 4
  done
}

python3 -c "
import struct, sys
sys.stdout.buffer.write(struct.pack('<70i', *(i * 7 % 500 for i in range(70))))" >"$work/small-ids"
for part in "${@:-ops models service parity replay speed sweep sanitizer}"; do
  for name in $part; do "$name"; done
done
[ "$failed" = 0 ] && echo "gpu: all passed"
exit "$failed"
