// A model laid out for the persistent kernel: who computes what, and in which order the weights
// arrive.
#pragma once

#include <vector>

#include "kernels/cuda/persistent_model.h"

namespace qwend::cuda {

// What a tensor map is of: a weight, in boxes of `rows` rows and `k_blocks` * 64 columns; or, with
// `k_blocks` zero, a recurrent state, [slots, heads, rows, columns], in boxes of one rank's columns
// of a head.
struct BoxMap {
  TensorView tensor;
  int rows = 0, k_blocks = 0;
};

// The tables that StepArguments points to, still in host memory, and the arguments themselves,
// whose pointers to tables are unset. Rows are those of the whole step. Nothing of it needs a
// device.
struct StepSchedule {
  StepArguments arguments;
  std::vector<StepLayer> layers;
  std::vector<BoxMap> maps;  // commands count them in this order
  std::vector<CopyCommand> commands;
  std::vector<int> first_command;
  std::vector<int> first_head_tile;
  ops::TokenSampler sampler;
};

// `clusters` of kRanks blocks share the work, in passes of `pass_rows` rows: 8, or fewer. Throws
// Refusal where a share does not fit.
StepSchedule MakeStepSchedule(StepModel model, int clusters, int pass_rows);

}  // namespace qwend::cuda
