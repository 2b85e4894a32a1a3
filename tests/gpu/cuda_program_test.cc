// A compiled list on the GPU: an operator that cannot be compiled is named, and the backend goes on
// working; a port's steps have their own inputs and outputs, however many are queued.
#include <algorithm>
#include <deque>

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

// a += b in two operators, with a port to both; the outputs begin a. Sizes that no round of the
// port's kernels fits, and small integers as values, so that every sum is exact.
class StepPortTest : public CudaProgramTest {
 protected:
  static constexpr int kHalf = 12500, kOutputs = 1003;               // floats
  static constexpr int64_t kUnits = 2 * kHalf * sizeof(float) / 16;  // of 16 bytes

  void SetUp() override {
    CudaProgramTest::SetUp();
    if (IsSkipped()) return;
    region_ = Zeros(DType::kF32, {2, kHalf});
    const TensorView a = region_.Slice(0, 0, 1), b = region_.Slice(0, 1, 1);
    const TensorView sum = Zeros(DType::kF32, {1, kHalf}), zeros = Zeros(DType::kF32, {1, kHalf});
    port_ = cuda_->MakeStepPort(region_.data, region_.bytes(), region_.data,
                                kOutputs * int64_t{sizeof(float)});
    const OpCall add{ops::ResidualAdd{.out = sum, .a = a, .b = b}, "add", -1};
    const OpCall keep{ops::ResidualAdd{.out = a, .a = sum, .b = zeros}, "keep", -1};
    const std::vector<OpCall> calls = {add, keep};
    for (auto& program : programs_) program = cuda_->Compile(calls, port_.get());
    cuda_->Zero(region_.data, region_.bytes());
  }

  // New values in bytes [begin, end) alone.
  void Put(int64_t begin, int64_t end) {
    std::vector<float> image(want_.size());
    for (float& x : image) x = static_cast<float>(static_cast<int>(twin_->random()() % 17) - 8);
    port_->Put(image.data(), begin, end);
    std::copy(image.begin() + begin / 4, image.begin() + end / 4, want_.begin() + begin / 4);
  }
  void PutAny() {
    int64_t begin = static_cast<int64_t>(twin_->random()() % (kUnits + 1)) * 16;
    int64_t end = static_cast<int64_t>(twin_->random()() % (kUnits + 1)) * 16;
    if (begin > end) std::swap(begin, end);
    Put(begin, end);
  }
  void Run(bool timed = false) {
    Program& program = *programs_[runs_++ % 2];
    timed ? static_cast<void>(program.RunTimed()) : program.Run();
    for (int i = 0; i < kHalf; ++i) want_[i] += want_[kHalf + i];
  }
  std::vector<float> Wanted() const { return {want_.begin(), want_.begin() + kOutputs}; }
  std::vector<float> Collect() {
    const auto* outputs = static_cast<const float*>(port_->Collect());
    return {outputs, outputs + kOutputs};
  }
  void ExpectRegion() {
    std::vector<float> region(want_.size());
    cuda_->CopyToHost(region.data(), region_.data, region_.bytes());
    EXPECT_TRUE(region == want_);
  }

  TensorView region_;
  std::vector<float> want_ = std::vector<float>(2 * kHalf);  // of the region after all runs so far
  std::unique_ptr<StepPort> port_;
  std::unique_ptr<Program> programs_[2];
  int runs_ = 0;
};

TEST_F(StepPortTest, AThousandStepsWithTwoInFlight) {
  const int64_t allocations = cuda_->AllocationCount();
  std::deque<std::vector<float>> wanted;
  for (int step = 0; step < 1000; ++step) {
    PutAny();
    Run(/*timed=*/step % 7 == 3);
    wanted.push_back(Wanted());
    if (step % 50 == 20) Run();  // for which nothing was put
    if (wanted.size() < 2) continue;
    ASSERT_TRUE(Collect() == wanted.front()) << "step " << step - 1;
    wanted.pop_front();
  }
  ASSERT_TRUE(Collect() == wanted.front());
  ExpectRegion();
  EXPECT_EQ(cuda_->AllocationCount(), allocations);
}

TEST_F(StepPortTest, QueuedRunsTakeOnlyWhatWasPutForThem) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (int i = 0; i < 30; ++i) Run();
    PutAny();  // while they may still run
    Run();
    const std::vector<float> wanted = Wanted();
    for (int i = 0; i < 30; ++i) Run();
    ASSERT_TRUE(Collect() == wanted);
    EXPECT_THROW(port_->Collect(), std::invalid_argument);
  }
  ExpectRegion();
}

TEST_F(StepPortTest, HoldsAFewStepsAndRefusesMore) {
  EXPECT_THROW(port_->Collect(), std::invalid_argument);
  std::vector<std::vector<float>> wanted;
  for (int repeat = 0; repeat < 3; ++repeat) {
    wanted.clear();
    for (int i = 0; i < StepPort::kPlaces; ++i) {
      PutAny();
      Run();
      wanted.push_back(Wanted());
    }
    EXPECT_THROW(port_->Put(want_.data(), 0, 16), std::invalid_argument);
    std::vector<const float*> outputs;
    for (size_t i = 0; i < wanted.size(); ++i)
      outputs.push_back(static_cast<const float*>(port_->Collect()));
    for (size_t i = 0; i < wanted.size(); ++i)
      EXPECT_TRUE(std::equal(wanted[i].begin(), wanted[i].end(), outputs[i])) << i;
  }
  EXPECT_THROW(port_->Put(want_.data(), 0, 8), std::invalid_argument);
  EXPECT_THROW(port_->Put(want_.data(), 0, region_.bytes() + 16), std::invalid_argument);
  Put(0, 0);
  EXPECT_THROW(port_->Collect(), std::invalid_argument) << "it was not run";
  Run();
  EXPECT_TRUE(Collect() == Wanted());
  ExpectRegion();
}

}  // namespace
}  // namespace qwend::gpu
