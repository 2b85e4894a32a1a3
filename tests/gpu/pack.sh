#!/bin/bash
# Gathers in .gpu/ (ignored by git) what a GPU machine without the build dependencies needs: the binaries of a build
# folder, stripped, and every shared library they use that is not part of glibc or the compiler's run time.
#   tests/gpu/pack.sh [BUILD_FOLDER]      and there: tar xzf .gpu/pack.tgz; tests/gpu/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${1:-build}
[ $# -le 1 ] || { echo "usage: tests/gpu/pack.sh [BUILD_FOLDER], one folder at most" >&2; exit 2; }
[ -d "$build/bin" ] || { echo "usage: tests/gpu/pack.sh [BUILD_FOLDER], from the repository's root; '$build' is none" >&2; exit 2; }
[ -f "$build/kernels/cuda/libqwend_cuda.a" ] ||
  { echo "pack.sh: $build was built without CUDA, or not yet" >&2; exit 1; }
rm -rf .gpu/bin .gpu/lib .gpu/pack.tgz
mkdir -p .gpu/bin .gpu/lib
cmake --build "$build" --target model_probe_racecheck >/dev/null
for name in qwend qwend-client qwend-bench model_probe model_probe_racecheck cuda_ops_test fused_ops_test cuda_model_test; do
  [ -x "$build/bin/$name" ] || { echo "pack.sh: no $build/bin/$name yet; build all of it" >&2; exit 1; }
  strip -o ".gpu/bin/$name" "$build/bin/$name"
  ldd "$build/bin/$name" | awk '$3 ~ /^\// {print $3}'
done | sort -u | grep -Ev '/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libresolv)\.so' |
  while read -r library; do cp -uL "$library" .gpu/lib/; done
tar -czf .gpu/pack.tgz .gpu/bin .gpu/lib
du -h .gpu/pack.tgz | sed 's/^/pack.sh: /'
