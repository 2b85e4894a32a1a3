#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/machine.h"
#include "kernels/cpu/memory.h"
#include "kernels/cpu/panels.h"
#include "kernels/cpu/thread_pool.h"

namespace qwend {
namespace cpu {
namespace {

void RunOp(const Op& op, const LaunchContext& ctx) {
  std::visit([&](const auto& o) { Run(o, ctx); }, op);
}

// The plain loop. Nothing is allocated once it stands.
class CpuProgram : public Program {
 public:
  CpuProgram(std::span<const OpCall> calls, ThreadPool& pool) : ctx_{pool} {
    ops_.reserve(calls.size());
    for (const OpCall& call : calls) ops_.push_back(call.op);
    seconds_.resize(ops_.size());
  }

  void Run() override {
    for (const Op& op : ops_) RunOp(op, ctx_);
  }

  std::span<const double> RunTimed() override {
    auto before = std::chrono::steady_clock::now();
    for (size_t i = 0; i < ops_.size(); ++i) {
      RunOp(ops_[i], ctx_);
      const auto after = std::chrono::steady_clock::now();
      seconds_[i] = std::chrono::duration<double>(after - before).count();
      before = after;
    }
    return seconds_;
  }

 private:
  const LaunchContext ctx_;
  std::vector<Op> ops_;
  std::vector<double> seconds_;
};

class CpuReadback : public Readback {
 public:
  explicit CpuReadback(int64_t max_bytes) : bytes_(static_cast<size_t>(max_bytes)) {}
  void Start(const void* from, int64_t bytes) override {
    std::memcpy(bytes_.data(), from, static_cast<size_t>(bytes));
  }
  const void* Wait() override { return bytes_.data(); }

 private:
  std::vector<char> bytes_;
};

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(int threads) : pool_(threads > 0 ? threads : UsableProcessors()) {}

  BackendInfo Info() const override {
    const MemoryStatus memory = QueryMemory();
    BackendInfo info;
    info.name = "cpu";
    info.device_name = ProcessorName() + " (" + std::to_string(pool_.size()) +
                       (pool_.size() == 1 ? " thread)" : " threads)");
    info.memory_bytes = memory.total;
    info.free_bytes = memory.free;
    return info;
  }

  Buffer Allocate(int64_t bytes) override { return AllocateHuge(bytes); }

  void CopyToDevice(void* to, const void* from_host, int64_t bytes) override {
    std::memcpy(to, from_host, static_cast<size_t>(bytes));
  }
  void CopyToHost(void* to_host, const void* from, int64_t bytes) override {
    std::memcpy(to_host, from, static_cast<size_t>(bytes));
  }
  void Zero(void* at, int64_t bytes) override { std::memset(at, 0, static_cast<size_t>(bytes)); }
  std::unique_ptr<Readback> MakeReadback(int64_t max_bytes) override {
    return std::make_unique<CpuReadback>(max_bytes);
  }

  int64_t PackedBytes(DType dtype, int64_t rows, int64_t cols) const override {
    return PanelBytes(PackedType(dtype), rows, cols);
  }

  TensorView Pack(const TensorView& host, void* to) override {
    Require(host.layout == Layout::kRowMajor && host.rank == 2 && host.strides[1] == 1,
            "Pack: a row-major matrix is needed, not ", host.ShapeString());
    Require(host.dtype == DType::kBF16 || host.dtype == DType::kF16 || host.dtype == DType::kF32,
            "Pack: weights are bf16, f16 or f32, not ", host.ShapeString());
    const DType packed = PackedType(host.dtype);
    pool_.ParallelFor(PanelCount(host.rows()), 1, [&](int64_t begin, int64_t end, int) {
      PackPanelRange(host, packed, begin, end,
                     static_cast<char*>(to) + PanelOffset(packed, host.cols(), begin));
    });
    TensorView view = TensorView::Of(to, packed, {host.rows(), host.cols()});
    view.layout = Layout::kCpuPanels;
    return view;
  }

  void Run(const Op& op) override { RunOp(op, LaunchContext{pool_}); }

  std::unique_ptr<Program> Compile(std::span<const OpCall> calls) override {
    return std::make_unique<CpuProgram>(calls, pool_);
  }

  void Synchronize() override {}

  double MeasureReadBandwidth() override { return cpu::MeasureReadBandwidth(pool_); }

 private:
  ThreadPool pool_;
};

}  // namespace
}  // namespace cpu

std::unique_ptr<Backend> MakeCpuBackend(int threads) {
  Require(threads >= 0, "MakeCpuBackend: ", threads, " threads; 0 means one per processor");
  return std::make_unique<cpu::CpuBackend>(threads);
}

}  // namespace qwend
