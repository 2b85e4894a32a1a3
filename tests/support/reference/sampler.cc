#include <algorithm>
#include <cmath>

#include "tests/support/reference/reference.h"
#include "tests/support/tensors.h"

namespace qwend::reference {

std::vector<std::pair<int, double>> Candidates(const TensorView& logits, int64_t row,
                                               int vocab_limit, const SamplingRow& params) {
  for (int64_t i = 0; i < logits.cols(); ++i) {
    const double x = test::At(logits, row, i);
    if (std::isnan(x) || x == HUGE_VAL) return {};
  }
  std::vector<std::pair<int, double>> all;
  for (int id = 0; id < vocab_limit; ++id) {
    const int32_t* banned_end = params.banned + params.num_banned;
    const bool banned = std::find(params.banned, banned_end, id) != banned_end;
    const double x = test::At(logits, row, id);
    if (!banned && x != -HUGE_VAL) all.emplace_back(id, x);
  }
  if (all.empty()) return {};
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  if (params.temperature == 0) {
    all.resize(1);
    all[0].second = 1;
    return all;
  }
  if (params.top_k > 0 && params.top_k < static_cast<int>(all.size())) all.resize(params.top_k);
  const double top = all[0].second;
  double sum = 0;
  for (auto& [id, x] : all) {
    x = std::exp((x - top) / static_cast<double>(params.temperature));
    sum += x;
  }
  size_t keep = 0;
  double mass = 0;
  while (keep < all.size()) {
    mass += all[keep++].second;
    if (params.top_p < 1 && mass >= static_cast<double>(params.top_p) * sum) break;
  }
  while (keep > 1 && all[keep - 1].second < static_cast<double>(params.min_p)) --keep;
  all.resize(keep);
  sum = 0;
  for (const auto& [id, x] : all) sum += x;
  for (auto& [id, x] : all) x /= sum;
  return all;
}

}  // namespace qwend::reference
