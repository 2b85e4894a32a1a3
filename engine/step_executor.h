// What the scheduler asks of a model: prefill a chunk, decode a batch. Implemented by ModelRunner,
// and by fakes in tests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"

namespace qwend {

// One sequence as the executor sees it. Owned by the scheduler; pages cover at least every position
// written so far.
struct SequenceView {
  std::span<const int32_t> pages;  // page of each 64 positions
  int state_slot = 0;
};

struct PrefillChunk {
  SequenceView sequence;
  std::span<const int32_t> tokens;  // at least one, at most max_prefill_tokens()
  int start_position = 0;           // 0: the state slot is zeroed first
  bool sample = false;              // the prompt's last chunk: sample the token after it
  SamplingRow sampling;
};

struct DecodeRow {
  SequenceView sequence;
  int32_t token = 0;  // the newest token, not yet in the cache
  int position = 0;   // and its position
  SamplingRow sampling;
};

// Thread: the engine thread. Errors: throws DeviceError; the engine then closes every request.
class StepExecutor {
 public:
  virtual ~StepExecutor() = default;
  virtual int max_prefill_tokens() const = 0;
  virtual int max_decode_rows() const = 0;
  // The sampled token, kInvalidToken for non-finite logits, or 0 when !chunk.sample.
  virtual int32_t Prefill(const PrefillChunk& chunk) = 0;
  // One token per row, in order (kInvalidToken as above). Valid until the next call.
  virtual std::span<const int32_t> Decode(std::span<const DecodeRow> rows) = 0;
};

}  // namespace qwend
