// Shape and type checks of every operator, made once when a list is built; kernels then trust their
// arguments.
#pragma once

#include "kernels/ops.h"

namespace qwend {

// Throws std::invalid_argument naming the operator, the field, both shapes and, when given, tag and
// layer.
void CheckOp(const OpCall& call);

}  // namespace qwend
