// CausalConv1d and GatedDeltaRule, in the textbook order.
#include <cmath>
#include <vector>

#include "tests/support/reference/reference.h"
#include "tests/support/tensors.h"

namespace qwend::reference {

using test::At;
using test::Put;

namespace {

int64_t Index(const TensorView& v, int64_t i) { return static_cast<int64_t>(At(v, i)); }

std::vector<double> UnitLength(const TensorView& x, int64_t t, int64_t h, double eps) {
  std::vector<double> row(x.cols());
  double sum = 0;
  for (int64_t i = 0; i < x.cols(); ++i) {
    row[i] = At(x, t, h, i);
    sum += row[i] * row[i];
  }
  for (double& value : row) value /= std::sqrt(sum + eps);
  return row;
}

}  // namespace

void Run(const ops::CausalConv1d& op) {
  const int64_t width = op.weight.cols();
  for (int64_t s = 0; s < op.sequences.state_slot.rows(); ++s) {
    const int64_t slot = Index(op.sequences.state_slot, s);
    const int64_t begin = Index(op.sequences.query_start, s);
    const int64_t end = Index(op.sequences.query_start, s + 1);
    for (int64_t c = 0; c < op.x.cols(); ++c) {
      std::vector<double> history;
      for (int64_t i = 0; i < width - 1; ++i) history.push_back(At(op.state, slot, i, c));
      for (int64_t t = begin; t < end; ++t) {
        history.push_back(At(op.x, t, c));
        double sum = 0;
        for (int64_t j = 0; j < width; ++j) {
          sum += At(op.weight, c, j) * history[history.size() - width + j];
        }
        Put(op.out, sum / (1 + std::exp(-sum)), t, c);
      }
      for (int64_t i = 0; i < width - 1; ++i) {
        Put(op.state, history[history.size() - (width - 1) + i], slot, i, c);
      }
    }
  }
}

void Run(const ops::GatedDeltaRule& op) {
  const int64_t heads = op.v.dim(1), dk = op.q.cols(), dv = op.v.cols();
  for (int64_t s = 0; s < op.sequences.state_slot.rows(); ++s) {
    const int64_t slot = Index(op.sequences.state_slot, s);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t key_head = h / (heads / op.q.dim(1));
      std::vector<std::vector<double>> state(dk, std::vector<double>(dv));
      for (int64_t i = 0; i < dk; ++i) {
        for (int64_t j = 0; j < dv; ++j) state[i][j] = At(op.state, slot, h, i, j);
      }
      const int64_t end = Index(op.sequences.query_start, s + 1);
      for (int64_t t = Index(op.sequences.query_start, s); t < end; ++t) {
        const std::vector<double> q = UnitLength(op.q, t, key_head, op.l2_eps);
        const std::vector<double> k = UnitLength(op.k, t, key_head, op.l2_eps);
        const double decay = std::exp(At(op.log_decay, t, h));
        for (int64_t j = 0; j < dv; ++j) {
          double recalled = 0;
          for (int64_t i = 0; i < dk; ++i) recalled += (state[i][j] *= decay) * k[i];
          const double error = At(op.beta, t, h) * (At(op.v, t, h, j) - recalled);
          double out = 0;
          for (int64_t i = 0; i < dk; ++i) out += (state[i][j] += k[i] * error) * q[i] * op.scale;
          Put(op.out, out, t, h, j);
        }
      }
      for (int64_t i = 0; i < dk; ++i) {
        for (int64_t j = 0; j < dv; ++j) Put(op.state, state[i][j], slot, h, i, j);
      }
    }
  }
}

}  // namespace qwend::reference
