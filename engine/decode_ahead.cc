#include "engine/decode_ahead.h"

#include <algorithm>
#include <utility>

#include "kernels/tensor.h"

namespace qwend {

std::vector<int32_t> DecodeAhead::Decode(std::span<const DecodeRow> rows) {
  const auto same = [](const Expected& e, const DecodeRow& row) {
    return e.slot == row.sequence.state_slot && e.position == row.position;
  };
  if (inputs_stand_ && std::equal(ahead_.begin(), ahead_.end(), rows.begin(), rows.end(), same) &&
      std::all_of(rows.begin(), rows.end(),
                  [&](const auto& row) { return HasPlace(row) && IsKnown(row); })) {
    for (size_t i = 0; i < rows.size(); ++i) RequireToken(ahead_[i], rows[i]);
    QueueNext(rows, {}, /*tokens_on_device=*/true);
    std::vector<int32_t> tokens = queue_.Collect();
    for (size_t i = 0; i < rows.size(); ++i) ahead_[i].token = tokens[i];
    return tokens;
  }

  CollectAhead();
  std::vector<int32_t> tokens(rows.size());
  std::vector<DecodeRow> late;
  std::vector<size_t> late_at;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto done = finished_.find(rows[i].sequence.state_slot);
    if (done != finished_.end() && same(done->second.row, rows[i])) {
      RequireToken(done->second.row, rows[i]);
      tokens[i] = done->second.next;
      finished_.erase(done);
    } else {
      late.push_back(rows[i]);
      late_at.push_back(i);
    }
  }
  if (!late.empty()) {
    queue_.Launch(late, /*tokens_on_device=*/false);
    const std::vector<int32_t> sampled = queue_.Collect();
    for (size_t i = 0; i < late.size(); ++i) tokens[late_at[i]] = sampled[i];
  }
  // Where prompts run, the next turn brings a row that would be late.
  if (!std::exchange(prompts_run_, false)) QueueNext(rows, tokens, /*tokens_on_device=*/false);
  return tokens;
}

void DecodeAhead::BeforePrefill(int slot, bool starts) {
  inputs_stand_ = false;
  prompts_run_ = true;
  if (!starts) return;
  finished_.erase(slot);
  for (Expected& row : ahead_) {
    if (row.slot == slot) row.position = -1;  // nobody will ask for it
  }
}

bool DecodeAhead::HasPlace(const DecodeRow& row) const {
  const int next = row.position + 1;
  return next < max_context_ && next / kPageTokens < static_cast<int>(row.sequence.pages.size());
}

bool DecodeAhead::IsKnown(const DecodeRow& row) {
  return row.sampling.num_banned == 0 && row.sampling.keep_logits == 0;
}

void DecodeAhead::QueueNext(std::span<const DecodeRow> rows, std::span<const int32_t> tokens,
                            bool tokens_on_device) {
  std::vector<DecodeRow> next;
  ahead_.clear();
  for (size_t i = 0; i < rows.size(); ++i) {
    const int32_t token = tokens_on_device ? 0 : tokens[i];
    if (token == kInvalidToken || !HasPlace(rows[i])) continue;
    if (!IsKnown(rows[i])) {
      ahead_.clear();
      next.clear();
      break;
    }
    DecodeRow row = rows[i];
    row.token = token;
    ++row.position;
    ++row.sampling.position;
    ahead_.push_back(
        {.slot = row.sequence.state_slot, .position = row.position, .token = row.token});
    next.push_back(row);
  }
  inputs_stand_ = !next.empty();
  if (!next.empty()) queue_.Launch(next, tokens_on_device);
}

void DecodeAhead::CollectAhead() {
  if (ahead_.empty()) return;
  const std::vector<int32_t> tokens = queue_.Collect();
  for (size_t i = 0; i < ahead_.size(); ++i) {
    if (ahead_[i].position < 0) continue;
    finished_[ahead_[i].slot] = {.row = ahead_[i], .next = tokens[i]};
  }
  ahead_.clear();
  inputs_stand_ = false;
}

void DecodeAhead::RequireToken(const Expected& expected, const DecodeRow& row) {
  Require(expected.token == row.token, "Decode: slot ", expected.slot, " continues with token ",
          row.token, " at position ", row.position, " where ", expected.token, " was sampled");
}

}  // namespace qwend
