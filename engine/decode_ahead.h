// Keeps the device one decode step ahead of its caller: when a step's tokens are asked for, the
// next step of the same sequences is queued first, fed by the tokens that the sampler left on the
// device. The caller sees the tokens that plain decoding gives, only sooner.
//
// A step that was queued ahead has moved a sequence's recurrent state on, so its token is kept
// until the sequence asks for it or its slot starts another prompt; it is never computed twice.
// Sequences that came late are decoded beside it (a row's bits do not depend on its neighbours),
// and a sequence that has ended leaves one token that nobody takes.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "engine/step_executor.h"

namespace qwend {

// The steps themselves. At most two are queued and not yet collected.
class StepQueue {
 public:
  virtual ~StepQueue() = default;
  // Queues a decode step. With `tokens_on_device` the rows' tokens are those that the last queued
  // step samples, row by row; DecodeRow::token is then not read.
  virtual void Launch(std::span<const DecodeRow> rows, bool tokens_on_device) = 0;
  // The tokens of the oldest step that is not collected yet; waits for them.
  virtual std::vector<int32_t> Collect() = 0;
};

// Thread: the engine thread.
class DecodeAhead {
 public:
  DecodeAhead(StepQueue& queue, int max_context) : queue_(queue), max_context_(max_context) {}

  // One token per row. std::invalid_argument when a row does not continue with the token that its
  // last step sampled.
  std::vector<int32_t> Decode(std::span<const DecodeRow> rows);

  // A prompt's chunk is about to run: the device's inputs are no longer those of the last step, and
  // a slot that starts a prompt has no token waiting.
  void BeforePrefill(int slot, bool starts);

 private:
  // A row of a step that was queued ahead.
  struct Expected {
    int slot = 0;
    int position = 0;
    int32_t token = 0;  // that the step reads
  };
  struct Finished {
    Expected row;
    int32_t next = 0;  // the token that it sampled
  };

  // Whether the row's next position has a place in the cache; a sequence without one has ended.
  bool HasPlace(const DecodeRow& row) const;
  // Whether its next step is known before the caller asks for it: no ids are banned for a while,
  // and nobody wants to see this step's logits.
  static bool IsKnown(const DecodeRow& row);
  // Queues the next step of all rows that go on, or nothing when one of them is not known: parting
  // them would cost a second pass over the weights each turn.
  void QueueNext(std::span<const DecodeRow> rows, std::span<const int32_t> tokens,
                 bool tokens_on_device);
  void CollectAhead();
  static void RequireToken(const Expected& expected, const DecodeRow& row);

  StepQueue& queue_;
  const int max_context_;
  bool prompts_run_ = false;          // since the last Decode
  std::vector<Expected> ahead_;       // the step that is queued ahead; empty: none
  bool inputs_stand_ = false;         // nothing has run on the device since it was queued
  std::map<int, Finished> finished_;  // by slot: collected, not yet asked for
};

}  // namespace qwend
