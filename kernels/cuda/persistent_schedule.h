// A decode step's operators laid out for the persistent kernel: who computes what, and in which
// order the weights arrive.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/cuda/persistent_step.h"
#include "kernels/ops.h"

namespace qwend::cuda {

// The tables that StepArguments points to, still in host memory, and the arguments themselves,
// whose pointers to tables are unset. Rows are those of the whole step.
struct StepSchedule {
  StepArguments arguments;
  std::vector<StepLayer> layers;
  std::vector<CUtensorMap> maps;
  std::vector<CopyCommand> commands;
  std::vector<int> first_command;
  std::vector<int> first_head_tile;
  ops::TokenSampler sampler;
};

// The fused plan's decode list as a schedule, or nothing and the reason. `clusters` of kRanks
// blocks share the work; 0 asks only whether the list can be one, and makes no tables.
std::optional<StepSchedule> MakeStepSchedule(std::span<const OpCall> calls, int clusters,
                                             std::string& why_not);

}  // namespace qwend::cuda
