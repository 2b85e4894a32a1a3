#!/bin/sh
# Installs what qwend needs from Debian 12's (or a later Debian's, or Ubuntu's) own packages.
#   deploy/install-deps.sh         what building and running needs
#   deploy/install-deps.sh --test  what the tests need besides
# Packages that are there already are left alone; with all of them there, nothing is touched.
set -eu

build="cmake ninja-build g++ ccache pkg-config
  libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libabsl-dev libspdlog-dev
  prometheus-cpp-dev nlohmann-json3-dev libpcre2-dev libutf8proc-dev libhwy-dev libssl-dev"
tests="libgtest-dev libgmock-dev libbenchmark-dev git python3 python3-grpcio python3-protobuf
  clang-format clang-tidy openssl"

case "${1:-}" in
  "") wanted="$build" ;;
  --test) wanted="$build $tests" ;;
  *) echo "usage: deploy/install-deps.sh [--test]" >&2; exit 2 ;;
esac

if ! command -v dpkg-query >/dev/null; then
  echo "install-deps: this is not Debian or Ubuntu. Install by hand: $(echo $wanted)" >&2
  exit 1
fi
missing=""
for package in $wanted; do
  state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

root=""
if [ "$(id -u)" != 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "install-deps: not root, and there is no sudo. As root, run:" >&2
    echo "  apt-get update && apt-get install --no-install-recommends$missing" >&2
    exit 1
  fi
  root="sudo"
fi
echo "install-deps: installing$missing" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { $root apt-get update -q &&
       $root env DEBIAN_FRONTEND=noninteractive \
         apt-get install -q -y --no-install-recommends $missing; } >"$log" 2>&1 </dev/null; then
  tail -n 20 "$log" >&2
  echo "install-deps: apt-get failed; the lines above say why" >&2
  exit 1
fi
