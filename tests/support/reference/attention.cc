// CacheMask, KvCacheUpdate and attention.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/support/reference/reference.h"
#include "tests/support/tensors.h"

namespace qwend::reference {

using test::At;
using test::Put;

namespace {

int64_t Index(const TensorView& v, int64_t i, int64_t j = 0) {
  return static_cast<int64_t>(At(v, i, j));
}

// Element d of what the cache holds for one position of row t's sequence.
double Cached(const TensorView& pages, const StepSequences& s, int64_t t, int64_t kv_head,
              int64_t position, int64_t d) {
  const int64_t page = Index(s.block_table, Index(s.row_sequence, t), position / kPageTokens);
  return At(pages, page, kv_head, position % kPageTokens, d);
}

std::vector<double> Scores(const TensorView& q, const TensorView& k_pages, const StepSequences& s,
                           int64_t t, int64_t h, int64_t length, double scale) {
  const int64_t kv_head = h / (q.dim(1) / k_pages.dim(1));
  std::vector<double> scores(length);
  for (int64_t p = 0; p < length; ++p) {
    for (int64_t d = 0; d < q.cols(); ++d) {
      scores[p] += scale * At(q, t, h, d) * Cached(k_pages, s, t, kv_head, p, d);
    }
  }
  return scores;
}

void Softmax(std::vector<double>& s) {
  const double top = *std::max_element(s.begin(), s.end());
  double sum = 0;
  for (double& x : s) sum += x = std::exp(x - top);
  for (double& x : s) x /= sum;
}

void Mix(const TensorView& out, const std::vector<double>& probs, const TensorView& v_pages,
         const StepSequences& s, int64_t t, int64_t h) {
  const int64_t kv_head = h / (out.dim(1) / v_pages.dim(1));
  for (int64_t d = 0; d < out.cols(); ++d) {
    double sum = 0;
    for (size_t p = 0; p < probs.size(); ++p) {
      sum += probs[p] * Cached(v_pages, s, t, kv_head, static_cast<int64_t>(p), d);
    }
    Put(out, sum, t, h, d);
  }
}

}  // namespace

void Run(const ops::CacheMask& op) {
  for (int64_t t = 0; t < op.slots.rows(); ++t) {
    const int64_t position = Index(op.sequences.positions, t);
    const int64_t sequence = Index(op.sequences.row_sequence, t);
    const int64_t page = Index(op.sequences.block_table, sequence, position / kPageTokens);
    Put(op.slots, static_cast<double>(page * kPageTokens + position % kPageTokens), t);
    Put(op.lengths, static_cast<double>(position + 1), t);
  }
}

void Run(const ops::KvCacheUpdate& op) {
  for (int64_t t = 0; t < op.k.rows(); ++t) {
    const int64_t page = Index(op.slots, t) / kPageTokens;
    const int64_t offset = Index(op.slots, t) % kPageTokens;
    for (int64_t h = 0; h < op.k.dim(1); ++h) {
      for (int64_t d = 0; d < op.k.cols(); ++d) {
        Put(op.k_pages, At(op.k, t, h, d), page, h, offset, d);
        Put(op.v_pages, At(op.v, t, h, d), page, h, offset, d);
      }
    }
  }
}

void Run(const ops::QkDot& op) {
  for (int64_t t = 0; t < op.q.rows(); ++t) {
    for (int64_t h = 0; h < op.q.dim(1); ++h) {
      const std::vector<double> s =
          Scores(op.q, op.k_pages, op.sequences, t, h, Index(op.lengths, t), op.scale);
      for (size_t p = 0; p < s.size(); ++p) Put(op.scores, s[p], t, h, static_cast<int64_t>(p));
    }
  }
}

void Run(const ops::SoftmaxMask& op) {
  for (int64_t t = 0; t < op.scores.rows(); ++t) {
    for (int64_t h = 0; h < op.scores.dim(1); ++h) {
      std::vector<double> s(Index(op.lengths, t));
      for (size_t p = 0; p < s.size(); ++p) s[p] = At(op.scores, t, h, static_cast<int64_t>(p));
      Softmax(s);
      for (size_t p = 0; p < s.size(); ++p) Put(op.scores, s[p], t, h, static_cast<int64_t>(p));
    }
  }
}

void Run(const ops::PvDot& op) {
  for (int64_t t = 0; t < op.out.rows(); ++t) {
    for (int64_t h = 0; h < op.out.dim(1); ++h) {
      std::vector<double> p(Index(op.lengths, t));
      for (size_t i = 0; i < p.size(); ++i) p[i] = At(op.probs, t, h, static_cast<int64_t>(i));
      Mix(op.out, p, op.v_pages, op.sequences, t, h);
    }
  }
}

void Run(const ops::Attention& op) {
  for (int64_t t = 0; t < op.q.rows(); ++t) {
    for (int64_t h = 0; h < op.q.dim(1); ++h) {
      std::vector<double> s =
          Scores(op.q, op.k_pages, op.sequences, t, h, Index(op.lengths, t), op.scale);
      Softmax(s);
      Mix(op.out, s, op.v_pages, op.sequences, t, h);
    }
  }
}

}  // namespace qwend::reference
