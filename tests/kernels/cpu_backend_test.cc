#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
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
