// A StepExecutor whose "model" is a hash of the whole history, kept in pages and slots as a real
// one keeps its caches. Whatever the scheduler does wrong with pages, slots, positions or chunks
// becomes a violation or another token.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "engine/step_executor.h"

namespace qwend {

struct FakeOptions {
  int pages = 64;
  int slots = 16;
  int prefill_chunk = 64;
  int max_rows = 16;
  int vocab = 100;
};

// What the fake model gives after `history`; `seed` counts only when temperature is above 0.
int32_t FakeToken(std::span<const int32_t> history, const SamplingRow& sampling, int vocab);

class FakeExecutor final : public StepExecutor {
 public:
  struct Call {
    bool prefill = false;
    int start = 0;  // of a prefill chunk
    int size = 0;   // tokens of the chunk, or rows of the decode
    bool operator==(const Call&) const = default;
  };
  using TokenFunction =
      std::function<int32_t(std::span<const int32_t> history, const SamplingRow& sampling)>;

  explicit FakeExecutor(const FakeOptions& options);

  int max_prefill_tokens() const override { return options_.prefill_chunk; }
  int max_decode_rows() const override { return options_.max_rows; }
  int32_t Prefill(const PrefillChunk& chunk) override;
  std::span<const int32_t> Decode(std::span<const DecodeRow> rows) override;

  // Set before the first call. Each may throw, as a device does.
  TokenFunction token_function;
  std::function<void(const PrefillChunk&)> before_prefill;
  std::function<void(std::span<const DecodeRow>)> before_decode;

  // Read when no call is in progress.
  std::vector<Call> calls;
  std::vector<std::string> violations;

 private:
  // The sequence's tokens so far, as pages and slot have them, with `token` at `position` added.
  std::vector<int32_t> Append(const SequenceView& sequence, int position,
                              std::span<const int32_t> tokens);
  int32_t Sample(std::span<const int32_t> history, const SamplingRow& sampling);
  void Check(bool ok, const std::string& what);

  FakeOptions options_;
  std::vector<std::vector<int32_t>> pages_;  // tokens of each page
  std::vector<std::vector<int32_t>> slots_;  // history of each slot
  std::vector<int32_t> sampled_;
};

// An executor for an engine to own, whose calls go to `fake`.
std::unique_ptr<StepExecutor> Borrow(FakeExecutor& fake);

// What a request alone must give.
struct FakeAnswer {
  std::vector<int32_t> tokens;
  CloseReason reason = CloseReason::kLength;
};
FakeAnswer ExpectedAnswer(const GenerationRequest& request, std::span<const int32_t> eos,
                          int vocab);

}  // namespace qwend
