// What the delta rule's inner loops are given: some tokens of one head of one sequence, as f32.
#pragma once

#include <cstdint>

namespace qwend::cpu {

struct DeltaHead {
  int64_t tokens;
  int64_t dk;
  const float* qk;      // [tokens, 2, dk]: q and k, normalised, q also scaled
  const float* qk_dot;  // [tokens]: q . k
  const float* beta;    // [tokens]
  const float* decay;   // [tokens]: exp(log_decay)
  const float* v;       // [tokens, dv]
  int64_t v_stride;
  float* out;  // [tokens, dv]
  int64_t out_stride;
  float* state;  // [dk, dv]
  int64_t state_stride;
};

}  // namespace qwend::cpu
