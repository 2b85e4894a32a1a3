#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/float_types.h"
#include "kernels/cpu/panels.h"

namespace qwend {
namespace {

TEST(CpuBackend, Info) {
  const auto backend = MakeCpuBackend(2);
  const BackendInfo info = backend->Info();
  EXPECT_EQ(info.name, "cpu");
  EXPECT_NE(info.device_name.find("2 threads"), std::string::npos) << info.device_name;
  EXPECT_EQ(info.activation_type, DType::kF32);
  EXPECT_EQ(info.kv_type, DType::kF32);
  EXPECT_EQ(info.conv_type, DType::kF32);
  EXPECT_GT(info.memory_bytes, 0);
  EXPECT_GT(info.free_bytes, 0);
  EXPECT_LE(info.free_bytes, info.memory_bytes);
  EXPECT_THROW(MakeCpuBackend(-1), std::invalid_argument);
}

TEST(CpuBackend, AllocatesAlignedZeros) {
  const auto backend = MakeCpuBackend(1);
  for (const int64_t bytes :
       {int64_t{1}, int64_t{4096}, int64_t{1} << 20, (int64_t{5} << 20) + 3}) {
    const Buffer buffer = backend->Allocate(bytes);
    ASSERT_NE(buffer.data(), nullptr);
    EXPECT_EQ(buffer.bytes(), bytes);
    const auto address = reinterpret_cast<uintptr_t>(buffer.data());
    EXPECT_EQ(address % (bytes >= 1 << 20 ? 2 << 20 : 4096), 0u);
    char* data = static_cast<char*>(buffer.data());
    EXPECT_TRUE(std::all_of(data, data + bytes, [](char c) { return c == 0; }));
    std::memset(data, 1, static_cast<size_t>(bytes));
    backend->Zero(data, bytes);
    EXPECT_TRUE(std::all_of(data, data + bytes, [](char c) { return c == 0; }));
  }
  EXPECT_EQ(backend->Allocate(0).bytes(), 0);
}

TEST(CpuBackend, RefusesMoreMemoryThanThereIs) {
  const auto backend = MakeCpuBackend(1);
  try {
    backend->Allocate(backend->Info().memory_bytes * 2);
    FAIL() << "twice the machine's memory was allocated";
  } catch (const DeviceError& e) {
    EXPECT_NE(std::string(e.what()).find("available"), std::string::npos) << e.what();
  }
}

TEST(CpuBackend, Copies) {
  const auto backend = MakeCpuBackend(1);
  std::vector<int> from(1000);
  std::iota(from.begin(), from.end(), 0);
  const Buffer buffer = backend->Allocate(4000);
  backend->CopyToDevice(buffer.data(), from.data(), 4000);
  std::vector<int> to(1000);
  backend->CopyToHost(to.data(), buffer.data(), 4000);
  EXPECT_EQ(from, to);
}

TEST(CpuBackend, PacksEveryWeightType) {
  const auto backend = MakeCpuBackend(3);
  constexpr int64_t kRows = 200;
  constexpr int64_t kCols = 37;
  for (const DType type : {DType::kBF16, DType::kF16, DType::kF32}) {
    std::vector<char> host(kRows * kCols * SizeOf(type));
    for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<char>((i * 7 + 1) % 60);
    const int64_t bytes = backend->PackedBytes(type, kRows, kCols);
    const Buffer buffer = backend->Allocate(bytes);
    const TensorView packed =
        backend->Pack(TensorView::Of(host.data(), type, {kRows, kCols}), buffer.data());
    EXPECT_EQ(packed.layout, Layout::kCpuPanels);
    EXPECT_EQ(packed.dtype, type == DType::kBF16 ? DType::kBF16 : DType::kF32);
    EXPECT_EQ(packed.rows(), kRows);
    EXPECT_EQ(packed.cols(), kCols);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t k = 0; k < kCols; ++k) {
        ASSERT_EQ(cpu::PanelElement(packed, r, k),
                  cpu::LoadElement(host.data(), type, r * kCols + k));
      }
    }
  }
}

TEST(CpuBackend, PackNamesWhatItCannotTake) {
  const auto backend = MakeCpuBackend(1);
  std::vector<char> host(64);
  EXPECT_THROW(backend->Pack(TensorView::Of(host.data(), DType::kU8, {8, 8}), host.data()),
               std::invalid_argument);
  EXPECT_THROW(backend->Pack(TensorView::Of(host.data(), DType::kF32, {8}), host.data()),
               std::invalid_argument);
}

// x [1, 2] -> hidden [1, 3] -> out [1, 2], with x read anew at each run.
TEST(CpuBackend, ProgramsReadTheirInputsAtEachRun) {
  const auto backend = MakeCpuBackend(2);
  std::vector<float> first = {1, 2, 3, 4, 5, 6};    // [3, 2]
  std::vector<float> second = {1, 0, 1, 0, 1, -1};  // [2, 3]
  std::vector<float> x = {1, 1};
  std::vector<float> hidden(3);
  std::vector<float> out(2);
  const TensorView hidden_view = TensorView::Of(hidden.data(), DType::kF32, {1, 3});
  std::vector<OpCall> calls;
  calls.push_back({ops::Gemv{.out = hidden_view,
                             .x = TensorView::Of(x.data(), DType::kF32, {1, 2}),
                             .weight = TensorView::Of(first.data(), DType::kF32, {3, 2}),
                             .bias = {},
                             .partials = {}},
                   "first", -1});
  calls.push_back({ops::Gemv{.out = TensorView::Of(out.data(), DType::kF32, {1, 2}),
                             .x = hidden_view,
                             .weight = TensorView::Of(second.data(), DType::kF32, {2, 3}),
                             .bias = {},
                             .partials = {}},
                   "second", -1});
  const auto program = backend->Compile(calls);
  calls.clear();
  program->Run();
  EXPECT_EQ(out, (std::vector<float>{14, -4}));  // hidden 3 7 11
  x = {2, -1};
  const std::span<const double> seconds = program->RunTimed();
  EXPECT_EQ(out, (std::vector<float>{4, -2}));  // hidden 0 2 4
  ASSERT_EQ(seconds.size(), 2u);
  for (const double s : seconds) {
    EXPECT_GE(s, 0.0);
    EXPECT_LT(s, 1.0);
  }
  backend->Run(ops::Gemv{.out = TensorView::Of(out.data(), DType::kF32, {1, 2}),
                         .x = hidden_view,
                         .weight = TensorView::Of(second.data(), DType::kF32, {2, 3}),
                         .bias = TensorView::Of(x.data(), DType::kF32, {2}),
                         .partials = {}});
  backend->Synchronize();
  EXPECT_EQ(out, (std::vector<float>{6, -3}));
}

using Four = std::vector<float>;

// a += b, with a port to both; the outputs are a.
class CpuStepPort : public testing::Test {
 protected:
  static constexpr int64_t kHalf = 16, kAll = 32;  // bytes
  CpuStepPort() {
    const OpCall add{ops::ResidualAdd{.out = View(0), .a = View(0), .b = View(4)}, "add", -1};
    program_ = backend_->Compile({&add, 1}, port_.get());
  }
  TensorView View(int first) { return TensorView::Of(region_.data() + first, DType::kF32, {1, 4}); }
  // All of a is `a`, all of b is `b`.
  void Put(float a, float b, int64_t begin, int64_t end) {
    std::vector<float> image = {a, a, a, a, b, b, b, b};
    port_->Put(image.data(), begin, end);
    std::fill(image.begin(), image.end(), -1.0f);  // the port has copied it
  }
  const float* Next() { return static_cast<const float*>(port_->Collect()); }
  Four Collect() {
    const float* next = Next();
    return {next, next + 4};
  }

  const std::unique_ptr<Backend> backend_ = MakeCpuBackend(1);
  std::vector<float> region_ = std::vector<float>(8);
  const std::unique_ptr<StepPort> port_ =
      backend_->MakeStepPort(region_.data(), kAll, region_.data(), kHalf);
  std::unique_ptr<Program> program_;
};

TEST_F(CpuStepPort, ARunTakesWhatWasPutAndLeavesItsOutputs) {
  Put(1, 10, 0, kAll);
  EXPECT_EQ(region_, std::vector<float>(8)) << "taken before the run";
  program_->Run();
  EXPECT_EQ(Collect(), Four(4, 11));
  Put(-1, 20, kHalf, kAll);  // a stays as the step before left it
  EXPECT_EQ(program_->RunTimed().size(), 1u);
  EXPECT_EQ(Collect(), Four(4, 31));
  Put(5, -1, 0, kHalf);
  program_->Run();
  EXPECT_EQ(Collect(), Four(4, 25));
  Put(-1, -1, kHalf, kHalf);  // nothing new, but outputs
  program_->Run();
  EXPECT_EQ(Collect(), Four(4, 45));
}

TEST_F(CpuStepPort, StepsInFlightKeepTheirOrder) {
  Put(0, 1, 0, kAll);
  program_->Run();
  Put(0, 2, kHalf, kAll);
  program_->Run();
  const float* first = Next();
  const float* second = Next();
  // Both put before either ran.
  Put(100, 3, 0, kAll);
  Put(0, 4, kHalf, kAll);
  program_->Run();
  program_->Run();
  EXPECT_EQ(Four(first, first + 4), Four(4, 1)) << "did not stay";
  EXPECT_EQ(Four(second, second + 4), Four(4, 3)) << "did not stay";
  EXPECT_EQ(Collect(), Four(4, 103));
  EXPECT_EQ(Collect(), Four(4, 107));
}

TEST_F(CpuStepPort, ARunForWhichNothingWasPutKeepsTheInputsAndLeavesNothing) {
  region_ = {1, 1, 1, 1, 2, 2, 2, 2};
  program_->Run();
  EXPECT_THROW(Collect(), std::invalid_argument);
  Put(0, 10, kHalf, kAll);
  program_->Run();
  program_->Run();
  EXPECT_EQ(Collect(), Four(4, 13));
  EXPECT_THROW(Collect(), std::invalid_argument);
  EXPECT_EQ(region_, std::vector<float>({23, 23, 23, 23, 10, 10, 10, 10}));
  Put(0, 0, 0, kAll);
  EXPECT_THROW(Collect(), std::invalid_argument) << "it was not run";
  program_->Run();
  EXPECT_EQ(Collect(), Four(4, 0));
}

TEST_F(CpuStepPort, HoldsAFewStepsAndRefusesMore) {
  for (int i = 1; i <= StepPort::kPlaces; ++i) {
    Put(0, static_cast<float>(i), i == 1 ? 0 : kHalf, kAll);
    program_->Run();
  }
  EXPECT_THROW(Put(0, 50, 0, kAll), std::invalid_argument);
  EXPECT_EQ(Collect(), Four(4, 1));
  Put(0, 5, kHalf, kAll);
  EXPECT_THROW(Put(0, 50, 0, kAll), std::invalid_argument);
  program_->Run();
  for (const float want : {3, 6, 10, 15}) EXPECT_EQ(Collect(), Four(4, want));
  EXPECT_THROW(Collect(), std::invalid_argument);
}

TEST_F(CpuStepPort, RefusesBytesThatItHasNot) {
  for (const auto& [begin, end] :
       {std::pair<int64_t, int64_t>{-16, 16}, {0, 48}, {16, 0}, {4, 16}, {0, 20}}) {
    EXPECT_THROW(Put(0, 0, begin, end), std::invalid_argument) << begin << " to " << end;
  }
  program_->Run();
  EXPECT_THROW(Collect(), std::invalid_argument) << "a refused step counted";
  float* const at = region_.data();
  EXPECT_THROW(backend_->MakeStepPort(at, 20, at, 16), std::invalid_argument);
  EXPECT_THROW(backend_->MakeStepPort(at + 1, 16, at, 16), std::invalid_argument);
  EXPECT_THROW(backend_->MakeStepPort(at, 16, at, 0), std::invalid_argument);
  EXPECT_THROW(backend_->MakeStepPort(at, 16, at, 6), std::invalid_argument);
}

TEST(CpuBackend, MeasuresAPlausibleReadBandwidth) {
  const double bytes_per_second = MakeCpuBackend()->MeasureReadBandwidth();
  EXPECT_GT(bytes_per_second, 1e8);
  EXPECT_LT(bytes_per_second, 1e13);
}

TEST(BackendFactory, SaysWhetherThereIsCuda) {
  if (CudaBackendBuilt()) GTEST_SKIP() << "this build has a CUDA backend";
  EXPECT_EQ(CudaDeviceCount(), 0);
  try {
    MakeCudaBackend(0);
    FAIL() << "a CUDA backend was made";
  } catch (const DeviceError& e) {
    EXPECT_NE(std::string(e.what()).find("no CUDA backend"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace qwend
