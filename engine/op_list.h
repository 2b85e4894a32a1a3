// The operators of one step in order. What is appended is checked at once, so that a wrong weight
// or buffer fails while the list is built, with its tag and layer.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace qwend {

class OpList {
 public:
  // Every tag gets this in front: "" for decode, "prefill_" for prefill.
  explicit OpList(std::string tag_prefix = "") : tag_prefix_(std::move(tag_prefix)) {}

  // Throws std::invalid_argument when the operator's tensors do not fit together.
  void Add(const std::string& tag, const Op& op, int layer = -1);

  std::span<const OpCall> calls() const { return calls_; }

  // One line per operator: layer, tag, operator, then each tensor with its type and shape.
  std::string ToString() const;

 private:
  std::string tag_prefix_;
  std::vector<OpCall> calls_;
};

}  // namespace qwend
