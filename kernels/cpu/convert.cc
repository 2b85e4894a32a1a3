#include "kernels/cpu/convert.h"

#include <cstring>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convert.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void WidenBf16(const uint16_t* from, int64_t n, float* to) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint32_t, decltype(d)> du32;
  const hn::Rebind<uint16_t, decltype(d)> du16;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(du16, from + i)));
    hn::StoreU(hn::BitCast(d, bits), d, to + i);
  }
  for (; i < n; ++i) to[i] = Bf16ToFloat(from[i]);
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
HWY_EXPORT(WidenBf16);

void ToFloats(const void* from, DType type, int64_t n, float* to) {
  switch (type) {
    case DType::kF32:
      std::memcpy(to, from, n * sizeof(float));
      return;
    case DType::kBF16:
      HWY_DYNAMIC_DISPATCH(WidenBf16)(static_cast<const uint16_t*>(from), n, to);
      return;
    case DType::kF16:
      for (int64_t i = 0; i < n; ++i) to[i] = Fp16ToFloat(static_cast<const uint16_t*>(from)[i]);
      return;
    default:
      Require(false, "ToFloats: ", Name(type), " is not a float type");
  }
}

void FromFloats(const float* from, int64_t n, DType type, void* to) {
  if (type == DType::kF32) {
    std::memcpy(to, from, n * sizeof(float));
    return;
  }
  Require(type == DType::kBF16, "FromFloats: outputs are f32 or bf16, not ", Name(type));
  for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(to)[i] = FloatToBf16(from[i]);
}

float* Scratch(ScratchSlot slot, int64_t n) {
  thread_local std::vector<float> slots[static_cast<int>(ScratchSlot::kCount)];
  std::vector<float>& memory = slots[static_cast<int>(slot)];
  if (static_cast<int64_t>(memory.size()) < n) memory.resize(n);
  return memory.data();
}

}  // namespace qwend::cpu
#endif
