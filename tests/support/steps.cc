#include "tests/support/steps.h"

#include <algorithm>
#include <numeric>

namespace qwend::test {

Step::Step(Rng& rng, const std::vector<SequenceSpec>& specs) {
  std::vector<double> starts = {0}, sequence_of, position_of, length_of;
  int max_pages = 1;
  for (size_t s = 0; s < specs.size(); ++s) {
    const int end = specs[s].past + specs[s].rows;
    max_pages = std::max(max_pages, (end + kPageTokens - 1) / kPageTokens);
    for (int position = specs[s].past; position < end; ++position) {
      sequence_of.push_back(static_cast<double>(s));
      position_of.push_back(position);
      length_of.push_back(position + 1);
    }
    starts.push_back(static_cast<double>(position_of.size()));
  }
  const int sequences = static_cast<int>(specs.size());
  rows = static_cast<int>(position_of.size());
  max_context = max_pages * kPageTokens;
  num_pages = sequences * max_pages + 3;
  num_slots = sequences + 2;

  std::vector<double> pages(num_pages), state_slots(num_slots);
  std::iota(pages.begin(), pages.end(), 0);
  std::iota(state_slots.begin(), state_slots.end(), 0);
  std::shuffle(pages.begin(), pages.end(), rng.engine());
  std::shuffle(state_slots.begin(), state_slots.end(), rng.engine());

  std::vector<double> slot_of;
  for (int t = 0; t < rows; ++t) {
    const int position = static_cast<int>(position_of[t]);
    const int entry = static_cast<int>(sequence_of[t]) * max_pages + position / kPageTokens;
    slot_of.push_back(pages[entry] * kPageTokens + position % kPageTokens);
  }

  query_start = TestTensor(DType::kI32, {sequences + 1}).Values(starts);
  row_sequence = TestTensor(DType::kI32, {rows}).Values(sequence_of);
  positions = TestTensor(DType::kI32, {rows}).Values(position_of);
  block_table = TestTensor(DType::kI32, {sequences, max_pages}, 2).Values(pages);
  state_slot = TestTensor(DType::kI32, {sequences}).Values(state_slots);
  slots = TestTensor(DType::kI32, {rows}).Values(slot_of);
  lengths = TestTensor(DType::kI32, {rows}).Values(length_of);
}

StepSequences Step::Sequences() const {
  return {.query_start = query_start,
          .row_sequence = row_sequence,
          .positions = positions,
          .block_table = block_table,
          .state_slot = state_slot};
}

}  // namespace qwend::test
