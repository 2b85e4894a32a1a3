#include "fake_executor.h"

#include <algorithm>
#include <set>

namespace qwend {

int32_t FakeToken(std::span<const int32_t> history, const SamplingRow& sampling, int vocab) {
  uint64_t hash = 1469598103934665603u;
  const auto mix = [&](uint64_t value) {
    hash = (hash ^ value) * 1099511628211u;
    hash ^= hash >> 29;
  };
  for (int32_t token : history) mix(static_cast<uint64_t>(token));
  if (sampling.temperature > 0) {
    mix(sampling.seed);
    mix(static_cast<uint64_t>(sampling.position));
  }
  const std::span banned(sampling.banned, sampling.num_banned);
  for (;; mix(1)) {
    const auto token = static_cast<int32_t>(hash % vocab);
    if (std::find(banned.begin(), banned.end(), token) == banned.end()) return token;
  }
}

FakeAnswer ExpectedAnswer(const GenerationRequest& request, std::span<const int32_t> eos,
                          int vocab) {
  FakeAnswer answer;
  std::vector<int32_t> history = request.prompt;
  const auto in = [](int32_t token, std::span<const int32_t> ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  while (true) {
    SamplingRow row{.temperature = request.sampling.temperature,
                    .seed = request.sampling.seed,
                    .position = static_cast<int32_t>(history.size())};
    if (static_cast<int>(answer.tokens.size()) < request.min_tokens) {
      for (int32_t id : request.stop_token_ids) row.banned[row.num_banned++] = id;
      for (int32_t id : eos) {
        if (!request.ignore_eos) row.banned[row.num_banned++] = id;
      }
    }
    const int32_t token = FakeToken(history, row, vocab);
    history.push_back(token);
    answer.tokens.push_back(token);
    if (!request.ignore_eos && in(token, eos)) {
      answer.reason = CloseReason::kEos;
    } else if (in(token, request.stop_token_ids)) {
      answer.reason = CloseReason::kStopToken;
    } else if (static_cast<int>(answer.tokens.size()) == request.max_tokens) {
      answer.reason = CloseReason::kLength;
    } else {
      continue;
    }
    return answer;
  }
}

std::unique_ptr<StepExecutor> Borrow(FakeExecutor& fake) {
  class Borrowed final : public StepExecutor {
   public:
    explicit Borrowed(FakeExecutor& fake) : fake_(fake) {}
    int max_prefill_tokens() const override { return fake_.max_prefill_tokens(); }
    int max_decode_rows() const override { return fake_.max_decode_rows(); }
    int32_t Prefill(const PrefillChunk& chunk) override { return fake_.Prefill(chunk); }
    std::span<const int32_t> Decode(std::span<const DecodeRow> rows) override {
      return fake_.Decode(rows);
    }

   private:
    FakeExecutor& fake_;
  };
  return std::make_unique<Borrowed>(fake);
}

FakeExecutor::FakeExecutor(const FakeOptions& options)
    : options_(options),
      pages_(options.pages, std::vector<int32_t>(kPageTokens, -7)),
      slots_(options.slots) {}

void FakeExecutor::Check(bool ok, const std::string& what) {
  if (!ok) violations.push_back(what);
}

std::vector<int32_t> FakeExecutor::Append(const SequenceView& sequence, int position,
                                          std::span<const int32_t> tokens) {
  if (sequence.state_slot < 0 || sequence.state_slot >= options_.slots) {
    violations.push_back("slot " + std::to_string(sequence.state_slot));
    return {0};
  }
  std::vector<int32_t>& state = slots_[sequence.state_slot];
  if (position == 0) state.clear();
  const int end = position + static_cast<int>(tokens.size());
  Check(static_cast<int>(state.size()) == position,
        "position " + std::to_string(position) + " after " + std::to_string(state.size()));
  Check(static_cast<int>(sequence.pages.size()) * kPageTokens >= end,
        std::to_string(sequence.pages.size()) + " pages for " + std::to_string(end));
  for (int32_t page : sequence.pages) {
    Check(page >= 0 && page < options_.pages, "page " + std::to_string(page));
  }
  if (!violations.empty()) return {0};
  state.insert(state.end(), tokens.begin(), tokens.end());
  for (int i = position; i < end; ++i) {
    pages_[sequence.pages[i / kPageTokens]][i % kPageTokens] = tokens[i - position];
  }
  std::vector<int32_t> history(end);
  for (int i = 0; i < end; ++i) {
    history[i] = pages_[sequence.pages[i / kPageTokens]][i % kPageTokens];
  }
  Check(history == state, "pages and slot disagree at position " + std::to_string(position));
  return history;
}

int32_t FakeExecutor::Sample(std::span<const int32_t> history, const SamplingRow& sampling) {
  Check(sampling.position == static_cast<int>(history.size()),
        "samples position " + std::to_string(sampling.position) + " after " +
            std::to_string(history.size()));
  if (token_function) return token_function(history, sampling);
  return FakeToken(history, sampling, options_.vocab);
}

int32_t FakeExecutor::Prefill(const PrefillChunk& chunk) {
  if (before_prefill) before_prefill(chunk);
  const int size = static_cast<int>(chunk.tokens.size());
  calls.push_back({.prefill = true, .start = chunk.start_position, .size = size});
  Check(size >= 1 && size <= options_.prefill_chunk, "chunk of " + std::to_string(size));
  Check(chunk.start_position % options_.prefill_chunk == 0, "chunk is not aligned");
  Check(chunk.sample || size == options_.prefill_chunk, "short chunk before the last");
  const auto history = Append(chunk.sequence, chunk.start_position, chunk.tokens);
  return chunk.sample ? Sample(history, chunk.sampling) : 0;
}

std::span<const int32_t> FakeExecutor::Decode(std::span<const DecodeRow> rows) {
  if (before_decode) before_decode(rows);
  calls.push_back({.prefill = false, .start = 0, .size = static_cast<int>(rows.size())});
  Check(!rows.empty() && static_cast<int>(rows.size()) <= options_.max_rows,
        "decode of " + std::to_string(rows.size()) + " rows");
  std::set<int32_t> pages;
  std::set<int> slots;
  sampled_.clear();
  for (const DecodeRow& row : rows) {
    Check(slots.insert(row.sequence.state_slot).second, "two rows share a slot");
    for (int32_t page : row.sequence.pages) {
      Check(pages.insert(page).second, "two rows share page " + std::to_string(page));
    }
    Check(row.position > 0, "decode at position 0");
    const auto history = Append(row.sequence, row.position, {&row.token, 1});
    sampled_.push_back(Sample(history, row.sampling));
  }
  return sampled_;
}

}  // namespace qwend
