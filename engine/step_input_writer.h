// Writes what a step reads: checks it and lays it out in the host's image of the inputs, which goes
// to the device in one go.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/step_buffers.h"
#include "engine/step_executor.h"
#include "kernels/backend.h"

namespace qwend {

// A step's inputs, bytes [begin, end) of an image of all. Stay until the writer's next call.
struct WrittenInputs {
  const void* image = nullptr;
  int64_t begin = 0, end = 0;
  double mean_length = 0;  // of the real rows' sequences
};

// Throws std::invalid_argument for rows, positions, pages, slots or ids outside what the sizes
// allow.
class StepInputWriter {
 public:
  StepInputWriter(Backend& backend, int vocab_size, const StepSizes& sizes,
                  const Workspace& workspace);

  // One sequence's chunk, copied to the device. Returns where the step finds it there.
  StepInputs Prefill(const PrefillChunk& chunk);

  // For the caller to send. Rows beyond the real ones, up to the bucket, are sequences of their own
  // in the dummy page and slot. With `tokens_on_device` the ids are left out and stay as the step
  // before left them.
  WrittenInputs Decode(std::span<const DecodeRow> rows, int bucket, bool tokens_on_device);
  // Sends them by a copy, in order with the steps.
  void CopyToDevice(const WrittenInputs& inputs);

  // A decode of `bucket` rows that belong to nobody, each at the end of up to 1,024 positions,
  // copied to the device: they read the pool's first pages and write the dummy page and slot alone.
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
