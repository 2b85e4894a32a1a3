// Norms, rotary embedding, gates and activations.
#include <cmath>
#include <vector>

#include "tests/support/reference/reference.h"
#include "tests/support/tensors.h"

namespace qwend::reference {

using test::At;
using test::Put;

namespace {

double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double Silu(double x) { return x * Sigmoid(x); }

double InverseRms(const std::vector<double>& x, double eps) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + eps);
}

std::vector<double> Row(const TensorView& v, int64_t t, int64_t h = -1) {
  std::vector<double> row(v.cols());
  for (int64_t i = 0; i < v.cols(); ++i) row[i] = h < 0 ? At(v, t, i) : At(v, t, h, i);
  return row;
}

void NormHeads(const TensorView& x, const TensorView& weight, double eps, double offset) {
  for (int64_t t = 0; t < x.rows(); ++t) {
    for (int64_t h = 0; h < x.dim(1); ++h) {
      const std::vector<double> row = Row(x, t, h);
      const double inv = InverseRms(row, eps);
      for (int64_t i = 0; i < x.cols(); ++i) {
        Put(x, row[i] * inv * (offset + At(weight, i)), t, h, i);
      }
    }
  }
}

void Rotate(const TensorView& x, const ops::RopeEmbed& op) {
  const int64_t half = op.cos.cols();
  for (int64_t t = 0; t < x.rows(); ++t) {
    const auto position = static_cast<int64_t>(At(op.positions, t));
    for (int64_t h = 0; h < x.dim(1); ++h) {
      for (int64_t i = 0; i < half; ++i) {
        const double a = At(x, t, h, i), b = At(x, t, h, i + half);
        const double c = At(op.cos, position, i), s = At(op.sin, position, i);
        Put(x, a * c - b * s, t, h, i);
        Put(x, b * c + a * s, t, h, i + half);
      }
    }
  }
}

}  // namespace

void Run(const ops::RopeEmbed& op) {
  Rotate(op.q, op);
  Rotate(op.k, op);
}

void Run(const ops::RmsNorm& op) {
  for (int64_t t = 0; t < op.x.rows(); ++t) {
    const std::vector<double> row = Row(op.x, t);
    const double inv = InverseRms(row, op.eps);
    for (int64_t i = 0; i < op.x.cols(); ++i) {
      Put(op.out, row[i] * inv * (op.weight_offset + At(op.weight, i)), t, i);
    }
  }
}

void Run(const ops::RmsNormResidualFused& op) {
  for (int64_t t = 0; t < op.a.rows(); ++t) {
    for (int64_t i = 0; i < op.a.cols(); ++i) Put(op.sum, At(op.a, t, i) + At(op.b, t, i), t, i);
  }
  Run(ops::RmsNorm{.out = op.out,
                   .x = op.sum,
                   .weight = op.weight,
                   .eps = op.eps,
                   .weight_offset = op.weight_offset});
}

void Run(const ops::QkNorm& op) {
  NormHeads(op.q, op.q_weight, op.eps, op.weight_offset);
  NormHeads(op.k, op.k_weight, op.eps, op.weight_offset);
}

void Run(const ops::GatedRmsNorm& op) {
  for (int64_t t = 0; t < op.x.rows(); ++t) {
    for (int64_t h = 0; h < op.x.dim(1); ++h) {
      const std::vector<double> row = Row(op.x, t, h);
      const double inv = InverseRms(row, op.eps);
      for (int64_t i = 0; i < op.x.cols(); ++i) {
        Put(op.out, row[i] * inv * At(op.weight, i) * Silu(At(op.z, t, h, i)), t, h, i);
      }
    }
  }
}

void Run(const ops::OutputGate& op) {
  for (int64_t t = 0; t < op.x.rows(); ++t) {
    for (int64_t h = 0; h < op.x.dim(1); ++h) {
      for (int64_t i = 0; i < op.x.cols(); ++i) {
        Put(op.x, At(op.x, t, h, i) * Sigmoid(At(op.gate, t, h, i)), t, h, i);
      }
    }
  }
}

void Run(const ops::ResidualAdd& op) {
  for (int64_t t = 0; t < op.out.rows(); ++t) {
    for (int64_t i = 0; i < op.out.cols(); ++i) Put(op.out, At(op.a, t, i) + At(op.b, t, i), t, i);
  }
}

void Run(const ops::SiluMul& op) {
  for (int64_t t = 0; t < op.out.rows(); ++t) {
    for (int64_t i = 0; i < op.out.cols(); ++i) {
      Put(op.out, Silu(At(op.gate, t, i)) * At(op.up, t, i), t, i);
    }
  }
}

void Run(const ops::DeltaGates& op) {
  for (int64_t t = 0; t < op.a.rows(); ++t) {
    for (int64_t h = 0; h < op.a.cols(); ++h) {
      const double x = At(op.a, t, h) + At(op.dt_bias, h);
      const double softplus = x > 20 ? x : std::log1p(std::exp(x));
      Put(op.beta, Sigmoid(At(op.b, t, h)), t, h);
      Put(op.log_decay, -std::exp(At(op.a_log, h)) * softplus, t, h);
    }
  }
}

}  // namespace qwend::reference
