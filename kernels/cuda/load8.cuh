// Loads of eight consecutive elements, the unit in which projections read weights and activations.
#pragma once

#include "kernels/cuda/launch.cuh"

namespace qwend::cuda {

// Eight consecutive elements, widened to f32: one 16- or two 16-byte loads.
struct Eight {
  float v[8];
};
__device__ __forceinline__ Eight Widen(uint4 w) {
  return {{LowBf16(w.x), HighBf16(w.x), LowBf16(w.y), HighBf16(w.y), LowBf16(w.z), HighBf16(w.z),
           LowBf16(w.w), HighBf16(w.w)}};
}

template <typename A>
__device__ __forceinline__ Eight LoadEight(const A* x) {
  if constexpr (std::is_same_v<A, float>) {
    const float4 a = *reinterpret_cast<const float4*>(x),
                 b = *reinterpret_cast<const float4*>(x + 4);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  } else {
    return Widen(*reinterpret_cast<const uint4*>(x));
  }
}

}  // namespace qwend::cuda
