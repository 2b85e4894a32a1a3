#include "kernels/cuda/prefetch_plan.h"

#include <algorithm>
#include <cstdlib>

namespace qwend::cuda {
namespace {

int64_t Ahead() {
  static const int64_t bytes = [] {
    const char* mb = std::getenv("QWEND_AHEAD_MB");
    return mb ? int64_t{std::atoi(mb)} << 20 : int64_t{24} << 20;
  }();
  return bytes;
}
constexpr int64_t kMaxGap = 64 << 10;  // between weights that are fetched as one span

// The smallest span that holds both; their gap must be small.
Span Join(const Span& a, const Span& b) {
  if (a.bytes == 0) return b;
  if (b.bytes == 0) return a;
  const char* begin = std::min(a.data, b.data);
  const char* end = std::max(a.data + a.bytes, b.data + b.bytes);
  return {begin, end - begin};
}

bool Adjacent(const Span& a, const Span& b) {
  return a.bytes == 0 || b.bytes == 0 || Join(a, b).bytes <= a.bytes + b.bytes + kMaxGap;
}

// The projections of a fused operator.
Span WeightsOf(const Op& op) {
  Span span;
  const auto add = [&](const auto& part) {
    if constexpr (std::is_same_v<std::decay_t<decltype(part)>, ops::Gemv>) {
      const Span weight{part.weight.template As<const char>(), part.weight.bytes()};
      if (Adjacent(span, weight)) span = Join(span, weight);
    }
  };
  std::visit(
      [&](const auto& o) {
        if constexpr (FusedOp<std::decay_t<decltype(o)>>) ForEachPart(o, add);
      },
      op);
  return span;
}

}  // namespace

std::vector<Span> PlanPrefetches(std::span<const OpCall> calls) {
  std::vector<Span> asked(calls.size());
  if (calls.empty()) return asked;
  size_t by = calls.size() - 1;  // the kernel that asks next: first the last of the step before
  bool before = true;            // `by` is still that one
  int64_t waiting = 0;           // asked for, not yet read, when `by` has asked
  std::vector<int64_t> counted(calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    const Span weights = WeightsOf(calls[i].op);
    if (weights.bytes == 0) continue;
    const int64_t bytes = std::min(weights.bytes, Ahead());
    const auto next = [&] {  // the following kernel asks; what it reads itself is no longer waiting
      by = before ? 0 : by + 1;
      before = false;
      waiting -= counted[by];
    };
    while ((before || by + 1 < i) &&
           (waiting + bytes > Ahead() || !Adjacent(asked[by], {weights.data, bytes}))) {
      next();
    }
    if (!before && by >= i) continue;
    if (waiting + bytes > Ahead() || !Adjacent(asked[by], {weights.data, bytes})) continue;
    asked[by] = Join(asked[by], {weights.data, bytes});
    counted[i] = bytes;
    waiting += bytes;
  }
  return asked;
}

}  // namespace qwend::cuda
