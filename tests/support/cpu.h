// Runs one operator on the CPU backend's kernels, checked as a list would check it.
#pragma once

#include "kernels/cpu/cpu_ops.h"
#include "kernels/op_check.h"

namespace qwend::test {

template <typename T>
void RunCpu(const T& op, int threads = 1) {
  static cpu::ThreadPool alone(1), several(3);
  CheckOp({.op = op, .tag = "test"});
  cpu::Run(op, cpu::LaunchContext{threads == 1 ? alone : several});
}

}  // namespace qwend::test
