// Depthwise causal convolution with SiLU. A worker takes a block of channels through all tokens of
// all sequences: its weights lie transposed in cache, and a slot's columns are touched by one
// thread only. Each output is one chain over the taps, oldest first.
#include <algorithm>
#include <vector>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/causal_conv.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace qwend::cpu::HWY_NAMESPACE {

// weight [n, width] to taps [width, n].
void TransposeTaps(const float* weight, int64_t n, int64_t width, float* taps) {
  int64_t c = 0;
  if (width == 4) {
    for (; c + kLanes <= n; c += kLanes) {
      FloatVec a, b, e, f;
      hn::LoadInterleaved4(FloatTag(), weight + c * 4, a, b, e, f);
      hn::StoreU(a, FloatTag(), taps + c);
      hn::StoreU(b, FloatTag(), taps + n + c);
      hn::StoreU(e, FloatTag(), taps + 2 * n + c);
      hn::StoreU(f, FloatTag(), taps + 3 * n + c);
    }
  }
  for (; c < n; ++c) {
    for (int64_t j = 0; j < width; ++j) taps[j * n + c] = weight[c * width + j];
  }
}

// out[c] = silu(sum over j of taps[j][c] * samples[j][c]).
void ConvolveRow(const float* taps, const float* const* samples, int64_t width, int64_t n,
                 float* out) {
  for (int64_t c = 0; c < n; c += 16) {
    F16 sum = Mul(Load(taps + c, n - c), Load(samples[0] + c, n - c));
    for (int64_t j = 1; j < width; ++j) {
      sum = MulAdd(Load(taps + j * n + c, n - c), Load(samples[j] + c, n - c), sum);
    }
    Store(Silu(sum), out + c, n - c);
  }
}

}  // namespace qwend::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace qwend::cpu {
namespace {

HWY_EXPORT(TransposeTaps);
HWY_EXPORT(ConvolveRow);

constexpr int64_t kBlockChannels = 256;

// Channels [first, first + n) of one sequence.
void ConvolveSequence(const ops::CausalConv1d& op, int64_t first, int64_t n, const float* taps,
                      int64_t row_begin, int64_t row_end, int32_t slot) {
  const int64_t width = op.weight.cols();
  const int64_t past = width - 1;
  const int64_t tokens = row_end - row_begin;
  const auto x_at = [&](int64_t t) {
    return static_cast<char*>(RowAt(op.x, row_begin + t)) + first * SizeOf(op.x.dtype);
  };
  const auto state_at = [&](int64_t i) {
    return static_cast<char*>(RowAt(op.state, slot, i)) + first * SizeOf(op.state.dtype);
  };
  // The samples in order of time, as a ring of the last `width`: the state's columns, then x.
  float* ring = Scratch(ScratchSlot::kWork, width * n);
  thread_local std::vector<const float*> samples;
  samples.resize(width);
  for (int64_t i = 0; i < past; ++i) {
    samples[i] = ring + i * n;
    ToFloats(state_at(i), op.state.dtype, n, ring + i * n);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    if (op.x.dtype == DType::kF32) {
      samples[past] = reinterpret_cast<const float*>(x_at(t));
    } else {
      float* newest = ring + ((past + t) % width) * n;
      ToFloats(x_at(t), op.x.dtype, n, newest);
      samples[past] = newest;
    }
    void* out_at = static_cast<char*>(RowAt(op.out, row_begin + t)) + first * SizeOf(op.out.dtype);
    float* out = WriteFloats(out_at, op.out.dtype, n, ScratchSlot::kOutA);
    HWY_DYNAMIC_DISPATCH(ConvolveRow)(taps, samples.data(), width, n, out);
    WriteBack(out, n, op.out.dtype, out_at);
    std::rotate(samples.begin(), samples.begin() + 1, samples.end());
  }
  for (int64_t i = 0; i < past; ++i) FromFloats(samples[i], n, op.state.dtype, state_at(i));
}

}  // namespace

void Run(const ops::CausalConv1d& op, const LaunchContext& ctx) {
  const int64_t channels = op.x.cols();
  const int64_t width = op.weight.cols();
  const int32_t* query_start = op.sequences.query_start.As<int32_t>();
  const int32_t* slots = op.sequences.state_slot.As<int32_t>();
  const int64_t blocks = (channels + kBlockChannels - 1) / kBlockChannels;
  const int64_t work = op.x.rows() * kBlockChannels * (width + 6);
  ctx.pool.ParallelFor(blocks, GrainFor(work), [&](int64_t begin, int64_t end, int) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kBlockChannels;
      const int64_t n = std::min(kBlockChannels, channels - first);
      const float* weight =
          ReadFloats(RowAt(op.weight, first), op.weight.dtype, n * width, ScratchSlot::kInA);
      float* taps = Scratch(ScratchSlot::kWeight, n * width);
      HWY_DYNAMIC_DISPATCH(TransposeTaps)(weight, n, width, taps);
      for (int64_t s = 0; s < op.sequences.state_slot.rows(); ++s) {
        ConvolveSequence(op, first, n, taps, query_start[s], query_start[s + 1], slots[s]);
      }
    }
  });
}

}  // namespace qwend::cpu
#endif
