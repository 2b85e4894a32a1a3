#include "kernels/op_check.h"

#include <cctype>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>

#include "kernels/op_parts.h"

namespace qwend {
namespace {

// Types a field may have, as a set.
using Types = unsigned;
constexpr Types Bit(DType t) { return 1u << static_cast<unsigned>(t); }
constexpr Types kF32Only = Bit(DType::kF32);
constexpr Types kActivation = Bit(DType::kF32) | Bit(DType::kBF16);
constexpr Types kWeight = kActivation | Bit(DType::kF16);
constexpr Types kInt = Bit(DType::kI32);
constexpr Types kBytes = Bit(DType::kU8);

enum class Use { kInput, kOutput, kPackable };

std::string TypeNames(Types types) {
  std::string names;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16, DType::kI32, DType::kU8}) {
    if ((types & Bit(t)) == 0) continue;
    if (!names.empty()) names += " or ";
    names += Name(t);
  }
  return names;
}

// Checks an operator's fields one after the other. Shapes are written in letters, "T H D": the
// first field that has a letter binds it, later ones must agree. A number stands for itself, and
// "S+1" for one more than S.
class Checker {
 public:
  Checker(const char* op, const OpCall& call) {
    std::ostringstream s;
    if (call.tag.empty()) {
      s << op;
    } else {
      s << call.tag << " (" << op << ")";
    }
    if (call.layer >= 0) s << " of layer " << call.layer;
    where_ = s.str();
  }

  template <typename... Args>
  void That(bool ok, const Args&... args) const {
    if (!ok) Require(false, where_, ": ", args..., seen_.empty() ? "" : "; ", seen_);
  }

  void Field(const char* name, const TensorView& v, const char* letters, Types types,
             Use use = Use::kInput) {
    That(v.rank > 0 && v.data != nullptr, name, " is missing, must be [", letters, "]");
    That((types & Bit(v.dtype)) != 0, name, " is ", v.ShapeString(), ", must be of type ",
         TypeNames(types));
    That(v.elements() > 0, name, " is ", v.ShapeString(), ", which holds nothing");
    CheckShape(name, v, letters);
    CheckMemory(name, v, use);
    seen_ += (seen_.empty() ? "" : ", ") + std::string(name) + " is " + v.ShapeString();
  }

  void Optional(const char* name, const TensorView& v, const char* letters, Types types) {
    if (v.rank > 0 || v.data != nullptr) Field(name, v, letters, types);
  }

  int64_t operator[](const char* letter) const { return bound_.at(letter); }
  void Bind(const char* letter, int64_t value) { bound_[letter] = value; }

 private:
  void CheckShape(const char* name, const TensorView& v, const char* letters) {
    std::istringstream tokens(letters);
    std::string token, known;
    bool ok = true;
    int rank = 0;
    for (; tokens >> token; ++rank) {
      if (rank >= v.rank) {
        ok = false;
        continue;
      }
      int64_t want = 0;
      if (std::isdigit(static_cast<unsigned char>(token[0])) != 0) {
        want = std::stoll(token);
      } else {
        const bool plus = token.size() > 2 && token.substr(token.size() - 2) == "+1";
        const std::string letter = plus ? token.substr(0, token.size() - 2) : token;
        const auto [at, fresh] = bound_.try_emplace(letter, v.shape[rank] - (plus ? 1 : 0));
        want = at->second + (plus ? 1 : 0);
        if (!fresh) known += " " + letter + " = " + std::to_string(at->second);
      }
      ok = ok && v.shape[rank] == want;
    }
    That(ok && rank == v.rank, name, " is ", v.ShapeString(), ", must be [", letters, "]",
         known.empty() ? "" : " with", known);
  }

  void CheckMemory(const char* name, const TensorView& v, Use use) const {
    if (v.layout != Layout::kRowMajor) {
      That(use == Use::kPackable, name, " is packed, must be row-major");
      return;
    }
    That(v.cols() == 1 || v.strides[v.rank - 1] == 1, name, " is ", v.ShapeString(),
         " with innermost stride ", v.strides[v.rank - 1], ", must be 1");
    if (use != Use::kOutput) return;
    int64_t span = 1;  // from the first to beyond the last element of the inner dimensions
    for (int d = v.rank - 1; d >= 0; --d) {
      if (v.shape[d] == 1) continue;
      That(v.strides[d] >= span, name, " is ", v.ShapeString(), " with stride ", v.strides[d],
           " of dimension ", d, ": its elements overlap");
      span += (v.shape[d] - 1) * v.strides[d];
    }
  }

  std::string where_;
  std::string seen_;  // the fields that were checked, for the message
  std::map<std::string, int64_t> bound_;
};

void Divides(const Checker& c, const char* kv, const char* heads) {
  c.That(c[heads] % c[kv] == 0, heads, " = ", c[heads], " is not a multiple of ", kv, " = ", c[kv]);
}

// What attention needs to find a row's pages.
void PagedRows(Checker& c, const StepSequences& s) {
  c.Field("row_sequence", s.row_sequence, "T", kInt);
  c.Field("block_table", s.block_table, "S max_pages", kInt);
}

// What recurrent operators need to find a sequence's rows and state.
void StatefulRows(Checker& c, const StepSequences& s) {
  c.Field("query_start", s.query_start, "S+1", kInt);
  c.Field("state_slot", s.state_slot, "S", kInt);
}

void Check(Checker& c, const ops::EmbeddingLookup& op) {
  c.Field("out", op.out, "T hidden", kActivation, Use::kOutput);
  c.Field("table", op.table, "V hidden", kWeight, Use::kPackable);
  c.Field("token_ids", op.token_ids, "T", kInt);
}

void Check(Checker& c, const ops::RopeEmbed& op) {
  c.Field("q", op.q, "T H D", kActivation, Use::kOutput);
  c.Field("k", op.k, "T KH D", kActivation, Use::kOutput);
  c.Field("cos", op.cos, "max_context R", kF32Only);
  c.Field("sin", op.sin, "max_context R", kF32Only);
  c.Field("positions", op.positions, "T", kInt);
  c.That(2 * c["R"] <= c["D"], "rotary_dim = 2 * R = ", 2 * c["R"], " is above D = ", c["D"]);
}

void Check(Checker& c, const ops::Gemv& op) {
  c.Field("x", op.x, "T K", kActivation);
  c.Field("weight", op.weight, "N K", kWeight, Use::kPackable);
  c.Field("out", op.out, "T N", kActivation, Use::kOutput);
  c.Optional("bias", op.bias, "N", kWeight);
  c.That(op.splits >= 1, "splits is ", op.splits, ", must be at least 1");
  if (op.splits > 1) {
    c.Bind("splits", op.splits);
    c.Field("partials", op.partials, "splits T N", kF32Only, Use::kOutput);
  }
}

void Check(Checker& c, const ops::SplitKReduce& op) {
  c.Field("out", op.out, "T N", kActivation, Use::kOutput);
  c.Field("partials", op.partials, "splits T N", kF32Only);
  c.Optional("bias", op.bias, "N", kWeight);
}

void Check(Checker& c, const ops::RmsNorm& op) {
  c.Field("x", op.x, "T hidden", kActivation);
  c.Field("out", op.out, "T hidden", kActivation, Use::kOutput);
  c.Field("weight", op.weight, "hidden", kWeight);
  c.That(op.splits >= 1, "splits is ", op.splits, ", must be at least 1");
  if (op.splits > 1) {
    c.Bind("splits", op.splits);
    c.Field("partial_sums", op.partial_sums, "T splits", kF32Only, Use::kOutput);
  }
}

void Check(Checker& c, const ops::RmsNormResidualFused& op) {
  c.Field("a", op.a, "T hidden", kActivation);
  c.Field("b", op.b, "T hidden", kActivation);
  c.Field("sum", op.sum, "T hidden", kActivation, Use::kOutput);
  c.Field("out", op.out, "T hidden", kActivation, Use::kOutput);
  c.Field("weight", op.weight, "hidden", kWeight);
}

void Check(Checker& c, const ops::QkNorm& op) {
  c.Field("q", op.q, "T H D", kActivation, Use::kOutput);
  c.Field("k", op.k, "T KH D", kActivation, Use::kOutput);
  c.Field("q_weight", op.q_weight, "D", kWeight);
  c.Field("k_weight", op.k_weight, "D", kWeight);
}

void Check(Checker& c, const ops::CacheMask& op) {
  c.Field("slots", op.slots, "T", kInt, Use::kOutput);
  c.Field("lengths", op.lengths, "T", kInt, Use::kOutput);
  c.Field("positions", op.sequences.positions, "T", kInt);
  PagedRows(c, op.sequences);
}

void Check(Checker& c, const ops::KvCacheUpdate& op) {
  c.Field("k", op.k, "T KH D", kActivation);
  c.Field("v", op.v, "T KH D", kActivation);
  c.Field("k_pages", op.k_pages, "P KH 64 D", kActivation, Use::kOutput);
  c.Field("v_pages", op.v_pages, "P KH 64 D", kActivation, Use::kOutput);
  c.Field("slots", op.slots, "T", kInt);
}

void Check(Checker& c, const ops::QkDot& op) {
  c.Field("q", op.q, "T H D", kActivation);
  c.Field("scores", op.scores, "T H max_context", kF32Only, Use::kOutput);
  c.Field("k_pages", op.k_pages, "P KH 64 D", kActivation);
  c.Field("lengths", op.lengths, "T", kInt);
  PagedRows(c, op.sequences);
  Divides(c, "KH", "H");
}

void Check(Checker& c, const ops::SoftmaxMask& op) {
  c.Field("scores", op.scores, "T H max_context", kF32Only, Use::kOutput);
  c.Field("lengths", op.lengths, "T", kInt);
}

void Check(Checker& c, const ops::PvDot& op) {
  c.Field("out", op.out, "T H D", kActivation, Use::kOutput);
  c.Field("probs", op.probs, "T H max_context", kF32Only);
  c.Field("v_pages", op.v_pages, "P KH 64 D", kActivation);
  c.Field("lengths", op.lengths, "T", kInt);
  PagedRows(c, op.sequences);
  Divides(c, "KH", "H");
}

void Check(Checker& c, const ops::Attention& op) {
  c.Field("q", op.q, "T H D", kActivation);
  c.Field("out", op.out, "T H D", kActivation, Use::kOutput);
  c.Field("k_pages", op.k_pages, "P KH 64 D", kActivation);
  c.Field("v_pages", op.v_pages, "P KH 64 D", kActivation);
  c.Field("lengths", op.lengths, "T", kInt);
  PagedRows(c, op.sequences);
  Divides(c, "KH", "H");
}

void Check(Checker& c, const ops::OutputGate& op) {
  c.Field("x", op.x, "T H D", kActivation, Use::kOutput);
  c.Field("gate", op.gate, "T H D", kActivation);
}

void Check(Checker& c, const ops::ResidualAdd& op) {
  c.Field("a", op.a, "T hidden", kActivation);
  c.Field("b", op.b, "T hidden", kActivation);
  c.Field("out", op.out, "T hidden", kActivation, Use::kOutput);
}

void Check(Checker& c, const ops::SiluMul& op) {
  c.Field("gate", op.gate, "T I", kActivation);
  c.Field("up", op.up, "T I", kActivation);
  c.Field("out", op.out, "T I", kActivation, Use::kOutput);
}

void Check(Checker& c, const ops::CausalConv1d& op) {
  c.Field("x", op.x, "T C", kActivation);
  c.Field("out", op.out, "T C", kActivation, Use::kOutput);
  c.Field("weight", op.weight, "C W", kWeight);
  c.That(c["W"] >= 2, "weight has ", c["W"], " taps, must have at least 2");
  c.That(op.weight.contiguous(), "weight is ", op.weight.ShapeString(), " with gaps between rows");
  c.Bind("W-1", c["W"] - 1);
  c.Field("state", op.state, "slots W-1 C", kActivation, Use::kOutput);
  StatefulRows(c, op.sequences);
}

void Check(Checker& c, const ops::DeltaGates& op) {
  c.Field("a", op.a, "T NV", kActivation);
  c.Field("b", op.b, "T NV", kActivation);
  c.Field("beta", op.beta, "T NV", kF32Only, Use::kOutput);
  c.Field("log_decay", op.log_decay, "T NV", kF32Only, Use::kOutput);
  c.Field("a_log", op.a_log, "NV", kF32Only);
  c.Field("dt_bias", op.dt_bias, "NV", kWeight);
}

void Check(Checker& c, const ops::GatedDeltaRule& op) {
  c.Field("q", op.q, "T NK DK", kActivation);
  c.Field("k", op.k, "T NK DK", kActivation);
  c.Field("v", op.v, "T NV DV", kActivation);
  c.Field("out", op.out, "T NV DV", kActivation, Use::kOutput);
  c.Field("beta", op.beta, "T NV", kF32Only);
  c.Field("log_decay", op.log_decay, "T NV", kF32Only);
  c.Field("state", op.state, "slots NV DK DV", kF32Only, Use::kOutput);
  StatefulRows(c, op.sequences);
  Divides(c, "NK", "NV");
}

void Check(Checker& c, const ops::GatedRmsNorm& op) {
  c.Field("x", op.x, "T NV DV", kActivation);
  c.Field("z", op.z, "T NV DV", kActivation);
  c.Field("out", op.out, "T NV DV", kActivation, Use::kOutput);
  c.Field("weight", op.weight, "DV", kWeight);
}

void Check(Checker& c, const ops::TokenSampler& op) {
  c.Field("tokens", op.tokens, "T", kInt, Use::kOutput);
  c.Field("logits", op.logits, "T V", kActivation);
  c.Bind("sizeof(SamplingRow)", sizeof(SamplingRow));
  c.Field("rows", op.rows, "T sizeof(SamplingRow)", kBytes);
  c.That(op.rows.strides[0] % alignof(SamplingRow) == 0 &&
             reinterpret_cast<uintptr_t>(op.rows.data) % alignof(SamplingRow) == 0,
         "rows must be aligned to ", alignof(SamplingRow), " bytes");
  c.That(op.vocab_limit >= 1 && op.vocab_limit <= c["V"], "vocab_limit is ", op.vocab_limit,
         ", must be in [1, ", c["V"], "]");
  c.Optional("best", op.best, "T 8", kBytes);
}

// Fused operators: their parts are checked one by one, then that each takes what the one before
// gives.
void Linked(const Checker& c, const char* name, const TensorView& v, const char* from,
            const TensorView& source) {
  c.That(v.data == source.data && v.dtype == source.dtype, name, " is not ", from);
}

void Check(Checker& c, const ops::NormProjections& op) {
  for (int i = 0; i < op.count; ++i) {
    Linked(c, "a projection's x", op.projections[i].x, "the norm's out", op.norm.out);
    c.That(op.projections[i].splits == 1, "a projection is split");
  }
}

void Check(Checker& c, const ops::NormGateUpSilu& op) {
  Linked(c, "gate.x", op.gate.x, "the norm's out", op.norm.out);
  Linked(c, "up.x", op.up.x, "the norm's out", op.norm.out);
  Linked(c, "act.gate", op.act.gate, "gate.out", op.gate.out);
  Linked(c, "act.up", op.act.up, "up.out", op.up.out);
  c.That(op.gate.splits == 1 && op.up.splits == 1, "a projection is split");
}

void Check(Checker& c, const ops::GemvResidual& op) {
  Linked(c, "add.b", op.add.b, "gemv.out", op.gemv.out);
  c.That(op.gemv.splits == 1, "the projection is split");
}

void Check(Checker& c, const ops::DecodeAttention& op) {
  c.That(op.attention.q.rows() == op.attention.sequences.block_table.rows(),
         "decode has one row a sequence, not ", op.attention.q.rows(), " rows for ",
         op.attention.sequences.block_table.rows());
  Linked(c, "rope.q", op.rope.q, "attention.q", op.attention.q);
  Linked(c, "rope.k", op.rope.k, "update.k", op.update.k);
  Linked(c, "update.slots", op.update.slots, "mask.slots", op.mask.slots);
  Linked(c, "update.k_pages", op.update.k_pages, "attention.k_pages", op.attention.k_pages);
  Linked(c, "update.v_pages", op.update.v_pages, "attention.v_pages", op.attention.v_pages);
  Linked(c, "attention.lengths", op.attention.lengths, "mask.lengths", op.mask.lengths);
  if (op.norm.q) Linked(c, "norm.q", op.norm.q, "rope.q", op.rope.q);
  if (op.norm.q) Linked(c, "norm.k", op.norm.k, "rope.k", op.rope.k);
  if (op.gate.x) Linked(c, "gate.x", op.gate.x, "attention.out", op.attention.out);
}

void Check(Checker& c, const ops::LinearAttention& op) {
  c.That(op.conv.x.rows() == op.conv.sequences.state_slot.rows(),
         "decode has one row a sequence, not ", op.conv.x.rows(), " rows for ",
         op.conv.sequences.state_slot.rows());
  const int64_t keys = op.rule.k.dim(1) * op.rule.k.dim(2);
  c.That(op.conv.out.cols() == 2 * keys + op.rule.v.dim(1) * op.rule.v.dim(2), "conv.out is ",
         op.conv.out.ShapeString(), ", must hold q, k and v of the rule");
  Linked(c, "rule.q", op.rule.q, "conv.out", op.conv.out);
  Linked(c, "rule.k", op.rule.k, "conv.out behind q", op.conv.out.Slice(1, keys, 1));
  Linked(c, "rule.v", op.rule.v, "conv.out behind k", op.conv.out.Slice(1, 2 * keys, 1));
  Linked(c, "rule.beta", op.rule.beta, "gates.beta", op.gates.beta);
  Linked(c, "rule.log_decay", op.rule.log_decay, "gates.log_decay", op.gates.log_decay);
  Linked(c, "norm.x", op.norm.x, "rule.out", op.rule.out);
}

void Check(Checker& c, const ops::NormHead& op) {
  Linked(c, "head.x", op.head.x, "the norm's out", op.norm.out);
  c.That(op.head.splits == 1, "the head is split");
  c.Field("head.out", op.head.out, "T V", kActivation);
  c.Field("rows", op.rows, "T row_bytes", kBytes);
  c.That(c["row_bytes"] == sizeof(SamplingRow), "rows is ", op.rows.ShapeString(), ", must be ",
         sizeof(SamplingRow), " bytes each");
  c.Field("best", op.best, "T 8", kBytes, Use::kOutput);
  c.That(op.vocab_limit >= 1 && op.vocab_limit <= c["V"], "vocab_limit is ", op.vocab_limit,
         ", must be in [1, ", c["V"], "]");
}

// In the order of Op's alternatives.
constexpr const char* kOpNames[] = {"EmbeddingLookup", "RopeEmbed",       "Gemv",
                                    "SplitKReduce",    "RmsNorm",         "RmsNormResidualFused",
                                    "QkNorm",          "CacheMask",       "KvCacheUpdate",
                                    "QkDot",           "SoftmaxMask",     "PvDot",
                                    "Attention",       "OutputGate",      "ResidualAdd",
                                    "SiluMul",         "CausalConv1d",    "DeltaGates",
                                    "GatedDeltaRule",  "GatedRmsNorm",    "TokenSampler",
                                    "NormProjections", "NormGateUpSilu",  "GemvResidual",
                                    "DecodeAttention", "LinearAttention", "NormHead"};
static_assert(std::size(kOpNames) == std::variant_size_v<Op>);

}  // namespace

void CheckOp(const OpCall& call) {
  Checker checker(kOpNames[call.op.index()], call);
  std::visit(
      [&](const auto& op) {
        using T = std::decay_t<decltype(op)>;
        if constexpr (std::is_same_v<T, ops::NormProjections>) {
          checker.That(op.count >= 1 && op.count <= T::kMax, "count is ", op.count,
                       ", must be in [1, ", T::kMax, "]");
        }
        if constexpr (FusedOp<T>) {
          ForEachPart(op, [&](const auto& part) {
            CheckOp({.op = part, .tag = call.tag, .layer = call.layer});
          });
        }
        Check(checker, op);
      },
      call.op);
}

}  // namespace qwend
