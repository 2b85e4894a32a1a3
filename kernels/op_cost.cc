#include "kernels/op_cost.h"

#include <algorithm>

#include "kernels/op_parts.h"

namespace qwend {
namespace {

// Counts for `rows` of the T rows that an operator was built for.
class Counter {
 public:
  Counter(int64_t built_rows, double mean_length, int64_t rows)
      : rows_(static_cast<double>(rows > 0 ? std::min(rows, built_rows) : built_rows)),
        share_(rows_ / static_cast<double>(built_rows)),
        mean_length_(mean_length) {}

  // A tensor with one part per row.
  Counter& PerRow(const TensorView& v) {
    cost_.bytes += share_ * static_cast<double>(v.bytes());
    return *this;
  }
  // Takes `times` countings of such a tensor back.
  Counter& NotPerRow(const TensorView& v, int times) {
    cost_.bytes -= times * share_ * static_cast<double>(v.bytes());
    return *this;
  }
  // A tensor that all rows share.
  Counter& Once(const TensorView& v) {
    if (v) cost_.bytes += static_cast<double>(v.bytes());
    return *this;
  }
  Counter& Bytes(double bytes) {
    cost_.bytes += bytes;
    return *this;
  }
  Counter& FlopsPerRow(double flops) {
    cost_.flops += rows_ * flops;
    return *this;
  }

  double rows() const { return rows_; }
  double mean_length() const { return mean_length_; }

  double Sequences(const TensorView& per_sequence) const {
    return std::min(static_cast<double>(per_sequence.rows()), rows_);
  }

  // A page pool: each sequence's positions once, to the last that its rows see. Its rows see
  // mean_length positions on average, one more from each to the next.
  Counter& Pages(const TensorView& pages, const StepSequences& s) {
    const double sequences = Sequences(s.block_table);
    const double last = mean_length_ + (rows_ / sequences - 1) / 2;
    const double position = static_cast<double>(pages.dim(1) * pages.cols() * SizeOf(pages.dtype));
    return Bytes(sequences * last * position);
  }

  // The visible part of a score matrix, read or written once.
  Counter& Scores(const TensorView& scores) {
    return Bytes(rows_ * static_cast<double>(scores.dim(1)) * mean_length_ * SizeOf(scores.dtype));
  }

  // Each sequence's state, read and written.
  Counter& State(const TensorView& state, const StepSequences& s) {
    const double one = static_cast<double>(state.bytes()) / static_cast<double>(state.rows());
    return Bytes(2 * Sequences(s.state_slot) * one);
  }

  OpCost cost() const { return cost_; }

 private:
  double rows_;
  double share_;
  double mean_length_;
  OpCost cost_;
};

double Elements(const TensorView& v) {  // of one row
  return static_cast<double>(v.elements()) / static_cast<double>(v.rows());
}

int64_t Rows(const ops::RopeEmbed& op) { return op.q.rows(); }
int64_t Rows(const ops::QkNorm& op) { return op.q.rows(); }
int64_t Rows(const ops::CacheMask& op) { return op.slots.rows(); }
int64_t Rows(const ops::KvCacheUpdate& op) { return op.k.rows(); }
int64_t Rows(const ops::QkDot& op) { return op.q.rows(); }
int64_t Rows(const ops::SoftmaxMask& op) { return op.scores.rows(); }
int64_t Rows(const ops::OutputGate& op) { return op.x.rows(); }
int64_t Rows(const ops::DeltaGates& op) { return op.a.rows(); }
int64_t Rows(const ops::TokenSampler& op) { return op.logits.rows(); }
int64_t Rows(const ops::NormProjections& op) { return op.norm.x.rows(); }
int64_t Rows(const ops::NormGateUpSilu& op) { return op.norm.x.rows(); }
int64_t Rows(const ops::GemvResidual& op) { return op.gemv.x.rows(); }
int64_t Rows(const ops::DecodeAttention& op) { return op.attention.q.rows(); }
int64_t Rows(const ops::LinearAttention& op) { return op.conv.x.rows(); }
int64_t Rows(const ops::NormHead& op) { return op.norm.x.rows(); }
template <typename T>
int64_t Rows(const T& op) {
  return op.out.rows();
}

void Count(Counter& c, const ops::EmbeddingLookup& op) {
  const double row = static_cast<double>(op.table.cols() * SizeOf(op.table.dtype));
  c.PerRow(op.out).PerRow(op.token_ids).Bytes(c.rows() * row);
}

void Count(Counter& c, const ops::RopeEmbed& op) {
  const double half = static_cast<double>(op.cos.cols());
  const double heads = static_cast<double>(op.q.dim(1) + op.k.dim(1));
  const double q_bytes = static_cast<double>(op.q.dim(1) * SizeOf(op.q.dtype));
  const double k_bytes = static_cast<double>(op.k.dim(1) * SizeOf(op.k.dtype));
  c.Bytes(c.rows() * 2 * half * (2 * (q_bytes + k_bytes) + SizeOf(op.cos.dtype)));
  c.PerRow(op.positions).FlopsPerRow(6 * half * heads);
}

void Count(Counter& c, const ops::Gemv& op) {
  const double n = static_cast<double>(op.weight.rows());
  const double k = static_cast<double>(op.weight.cols());
  c.PerRow(op.x).Once(op.weight).FlopsPerRow(2 * n * k);
  if (op.splits > 1) {
    c.Bytes(c.rows() * n * op.splits * SizeOf(op.partials.dtype));
  } else {
    c.PerRow(op.out).Once(op.bias);
  }
}

void Count(Counter& c, const ops::SplitKReduce& op) {
  const double parts = static_cast<double>(op.partials.rows());
  const double n = static_cast<double>(op.out.cols());
  c.PerRow(op.out).Once(op.bias).Bytes(c.rows() * parts * n * SizeOf(op.partials.dtype));
  c.FlopsPerRow(parts * n);
}

void Count(Counter& c, const ops::RmsNorm& op) {
  c.PerRow(op.x).PerRow(op.out).Once(op.weight).FlopsPerRow(4 * Elements(op.x));
}

void Count(Counter& c, const ops::RmsNormResidualFused& op) {
  c.PerRow(op.a).PerRow(op.b).PerRow(op.sum).PerRow(op.out).Once(op.weight);
  c.FlopsPerRow(5 * Elements(op.a));
}

void Count(Counter& c, const ops::QkNorm& op) {
  c.PerRow(op.q).PerRow(op.q).PerRow(op.k).PerRow(op.k).Once(op.q_weight).Once(op.k_weight);
  c.FlopsPerRow(4 * (Elements(op.q) + Elements(op.k)));
}

void Count(Counter& c, const ops::CacheMask& op) {
  // One entry of the block table for each row.
  c.PerRow(op.slots).PerRow(op.lengths).PerRow(op.sequences.positions);
  c.PerRow(op.sequences.row_sequence).Bytes(c.rows() * SizeOf(op.sequences.block_table.dtype));
}

void Count(Counter& c, const ops::KvCacheUpdate& op) {
  c.PerRow(op.k).PerRow(op.v).PerRow(op.slots);
  c.Bytes(c.rows() *
          (Elements(op.k) * SizeOf(op.k_pages.dtype) + Elements(op.v) * SizeOf(op.v_pages.dtype)));
}

void Count(Counter& c, const ops::QkDot& op) {
  c.PerRow(op.q).PerRow(op.lengths).Pages(op.k_pages, op.sequences).Scores(op.scores);
  c.FlopsPerRow(2 * Elements(op.q) * c.mean_length());
}

void Count(Counter& c, const ops::SoftmaxMask& op) {
  c.Scores(op.scores).Scores(op.scores).PerRow(op.lengths);
  c.FlopsPerRow(5 * static_cast<double>(op.scores.dim(1)) * c.mean_length());
}

void Count(Counter& c, const ops::PvDot& op) {
  c.PerRow(op.out).PerRow(op.lengths).Pages(op.v_pages, op.sequences).Scores(op.probs);
  c.FlopsPerRow(2 * Elements(op.out) * c.mean_length());
}

void Count(Counter& c, const ops::Attention& op) {
  c.PerRow(op.q).PerRow(op.out).PerRow(op.lengths);
  c.Pages(op.k_pages, op.sequences).Pages(op.v_pages, op.sequences);
  c.FlopsPerRow((4 * Elements(op.q) + 5 * static_cast<double>(op.q.dim(1))) * c.mean_length());
}

void Count(Counter& c, const ops::OutputGate& op) {
  c.PerRow(op.x).PerRow(op.x).PerRow(op.gate).FlopsPerRow(4 * Elements(op.x));
}

void Count(Counter& c, const ops::ResidualAdd& op) {
  c.PerRow(op.a).PerRow(op.b).PerRow(op.out).FlopsPerRow(Elements(op.a));
}

void Count(Counter& c, const ops::SiluMul& op) {
  c.PerRow(op.gate).PerRow(op.up).PerRow(op.out).FlopsPerRow(5 * Elements(op.gate));
}

void Count(Counter& c, const ops::CausalConv1d& op) {
  c.PerRow(op.x).PerRow(op.out).Once(op.weight).State(op.state, op.sequences);
  c.FlopsPerRow(Elements(op.x) * (2 * static_cast<double>(op.weight.cols()) + 4));
}

void Count(Counter& c, const ops::DeltaGates& op) {
  c.PerRow(op.a).PerRow(op.b).PerRow(op.beta).PerRow(op.log_decay);
  c.Once(op.a_log).Once(op.dt_bias).FlopsPerRow(10 * Elements(op.a));
}

void Count(Counter& c, const ops::GatedDeltaRule& op) {
  c.PerRow(op.q).PerRow(op.k).PerRow(op.v).PerRow(op.out).PerRow(op.beta).PerRow(op.log_decay);
  c.State(op.state, op.sequences);
  // Decay, S^T k, the rank-one update and S^T q.
  c.FlopsPerRow(7 * Elements(op.v) * static_cast<double>(op.q.cols()));
}

void Count(Counter& c, const ops::GatedRmsNorm& op) {
  c.PerRow(op.x).PerRow(op.z).PerRow(op.out).Once(op.weight).FlopsPerRow(9 * Elements(op.x));
}

void Count(Counter& c, const ops::TokenSampler& op) {
  c.PerRow(op.logits).PerRow(op.rows).PerRow(op.tokens).FlopsPerRow(Elements(op.logits));
}

// A fused operator moves what its parts move, but for the tensors between them.
template <typename T>
requires FusedOp<T>
void CountParts(Counter& c, const T& op) {
  ForEachPart(op, [&](const auto& part) { Count(c, part); });
}

void Count(Counter& c, const ops::NormProjections& op) {
  CountParts(c, op);
  c.NotPerRow(op.norm.out, 1 + op.count);
}

void Count(Counter& c, const ops::NormGateUpSilu& op) {
  CountParts(c, op);
  c.NotPerRow(op.norm.out, 3).NotPerRow(op.gate.out, 2).NotPerRow(op.up.out, 2);
}

void Count(Counter& c, const ops::GemvResidual& op) {
  CountParts(c, op);
  c.NotPerRow(op.gemv.out, 2);
}

void Count(Counter& c, const ops::DecodeAttention& op) {
  const ops::Attention& a = op.attention;
  c.PerRow(op.update.k).PerRow(op.update.v).PerRow(a.q).PerRow(a.out);
  if (op.gate.x) c.PerRow(op.gate.gate);
  c.Pages(a.k_pages, a.sequences).Pages(a.v_pages, a.sequences);
  c.FlopsPerRow((4 * Elements(a.q) + 5 * static_cast<double>(a.q.dim(1))) * c.mean_length());
}

void Count(Counter& c, const ops::LinearAttention& op) {
  CountParts(c, op);
  c.NotPerRow(op.conv.out, 2).NotPerRow(op.rule.out, 2);
  c.NotPerRow(op.gates.beta, 2).NotPerRow(op.gates.log_decay, 2);
}

// The logits stay where they arise, but for the rows that sample.
void Count(Counter& c, const ops::NormHead& op) {
  CountParts(c, op);
  c.NotPerRow(op.norm.out, 2).NotPerRow(op.head.out, 1);
}

}  // namespace

OpCost CostOf(const Op& op, double mean_length, int64_t rows) {
  return std::visit(
      [&](const auto& o) {
        Counter counter(Rows(o), mean_length, rows);
        Count(counter, o);
        return counter.cost();
      },
      op);
}

}  // namespace qwend
