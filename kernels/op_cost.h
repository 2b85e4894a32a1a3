// What an operator must move and compute at least: each input read once, each output written once.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace qwend {

struct OpCost {
  double bytes = 0;
  double flops = 0;
};

// `mean_length`: the positions a row's attention sees on average in the step being costed; `rows`:
// its real rows, when the operator was built for more (0: all of them).
OpCost CostOf(const Op& op, double mean_length, int64_t rows = 0);

}  // namespace qwend
