#!/bin/bash
# Builds the kernels and their GPU test with nothing but nvcc, g++, GoogleTest and Highway (from .gpu/, see pack.sh), on
# a GPU machine that has none of the service's other dependencies, and runs it. Everything goes to /tmp/qwend-kernels.
#   tests/gpu/kernels_only.sh [GTEST_FILTER]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=/tmp/qwend-kernels
mkdir -p $out
include="-I. -I.gpu/include -I/usr/local/cuda/include"
compile() {
  local source=$1 object=$out/$(echo "$1" | tr / _).o
  [ "$object" -nt "$source" ] && return
  case "$source" in
    *.cu) nvcc -std=c++20 -O3 -lineinfo $include -gencode=arch=compute_90a,code=sm_90a -c "$source" -o "$object" ;;
    *) g++ -std=c++20 -O2 -ffp-contract=off -DQWEND_HAS_CUDA $include -c "$source" -o "$object" ;;
  esac
}
export -f compile
export out include
ls kernels/*.cc kernels/cpu/*.cc kernels/cuda/*.cc kernels/cuda/*.cu tests/gpu/cuda_ops_test.cc tests/gpu/twin.cc |
  xargs -P "$(nproc)" -I{} bash -c 'compile {}'
g++ $out/*.o -o $out/cuda_ops_test -L.gpu/lib -lgtest -lgtest_main -lhwy -L/usr/local/cuda/lib64 -lcudart_static -ldl -lrt -lpthread
LD_LIBRARY_PATH=.gpu/lib timeout 240 $out/cuda_ops_test --gtest_filter="${1:-*}"
