// Cosines and sines of the rotary embedding, by position.
#pragma once

#include <vector>

namespace qwend {

struct RopeTables {
  std::vector<float> cos;  // [positions, rotary_dim / 2]
  std::vector<float> sin;  // [positions, rotary_dim / 2]
};

// Frequencies and angles are rounded to fp32 as the reference does; pair i turns by
// position * theta^(-2i / rotary_dim).
RopeTables MakeRopeTables(int positions, int rotary_dim, double theta);

}  // namespace qwend
