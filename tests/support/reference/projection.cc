// EmbeddingLookup, Gemv, SplitKReduce.
#include "tests/support/reference/reference.h"
#include "tests/support/tensors.h"

namespace qwend::reference {

using test::At;
using test::Put;

void Run(const ops::EmbeddingLookup& op) {
  for (int64_t t = 0; t < op.out.rows(); ++t) {
    const auto id = static_cast<int64_t>(At(op.token_ids, t));
    for (int64_t i = 0; i < op.out.cols(); ++i) Put(op.out, At(op.table, id, i), t, i);
  }
}

void Run(const ops::Gemv& op) {
  for (int64_t t = 0; t < op.x.rows(); ++t) {
    for (int64_t n = 0; n < op.weight.rows(); ++n) {
      double sum = op.bias ? At(op.bias, n) : 0.0;
      for (int64_t k = 0; k < op.weight.cols(); ++k) sum += At(op.x, t, k) * At(op.weight, n, k);
      Put(op.out, sum, t, n);
    }
  }
}

void Run(const ops::SplitKReduce& op) {
  for (int64_t t = 0; t < op.out.rows(); ++t) {
    for (int64_t n = 0; n < op.out.cols(); ++n) {
      double sum = op.bias ? At(op.bias, n) : 0.0;
      for (int64_t p = 0; p < op.partials.rows(); ++p) sum += At(op.partials, p, t, n);
      Put(op.out, sum, t, n);
    }
  }
}

}  // namespace qwend::reference
