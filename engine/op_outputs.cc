#include "engine/op_outputs.h"

#include <cstring>

#include "kernels/bf16.h"

namespace qwend {
namespace {

// One overload per operator that has more, or something else, than `out`.
struct Outputs {
  using List = std::vector<OpOutput>;

  template <typename T>
  List operator()(const T& op) const {
    return {{"out", op.out}};
  }
  List operator()(const ops::Gemv& op) const {
    if (op.splits > 1) return {{.name = "partials", .view = op.partials, .row_dim = 1}};
    return {{"out", op.out}};
  }
  List operator()(const ops::RopeEmbed& op) const { return {{"q", op.q}, {"k", op.k}}; }
  List operator()(const ops::QkNorm& op) const { return {{"q", op.q}, {"k", op.k}}; }
  List operator()(const ops::RmsNormResidualFused& op) const {
    return {{"out", op.out}, {"sum", op.sum}};
  }
  List operator()(const ops::CacheMask& op) const {
    return {{"slots", op.slots}, {"lengths", op.lengths}};
  }
  List operator()(const ops::KvCacheUpdate& /*op*/) const { return {}; }
  List operator()(const ops::QkDot& op) const { return {{"scores", op.scores, op.lengths}}; }
  List operator()(const ops::SoftmaxMask& op) const { return {{"scores", op.scores, op.lengths}}; }
  List operator()(const ops::OutputGate& op) const { return {{"x", op.x}}; }
  List operator()(const ops::DeltaGates& op) const {
    return {{"beta", op.beta}, {"log_decay", op.log_decay}};
  }
  List operator()(const ops::TokenSampler& op) const { return {{"tokens", op.tokens}}; }
  List operator()(const ops::NormProjections& op) const {
    static constexpr const char* kNames[ops::NormProjections::kMax] = {"out 0", "out 1", "out 2",
                                                                       "out 3"};
    List outputs;
    for (int i = 0; i < op.count; ++i) outputs.push_back({kNames[i], op.projections[i].out});
    return outputs;
  }
  List operator()(const ops::NormGateUpSilu& op) const { return {{"out", op.act.out}}; }
  List operator()(const ops::GemvResidual& op) const { return {{"out", op.add.out}}; }
  List operator()(const ops::DecodeAttention& op) const { return {{"out", op.attention.out}}; }
  List operator()(const ops::LinearAttention& op) const { return {{"out", op.norm.out}}; }
  List operator()(const ops::NormHead& op) const { return {{"logits", op.head.out}}; }
};

// Calls take(pointer to the element) for each element in order.
template <typename Take>
void ForEachElement(Backend& backend, const TensorView& view, const Take& take) {
  Require(view.layout == Layout::kRowMajor, "reading a packed tensor ", view.ShapeString());
  if (view.elements() == 0) return;
  int64_t last = 0;  // offset of the last element
  for (int d = 0; d < view.rank; ++d) last += (view.shape[d] - 1) * view.strides[d];
  const int64_t size = SizeOf(view.dtype);
  std::vector<char> bytes((last + 1) * size);
  backend.CopyToHost(bytes.data(), view.data, static_cast<int64_t>(bytes.size()));
  std::array<int64_t, TensorView::kMaxRank> at{};
  for (int64_t i = 0; i < view.elements(); ++i) {
    int64_t offset = 0;
    for (int d = 0; d < view.rank; ++d) offset += at[d] * view.strides[d];
    take(bytes.data() + offset * size);
    for (int d = view.rank - 1; d >= 0 && ++at[d] == view.shape[d]; --d) at[d] = 0;
  }
}

template <typename T>
T Load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace

std::vector<OpOutput> OutputsOf(const Op& op) { return std::visit(Outputs{}, op); }

std::vector<float> ReadFloats(Backend& backend, const TensorView& view) {
  std::vector<float> out;
  out.reserve(view.elements());
  const auto read = [&](auto convert) {
    ForEachElement(backend, view, [&](const char* at) { out.push_back(convert(at)); });
  };
  if (view.dtype == DType::kF32) {
    read(Load<float>);
  } else if (view.dtype == DType::kBF16) {
    read([](const char* at) { return Bf16ToFloat(Load<uint16_t>(at)); });
  } else {
    Require(view.dtype == DType::kF16, "ReadFloats: ", view.ShapeString());
    read([](const char* at) { return Fp16ToFloat(Load<uint16_t>(at)); });
  }
  return out;
}

std::vector<int32_t> ReadInts(Backend& backend, const TensorView& view) {
  Require(view.dtype == DType::kI32, "ReadInts: ", view.ShapeString());
  std::vector<int32_t> out;
  out.reserve(view.elements());
  ForEachElement(backend, view, [&](const char* at) { out.push_back(Load<int32_t>(at)); });
  return out;
}

}  // namespace qwend
