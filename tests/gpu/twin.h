// The same tensors on two backends, so that one operator can run on both and be compared.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"

namespace qwend::gpu {

// Index of a tensor of the pair.
struct Handle {
  int index = -1;
};

class Twin {
 public:
  // Picks one side's view of a tensor; an empty handle gives an empty view.
  using Side = std::function<TensorView(Handle)>;

  Twin(Backend& cpu, Backend& cuda, uint64_t seed) : cpu_(cpu), cuda_(cuda), random_(seed) {}

  // Normal values with the given spread, rounded to `dtype`.
  Handle Random(DType dtype, std::initializer_list<int64_t> shape, float spread = 1.0f);
  // Filled with NaN (or -1 for i32) on both sides, between guard bands: an output.
  Handle Poisoned(DType dtype, std::initializer_list<int64_t> shape);
  Handle Ints(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape);
  Handle Floats(const std::vector<float>& values, std::initializer_list<int64_t> shape);
  Handle Bytes(const void* data, std::initializer_list<int64_t> shape);
  // A projection weight: packed by each backend in its own layout.
  Handle Weight(DType dtype, int64_t rows, int64_t cols, float spread);
  // A view cut out of another tensor, the same way on both sides.
  Handle Cut(Handle from, const std::function<TensorView(const TensorView&)>& cut);

  // Runs the operator that `make` builds from each side's views.
  void Run(const std::function<Op(const Side&)>& make);

  std::vector<float> Cpu(Handle h) { return Read(cpu_, cpu_views_[h.index]); }
  std::vector<float> Cuda(Handle h) { return Read(cuda_, cuda_views_[h.index]); }

  // ||cuda - cpu|| / ||cpu|| of the whole tensor is at most `tolerance`, nothing is NaN, and the
  // guard bands still stand.
  void ExpectClose(Handle h, double tolerance, const std::string& what);
  void ExpectEqual(Handle h, const std::string& what);

  std::mt19937_64& random() { return random_; }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr unsigned char kGuardByte = 0xA5;
  Handle Add(const std::vector<char>& bytes, DType dtype, std::initializer_list<int64_t> shape);
  std::vector<float> Read(Backend& backend, const TensorView& view);
  void ExpectGuards(Handle h, const std::string& what);

  Backend& cpu_;
  Backend& cuda_;
  std::mt19937_64 random_;
  std::vector<Buffer> buffers_;
  std::vector<TensorView> cpu_views_, cuda_views_;
  std::vector<char*> guards_;  // the CUDA side's allocation, null for cuts
};

// The test's one pair of backends; skips the test, and says so, where there is no GPU.
#define QWEND_REQUIRE_GPU()                                 \
  if (qwend::CudaDeviceCount() == 0)                        \
  GTEST_SKIP() << "SKIP gpu: no NVIDIA device, or no CUDA " \
                  "build"

}  // namespace qwend::gpu
