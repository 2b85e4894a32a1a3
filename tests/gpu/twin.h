// The same tensors on two backends, so that one operator can run on both and be compared.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
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

  // `cuda` may be a second CPU backend.
  Twin(Backend& cpu, Backend& cuda, bool on_cuda, uint64_t seed)
      : cpu_(cpu), cuda_(cuda), on_cuda_(on_cuda), random_(seed) {}

  // Normal values with the given spread, rounded to `dtype`.
  Handle Random(DType dtype, std::initializer_list<int64_t> shape, float spread = 1.0f);
  // Key or value pages, [P, KH, 64, D], bf16: on each side in its own layout.
  Handle Pages(int64_t pages, int64_t kv_heads, int64_t head_dim);
  // Filled with NaN (or -1 for i32) on both sides, between guard bands: an output.
  Handle Poisoned(DType dtype, std::initializer_list<int64_t> shape);
  Handle Ints(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape);
  Handle Floats(const std::vector<float>& values, std::initializer_list<int64_t> shape);
  Handle Bytes(const void* data, std::initializer_list<int64_t> shape);
  // A projection weight: packed by each backend in its own layout.
  Handle Weight(DType dtype, int64_t rows, int64_t cols, float spread);
  Handle Weight(DType dtype, int64_t rows, int64_t cols, const std::vector<float>& values);
  // A view cut out of another tensor, the same way on both sides.
  Handle Cut(Handle from, const std::function<TensorView(const TensorView&)>& cut);

  // Gives `to` the contents of `from`, a whole tensor of the same shape and type.
  void Restore(Handle to, Handle from);

  // Runs the operator that `make` builds from each side's views, checked as a list would check it.
  void Run(const std::function<Op(const Side&)>& make);

  std::vector<float> Cpu(Handle h) { return Read(cpu_, cpu_views_[h.index]); }
  std::vector<float> Cuda(Handle h);

  // ||cuda - cpu|| / ||cpu|| of the whole tensor is at most `tolerance`, nothing is NaN, and the
  // guard bands still stand.
  void ExpectClose(Handle h, double tolerance, const std::string& what);
  void ExpectEqual(Handle h, const std::string& what);

  std::mt19937_64& random() { return random_; }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr unsigned char kGuardByte = 0xA5;
  Handle Add(const std::vector<char>& bytes, DType dtype, std::initializer_list<int64_t> shape);
  Handle Add(const std::vector<char>& cpu_bytes, const std::vector<char>& cuda_bytes, DType dtype,
             std::initializer_list<int64_t> shape);
  std::vector<float> Normal(int64_t count, float spread);
  std::vector<float> InPageLayout(const std::vector<float>& values, int64_t head_dim) const;
  std::vector<float> Read(Backend& backend, const TensorView& view);
  void ExpectGuards(Handle h, const std::string& what);

  Backend& cpu_;
  Backend& cuda_;
  const bool on_cuda_;
  std::mt19937_64 random_;
  std::vector<Buffer> buffers_;
  std::vector<TensorView> cpu_views_, cuda_views_;
  std::set<int> pages_;        // handles of pages
  std::vector<char*> guards_;  // the CUDA side's allocation, null for cuts
};

// Skips the test, and says so, where there is no GPU.
#define QWEND_REQUIRE_GPU()                                 \
  if (qwend::CudaDeviceCount() == 0)                        \
  GTEST_SKIP() << "SKIP gpu: no NVIDIA device, or no CUDA " \
                  "build"

// A pair of backends for the suite, a twin for each test. The seed is printed; QWEND_TEST_SEED
// repeats one. QWEND_OPS_TEST_BACKEND=cpu puts a second CPU backend in CUDA's place, to try the
// tests themselves.
class TwinTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite();
  static void TearDownTestSuite();
  void SetUp() override;
  static bool OnCuda();

  Handle Rows(Handle from, int first, int count) {
    return twin_->Cut(from, [=](const TensorView& v) { return v.Slice(0, first, count); });
  }
  Handle Columns(Handle from, int first, int count) {
    return twin_->Cut(from, [=](const TensorView& v) { return v.Slice(1, first, count); });
  }
  // A weight whose products are about as large as x.
  Handle Projection(int n, int k, DType dtype = DType::kBF16) {
    return twin_->Weight(dtype, n, k, 1.0f / std::sqrt(static_cast<float>(k)));
  }
  // Row by row, so that no row's error hides behind the others' size.
  void ExpectRowsClose(Handle h, int rows, double tolerance, const std::string& what) {
    for (int r = 0; r < rows; ++r)
      twin_->ExpectClose(Rows(h, r, 1), tolerance, what + " row " + std::to_string(r));
    twin_->ExpectClose(h, tolerance, what);
  }
  // run(first, count) runs rows [first, first + count) of 64; probe(row) is what CUDA made of one
  // of them.
  template <typename Run, typename Probe>
  void ExpectRowBits(Run run, Probe probe) {
    for (const bool last : {false, true}) {
      run(last ? 63 : 0, 1);
      const std::vector<float> alone = probe(0);
      for (const int count : {2, 4, 5, 8, 17, 64}) {
        run(last ? 64 - count : 0, count);
        EXPECT_TRUE(probe(last ? count - 1 : 0) == alone)
            << (last ? "the last" : "the first") << " of " << count << " rows";
      }
    }
  }

  static std::unique_ptr<Backend> cpu_, cuda_;
  std::unique_ptr<Twin> twin_;
  std::unique_ptr<::testing::ScopedTrace> trace_;
};

}  // namespace qwend::gpu
