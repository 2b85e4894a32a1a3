#!/bin/bash
# From nothing to an answer: installs, builds, starts the server on the demo model, asks it one
# question, shows the answer as it comes, and stops the server.
#   deploy/quickstart.sh "What is the capital of France?"
# Progress goes to standard error, the answer alone to standard output. Other models: QWEND_MODEL.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -ne 1 ] || [ "$1" = --help ]; then
  echo 'usage: deploy/quickstart.sh "What is the capital of France?"' >&2
  [ "${1:-}" = --help ] && exit 0
  exit 2
fi
question=$1
build=${QWEND_BUILD_DIR:-build}
model=${QWEND_MODEL:-models/demo}
unset "${!QWEND_@}"  # the server reads QWEND_<FLAG>; this run decides by its own arguments

server=""
work=$(mktemp -d)
step() { echo "quickstart: $*" >&2; }
clean_up() {
  local code=$?
  trap - EXIT
  if [ -n "$server" ] && kill -0 "$server" 2>/dev/null; then
    kill -TERM "$server" 2>/dev/null || true
    for _ in $(seq 50); do kill -0 "$server" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$work"
  exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
fail() {
  step "$1"
  [ -s "${2:-}" ] && tail -n 20 "$2" >&2
  exit 1
}

step "packages"
deploy/install-deps.sh

step "build ($build, minutes the first time, seconds later)"
# A folder that the tests configured already keeps its settings. Without a GPU the CUDA backend
# would only cost time.
cuda=OFF
[ ! -e /dev/nvidiactl ] || cuda=AUTO
if [ ! -f "$build/build.ninja" ]; then
  cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DQWEND_TESTS=OFF -DQWEND_CUDA=$cuda \
    >"$work/build.log" 2>&1 || fail "cmake failed" "$work/build.log"
fi
nice cmake --build "$build" --target qwend qwend-client >"$work/build.log" 2>&1 ||
  fail "the build failed" "$work/build.log"

step "server"
log=$work/server.log
"$build/bin/qwend" --model="$model" --listen=127.0.0.1:0 --metrics_listen=127.0.0.1:0 \
  --log_format=json >"$log" 2>&1 &
server=$!
port=""
for _ in $(seq 3000); do  # a large model takes its time to load
  port=$(sed -n 's/.*"event":"serving".*"port":\([0-9]*\).*/\1/p' "$log")
  [ -n "$port" ] && break
  kill -0 "$server" 2>/dev/null || fail "the server did not start" "$log"
  sleep 0.1
done
[ -n "$port" ] || fail "the server is not ready after 5 minutes" "$log"

"$build/bin/qwend-client" generate "$question" --server="127.0.0.1:$port" --wait=10 --temperature=0 \
  --max_tokens=400 || fail "no answer" "$log"

kill -TERM "$server"
code=0
wait "$server" || code=$?
server=""
[ "$code" = 0 ] || fail "the server ended with exit code $code" "$log"
step "server stopped cleanly"
