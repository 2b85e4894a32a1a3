#include "engine/op_list.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/op_check.h"
#include "kernels/op_parts.h"

namespace qwend {
namespace {

// Writes one operator's name, tensors and scalars in the order of its declaration.
class Printer {
 public:
  explicit Printer(std::string& out) : out_(out) {}

  void operator()(const ops::EmbeddingLookup& op) {
    Name("EmbeddingLookup").Tensor("out", op.out).Tensor("table", op.table).Ids(op.token_ids);
  }
  void operator()(const ops::RopeEmbed& op) {
    Name("RopeEmbed").Tensor("q", op.q).Tensor("k", op.k).Tensor("cos", op.cos);
    Tensor("sin", op.sin).Tensor("positions", op.positions);
  }
  void operator()(const ops::Gemv& op) {
    Name("Gemv").Tensor("out", op.out).Tensor("x", op.x).Tensor("weight", op.weight);
    Tensor("bias", op.bias).Tensor("partials", op.partials);
    if (op.splits > 1) Scalar("splits", op.splits);
  }
  void operator()(const ops::SplitKReduce& op) {
    Name("SplitKReduce").Tensor("out", op.out).Tensor("partials", op.partials);
    Tensor("bias", op.bias);
  }
  void operator()(const ops::RmsNorm& op) {
    Name("RmsNorm").Tensor("out", op.out).Tensor("x", op.x).Tensor("weight", op.weight);
    Tensor("partial_sums", op.partial_sums).Norm(op.eps, op.weight_offset);
    if (op.splits > 1) Scalar("splits", op.splits);
  }
  void operator()(const ops::RmsNormResidualFused& op) {
    Name("RmsNormResidualFused").Tensor("out", op.out).Tensor("sum", op.sum).Tensor("a", op.a);
    Tensor("b", op.b).Tensor("weight", op.weight).Norm(op.eps, op.weight_offset);
  }
  void operator()(const ops::QkNorm& op) {
    Name("QkNorm").Tensor("q", op.q).Tensor("k", op.k).Tensor("q_weight", op.q_weight);
    Tensor("k_weight", op.k_weight).Norm(op.eps, op.weight_offset);
  }
  void operator()(const ops::CacheMask& op) {
    Name("CacheMask").Tensor("slots", op.slots).Tensor("lengths", op.lengths);
    Sequences(op.sequences);
  }
  void operator()(const ops::KvCacheUpdate& op) {
    Name("KvCacheUpdate").Tensor("k", op.k).Tensor("v", op.v).Tensor("k_pages", op.k_pages);
    Tensor("v_pages", op.v_pages).Tensor("slots", op.slots);
  }
  void operator()(const ops::QkDot& op) {
    Name("QkDot").Tensor("scores", op.scores).Tensor("q", op.q).Tensor("k_pages", op.k_pages);
    Scalar("scale", op.scale);
  }
  void operator()(const ops::SoftmaxMask& op) {
    Name("SoftmaxMask").Tensor("scores", op.scores).Tensor("lengths", op.lengths);
  }
  void operator()(const ops::PvDot& op) {
    Name("PvDot").Tensor("out", op.out).Tensor("probs", op.probs).Tensor("v_pages", op.v_pages);
  }
  void operator()(const ops::Attention& op) {
    Name("Attention").Tensor("out", op.out).Tensor("q", op.q).Tensor("k_pages", op.k_pages);
    Tensor("v_pages", op.v_pages).Scalar("scale", op.scale);
  }
  void operator()(const ops::OutputGate& op) {
    Name("OutputGate").Tensor("x", op.x).Tensor("gate", op.gate);
  }
  void operator()(const ops::ResidualAdd& op) {
    Name("ResidualAdd").Tensor("out", op.out).Tensor("a", op.a).Tensor("b", op.b);
  }
  void operator()(const ops::SiluMul& op) {
    Name("SiluMul").Tensor("out", op.out).Tensor("gate", op.gate).Tensor("up", op.up);
  }
  void operator()(const ops::CausalConv1d& op) {
    Name("CausalConv1d").Tensor("out", op.out).Tensor("x", op.x).Tensor("weight", op.weight);
    Tensor("state", op.state);
  }
  void operator()(const ops::DeltaGates& op) {
    Name("DeltaGates").Tensor("beta", op.beta).Tensor("log_decay", op.log_decay);
    Tensor("a", op.a).Tensor("b", op.b).Tensor("a_log", op.a_log).Tensor("dt_bias", op.dt_bias);
  }
  void operator()(const ops::GatedDeltaRule& op) {
    Name("GatedDeltaRule").Tensor("out", op.out).Tensor("q", op.q).Tensor("k", op.k);
    Tensor("v", op.v).Tensor("beta", op.beta).Tensor("log_decay", op.log_decay);
    Tensor("state", op.state).Scalar("scale", op.scale);
  }
  void operator()(const ops::GatedRmsNorm& op) {
    Name("GatedRmsNorm").Tensor("out", op.out).Tensor("x", op.x).Tensor("z", op.z);
    Tensor("weight", op.weight).Scalar("eps", op.eps);
  }
  template <FusedOp T>
  void operator()(const T& op) {
    const char* separator = "";
    ForEachPart(op, [&](const auto& part) {
      absl::StrAppend(&out_, std::exchange(separator, " | "));
      (*this)(part);
    });
  }
  void operator()(const ops::TokenSampler& op) {
    Name("TokenSampler").Tensor("tokens", op.tokens).Tensor("logits", op.logits);
    Scalar("vocab_limit", op.vocab_limit);
  }

 private:
  Printer& Name(const char* name) {
    absl::StrAppend(&out_, name);
    return *this;
  }
  Printer& Tensor(const char* name, const TensorView& v) {
    if (v.rank > 0) absl::StrAppend(&out_, " ", name, "=", v.ShapeString());
    return *this;
  }
  Printer& Scalar(const char* name, double value) {
    absl::StrAppend(&out_, " ", name, "=", value);
    return *this;
  }
  Printer& Norm(float eps, float offset) { return Scalar("eps", eps).Scalar("offset", offset); }
  Printer& Ids(const TensorView& v) { return Tensor("token_ids", v); }
  Printer& Sequences(const StepSequences& s) {
    return Tensor("query_start", s.query_start).Tensor("block_table", s.block_table);
  }

  std::string& out_;
};

}  // namespace

void OpList::Add(const std::string& tag, const Op& op, int layer) {
  OpCall call{.op = op, .tag = tag_prefix_ + tag, .layer = layer};
  CheckOp(call);
  calls_.push_back(std::move(call));
}

std::string OpList::ToString() const {
  std::string out;
  for (const OpCall& call : calls_) {
    absl::StrAppend(&out, call.layer < 0 ? "-" : absl::StrCat(call.layer), " ", call.tag, ": ");
    std::visit(Printer(out), call.op);
    out += '\n';
  }
  return out;
}

}  // namespace qwend
