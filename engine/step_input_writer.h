// Writes what a step reads: checks it, lays it out in the host's image of the inputs, and copies
// the image to the device in one go.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/step_buffers.h"
#include "engine/step_executor.h"
#include "kernels/backend.h"

namespace qwend {

// Throws std::invalid_argument for rows, positions, pages, slots or ids outside what the sizes
// allow.
class StepInputWriter {
 public:
  StepInputWriter(Backend& backend, int vocab_size, const StepSizes& sizes,
                  const Workspace& workspace);

  // One sequence's chunk. Returns where the step finds it on the device.
  StepInputs Prefill(const PrefillChunk& chunk);

  // Rows beyond the real ones, up to the bucket, are sequences of their own in the dummy page and
  // slot. With `tokens_on_device` the ids stay as the step before left them. Returns the mean
  // length.
  double Decode(std::span<const DecodeRow> rows, int bucket, bool tokens_on_device);

  // A decode of `bucket` rows that belong to nobody, each at the end of up to 1,024 positions: they
  // read the pool's first pages and write the dummy page and slot alone.
  void Rehearse(int bucket);

 private:
  void SetSequence(const StepInputs& host, int s, const SequenceView& sequence, int last_position,
                   const SamplingRow& sampling) const;
  void SetRow(const StepInputs& host, int row, int sequence, int32_t token, int position) const;

  Backend& backend_;
  const int vocab_size_;
  const StepSizes& sizes_;
  void* const device_;
  std::unique_ptr<int64_t[]> host_;
};

}  // namespace qwend
