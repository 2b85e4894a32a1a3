// TokenSampler. A first pass over the row takes the maximum of each block of 256 logits and looks
// for NaN and +inf; whatever follows looks only into blocks that can matter.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/simd_targets.h"
#include "kernels/philox.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sampling.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {

// Whether all n numbers are finite or -inf.
bool AllBelowInfinity(const float* x, int64_t n) {
  const FloatTag d;
  const FloatVec infinity = hn::Set(d, HUGE_VALF);
  int64_t i = 0;
  auto below = hn::Eq(infinity, infinity);
  for (; i + kLanes <= n; i += kLanes) {
    below = hn::And(below, hn::Lt(hn::LoadU(d, x + i), infinity));
  }
  bool all = hn::AllTrue(d, below);
  for (; i < n; ++i) all = all && x[i] < HUGE_VALF;
  return all;
}

// The maximum of n numbers, -inf of none. NaN must have been ruled out.
float MaxOf(const float* x, int64_t n) {
  F16 max = Splat(-HUGE_VALF);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) max = Max(max, Load(x + i));
  float top = MaxLane(max);
  for (; i < n; ++i) top = std::max(top, x[i]);
  return top;
}

// sum of e^((x - top) * inverse_temperature) over n numbers.
float SumOfWeights(const float* x, int64_t n, float top, float inverse_temperature) {
  F16 sum = Zero();
  const F16 shift = Splat(top);
  const F16 scale = Splat(inverse_temperature);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) sum = Add(sum, Exp(Mul(Sub(Load(x + i), shift), scale)));
  float total = Sum(sum);
  for (; i < n; ++i) total += std::exp((x[i] - top) * inverse_temperature);
  return total;
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(AllBelowInfinity);
HWY_EXPORT(MaxOf);
HWY_EXPORT(SumOfWeights);

constexpr int64_t kBlock = 256;

struct Candidate {
  float logit;
  int32_t id;
};
// The order of candidates: the larger logit first, the lower id on a tie.
bool Before(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// One row of logits without what may not be sampled.
class Row {
 public:
  // `logits`: [limit]. Banned ids become -inf; the row may be this thread's copy or the operator's
  // own memory, so they are put back when the Row ends.
  Row(float* logits, int64_t limit, const SamplingRow& params) : logits_(logits), limit_(limit) {
    for (int32_t i = 0; i < params.num_banned; ++i) {
      const int32_t id = params.banned[i];
      if (id < 0 || id >= limit) continue;
      banned_[num_banned_++] = {logits[id], id};
      logits[id] = -HUGE_VALF;
    }
    thread_local std::vector<float> block_max;
    block_max.resize((limit + kBlock - 1) / kBlock);
    for (size_t b = 0; b < block_max.size(); ++b) {
      block_max[b] = HWY_DYNAMIC_DISPATCH(MaxOf)(logits + b * kBlock, BlockSize(b));
    }
    block_max_ = block_max.data();
    blocks_ = block_max.size();
    top_ = HWY_DYNAMIC_DISPATCH(MaxOf)(block_max_, static_cast<int64_t>(blocks_));
  }
  ~Row() {
    // In reverse, so that an id banned twice gets its first value back.
    while (num_banned_ > 0) {
      --num_banned_;
      logits_[banned_[num_banned_].id] = banned_[num_banned_].logit;
    }
  }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  float top() const { return top_; }
  int64_t limit() const { return limit_; }

  int32_t Greedy() const {
    const size_t block = std::find(block_max_, block_max_ + blocks_, top_) - block_max_;
    const float* begin = logits_ + block * kBlock;
    return static_cast<int32_t>(std::find(begin, begin + BlockSize(block), top_) - logits_);
  }

  double TotalWeight(float inverse_temperature) const {
    double total = 0;
    for (size_t b = 0; b < blocks_; ++b) {
      total += HWY_DYNAMIC_DISPATCH(SumOfWeights)(logits_ + b * kBlock, BlockSize(b), top_,
                                                  inverse_temperature);
    }
    return total;
  }

  // The first `count` candidates in order, fewer when there are not so many above -inf.
  void SelectFirst(int64_t count, std::vector<Candidate>& out) const {
    out.clear();
    if (count >= limit_ / 8) {
      SelectAbove(-HUGE_VALF, out);
      if (static_cast<int64_t>(out.size()) > count) out.resize(count);
      return;
    }
    // A heap with the last candidate on top. Ids come in ascending order, so that a later one must
    // have a larger logit to displace it.
    float least = -HUGE_VALF;
    ForEachAbove(&least, [&](float logit, int64_t i) {
      if (static_cast<int64_t>(out.size()) == count) {
        std::pop_heap(out.begin(), out.end(), Before);
        out.pop_back();
      }
      out.push_back({logit, static_cast<int32_t>(i)});
      std::push_heap(out.begin(), out.end(), Before);
      if (static_cast<int64_t>(out.size()) == count) least = out.front().logit;
    });
    std::sort_heap(out.begin(), out.end(), Before);
  }

  // All candidates with a logit above `bound`, in order.
  void SelectAbove(float bound, std::vector<Candidate>& out) const {
    out.clear();
    ForEachAbove(&bound, [&](float logit, int64_t i) {
      out.push_back({logit, static_cast<int32_t>(i)});
    });
    std::sort(out.begin(), out.end(), Before);
  }

 private:
  // fn(logit, id) for each id whose logit is above *bound, in order of the id; fn may raise *bound.
  template <typename Fn>
  void ForEachAbove(const float* bound, const Fn& fn) const {
    for (size_t b = 0; b < blocks_; ++b) {
      if (!(block_max_[b] > *bound)) continue;
      const int64_t end = static_cast<int64_t>(b) * kBlock + BlockSize(b);
      for (int64_t i = b * kBlock; i < end; ++i) {
        if (logits_[i] > *bound) fn(logits_[i], i);
      }
    }
  }

  int64_t BlockSize(size_t b) const {
    return std::min<int64_t>(kBlock, limit_ - static_cast<int64_t>(b) * kBlock);
  }

  float* logits_;
  int64_t limit_;
  Candidate banned_[SamplingRow::kMaxBanned];
  int num_banned_ = 0;
  const float* block_max_ = nullptr;
  size_t blocks_ = 0;
  float top_ = 0;
};

// The candidates that top_k, top_p and min_p leave are always a prefix of the order. Its length
// and its mass; `whole`: no candidate exists beyond `candidates`.
struct Prefix {
  size_t size = 0;
  double mass = 0;
  bool ended = false;  // by top_p, min_p, or for want of candidates
};
Prefix KeptPrefix(const std::vector<double>& weights, double enough, double min_weight,
                  bool whole) {
  Prefix kept;
  for (const double w : weights) {
    if (kept.size > 0 && w < min_weight) {
      kept.ended = true;
      return kept;
    }
    ++kept.size;
    kept.mass += w;
    if (kept.mass >= enough) {
      kept.ended = true;
      return kept;
    }
  }
  kept.ended = whole;
  return kept;
}

// The candidate in which the uniform number falls, or kInvalidToken when the candidates at hand
// cannot tell. `all`: the mass of every candidate there is; `whole`: these are all of them.
int32_t DrawFrom(const std::vector<Candidate>& candidates, bool whole, double all, float top,
                 const SamplingRow& params) {
  thread_local std::vector<double> weights;
  weights.clear();
  for (const Candidate& c : candidates) {
    weights.push_back(
        std::exp((static_cast<double>(c.logit) - top) / static_cast<double>(params.temperature)));
  }
  const bool uncut = params.top_p >= 1.0f && params.min_p <= 0.0f;
  const double enough =
      params.top_p < 1.0f ? params.top_p * all : std::numeric_limits<double>::infinity();
  const Prefix kept = KeptPrefix(weights, enough, params.min_p, whole);
  const double uniform = SamplingUniform(params.seed, params.position);
  // An open prefix can still decide when neither top_p nor min_p cuts: the whole mass is known.
  if (!kept.ended && !(uncut && uniform * all < kept.mass)) return kInvalidToken;
  double left = uniform * (kept.ended ? kept.mass : all);
  for (size_t i = 0; i < kept.size; ++i) {
    left -= weights[i];
    if (left < 0) return candidates[i].id;
  }
  return candidates[kept.size - 1].id;
}

int32_t Draw(const Row& row, const SamplingRow& params) {
  thread_local std::vector<Candidate> candidates;
  if (params.top_k > 0 && params.top_k < row.limit()) {
    row.SelectFirst(params.top_k, candidates);
    double all = 0;
    for (const Candidate& c : candidates) {
      all += std::exp((static_cast<double>(c.logit) - row.top()) /
                      static_cast<double>(params.temperature));
    }
    return DrawFrom(candidates, true, all, row.top(), params);
  }
  // Without top_k the candidates needed are not known beforehand. A few nearly always do; then all
  // within some distance of the largest, ever further.
  constexpr int64_t kFew = 64;
  const double all = row.TotalWeight(1.0f / params.temperature);
  row.SelectFirst(kFew, candidates);
  bool whole = static_cast<int64_t>(candidates.size()) < kFew;
  for (float distance = 2.0f;; distance *= 2) {
    const int32_t token = DrawFrom(candidates, whole, all, row.top(), params);
    if (token != kInvalidToken) return token;
    const float bound = distance < 64.0f ? row.top() - distance * params.temperature : -HUGE_VALF;
    whole = bound == -HUGE_VALF;
    row.SelectAbove(bound, candidates);
  }
}

int32_t SampleRow(float* logits, int64_t vocab, int64_t limit, const SamplingRow& params) {
  if (!HWY_DYNAMIC_DISPATCH(AllBelowInfinity)(logits, vocab)) return kInvalidToken;
  const Row row(logits, limit, params);
  if (row.top() == -HUGE_VALF) return kInvalidToken;
  return params.temperature > 0.0f ? Draw(row, params) : row.Greedy();
}

}  // namespace

void Run(const ops::TokenSampler& op, const LaunchContext& ctx) {
  const int64_t vocab = op.logits.cols();
  int32_t* tokens = op.tokens.As<int32_t>();
  ctx.pool.ParallelFor(op.logits.rows(), GrainFor(vocab), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* logits = WriteFloats(RowAt(op.logits, t), op.logits.dtype, vocab, ScratchSlot::kInA);
      if (op.logits.dtype != DType::kF32) {
        ToFloats(RowAt(op.logits, t), op.logits.dtype, vocab, logits);
      }
      const auto& params = *static_cast<const SamplingRow*>(RowAt(op.rows, t));
      tokens[t] = SampleRow(logits, vocab, op.vocab_limit, params);
    }
  });
}

}  // namespace qwend::cpu
#endif
