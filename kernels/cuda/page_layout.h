// Where an element of a position's key or value lies in its row of a page on a CUDA device. A row
// keeps its elements in pieces of eight, which change places from position to position: so the same
// piece of eight neighbouring positions, copied to shared memory as they are, lies in different
// banks, as the tensor cores' loads want it. Whoever reads or writes a page goes by this.
#pragma once

#include "kernels/host_device.h"

namespace qwend::cuda {

constexpr int kPieceElements = 8;
constexpr int kPlacesRepeat = 8;  // after so many positions places are the same

// Whose place piece `i` of a position has. Of heads that are no multiple of 64 pieces stay.
QWEND_HOST_DEVICE constexpr int PieceAt(int i, int position, int head_dim) {
  return head_dim % 64 == 0 ? i ^ (position % kPlacesRepeat) : i;
}

// The place of element `i`; elements of a piece stay together.
QWEND_HOST_DEVICE constexpr int PageColumn(int i, int position, int head_dim) {
  return PieceAt(i / kPieceElements, position, head_dim) * kPieceElements + i % kPieceElements;
}

}  // namespace qwend::cuda
