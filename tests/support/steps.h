// The sequences of a step for tests: pages and slots in shuffled order.
#pragma once

#include <vector>

#include "kernels/ops.h"
#include "tests/support/tensors.h"

namespace qwend::test {

struct SequenceSpec {
  int past = 0;  // positions already in the cache
  int rows = 1;  // rows of this step
};

// Owns what a StepSequences views, and the slots and lengths that CacheMask would write.
struct Step {
  Step(Rng& rng, const std::vector<SequenceSpec>& specs);

  StepSequences Sequences() const;

  int rows = 0;
  int num_pages = 0;    // of the pool; more than are in use
  int num_slots = 0;    // of the state pool; more than are in use
  int max_context = 0;  // positions that the block table covers
  TestTensor query_start, row_sequence, positions, block_table, state_slot;
  TestTensor slots, lengths;
};

}  // namespace qwend::test
