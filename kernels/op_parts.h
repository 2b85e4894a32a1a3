// The plain operators that a fused one stands for, in their order.
#pragma once

#include "kernels/ops.h"

namespace qwend {

template <typename F>
void ForEachPart(const ops::NormProjections& op, F&& f) {
  f(op.norm);
  for (int i = 0; i < op.count; ++i) f(op.projections[i]);
}

template <typename F>
void ForEachPart(const ops::NormGateUpSilu& op, F&& f) {
  f(op.norm);
  f(op.gate);
  f(op.up);
  f(op.act);
}

template <typename F>
void ForEachPart(const ops::GemvResidual& op, F&& f) {
  f(op.gemv);
  f(op.add);
}

template <typename F>
void ForEachPart(const ops::DecodeAttention& op, F&& f) {
  f(op.mask);
  if (op.norm.q) f(op.norm);
  f(op.rope);
  f(op.update);
  f(op.attention);
  if (op.gate.x) f(op.gate);
}

template <typename F>
void ForEachPart(const ops::LinearAttention& op, F&& f) {
  f(op.conv);
  f(op.gates);
  f(op.rule);
  f(op.norm);
}

template <typename F>
void ForEachPart(const ops::NormHead& op, F&& f) {
  f(op.norm);
  f(op.head);
}

struct IgnorePart {
  template <typename Part>
  void operator()(const Part&) const {}
};
template <typename T>
concept FusedOp = requires(const T& op) {
  ForEachPart(op, IgnorePart());
};

}  // namespace qwend
