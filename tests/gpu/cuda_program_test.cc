// A compiled list on the GPU: an operator that cannot be compiled is named, and the backend goes on
// working.
#include "tests/gpu/twin.h"

namespace qwend::gpu {
namespace {

class CudaProgramTest : public TwinTest {
 protected:
  // A view of fresh zeros on the GPU. The buffers live as long as the test.
  TensorView Zeros(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView view = TensorView::Of(nullptr, dtype, shape);
    buffers_.push_back(cuda_->Allocate(view.bytes()));
    view.data = buffers_.back().data();
    return view;
  }
  std::string CompileError(const std::vector<OpCall>& calls) {
    try {
      cuda_->Compile(calls);
    } catch (const DeviceError& e) {
      return e.what();
    }
    return "no DeviceError";
  }

  std::vector<Buffer> buffers_;
};

TEST_F(CudaProgramTest, AnOperatorThatCannotBeCompiledIsNamedAndTheBackendGoesOn) {
  if (!OnCuda()) GTEST_SKIP() << "SKIP gpu: the CPU takes every head size";
  const TensorView a = Zeros(DType::kF32, {2, 96}), out = Zeros(DType::kF32, {2, 96});
  const OpCall silu{ops::SiluMul{.out = out, .gate = a, .up = a}, "silu_mul", 3};
  const StepSequences sequences{Zeros(DType::kI32, {2}), Zeros(DType::kI32, {1}),
                                Zeros(DType::kI32, {1}), Zeros(DType::kI32, {1, 1}),
                                Zeros(DType::kI32, {1})};
  // 48 is no head size that a kernel is built for.
  const OpCall scores{ops::QkDot{.scores = Zeros(DType::kF32, {1, 2, 64}),
                                 .q = Zeros(DType::kF32, {1, 2, 48}),
                                 .k_pages = Zeros(DType::kBF16, {1, 1, kPageTokens, 48}),
                                 .lengths = Zeros(DType::kI32, {1}),
                                 .sequences = sequences},
                      "qk_dot", 7};
  const std::string message = CompileError({silu, scores, silu});
  EXPECT_NE(message.find("operator qk_dot of layer 7"), std::string::npos) << message;
  EXPECT_NE(message.find("48"), std::string::npos) << message;

  const std::vector<float> ones(2 * 96, 1.0f);
  cuda_->CopyToDevice(a.data, ones.data(), a.bytes());
  const std::unique_ptr<Program> program = cuda_->Compile(std::vector<OpCall>{silu});
  cuda_->Zero(out.data, out.bytes());
  program->Run();
  std::vector<float> result(ones.size());
  cuda_->CopyToHost(result.data(), out.data, out.bytes());
  EXPECT_NEAR(result.front(), 0.7310586f, 1e-6f);
  EXPECT_EQ(result, std::vector<float>(ones.size(), result.front()));
}

}  // namespace
}  // namespace qwend::gpu
