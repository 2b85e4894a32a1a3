#include <algorithm>
#include <array>
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
#include "kernels/step_order.h"

namespace qwend {
namespace cpu {
namespace {

void RunOp(const Op& op, const LaunchContext& ctx) {
  std::visit([&](const auto& o) { Run(o, ctx); }, op);
}

// What is put waits in one of a few places by turns until a run takes it, as on a device.
class CpuStepPort : public StepPort {
 public:
  CpuStepPort(void* inputs, int64_t input_bytes, const void* outputs, int64_t output_bytes)
      : inputs_(static_cast<char*>(inputs)),
        outputs_(static_cast<const char*>(outputs)),
        order_(inputs, input_bytes, outputs, output_bytes) {
    for (Place& place : places_) {
      place.in.resize(static_cast<size_t>(input_bytes));
      place.out.resize(static_cast<size_t>(output_bytes));
    }
  }

  void Put(const void* image, int64_t begin, int64_t end) override {
    Place& place = places_[order_.Put(begin, end) % kPlaces];
    place.begin = begin;
    place.bytes = static_cast<size_t>(end - begin);
    std::memcpy(place.in.data() + begin, static_cast<const char*>(image) + begin, place.bytes);
  }
  const void* Collect() override { return places_[order_.Collect() % kPlaces].out.data(); }

  // Before a run and after it; Take gives the step's number for Leave.
  uint64_t Take() {
    const uint64_t step = order_.Run();
    if (step == 0) return 0;
    const Place& place = places_[step % kPlaces];
    std::memcpy(inputs_ + place.begin, place.in.data() + place.begin, place.bytes);
    return step;
  }
  void Leave(uint64_t step) {
    if (step == 0) return;
    std::vector<char>& out = places_[step % kPlaces].out;
    std::memcpy(out.data(), outputs_, out.size());
  }

 private:
  struct Place {
    int64_t begin = 0;  // of the inputs, in bytes
    size_t bytes = 0;   // from there on
    std::vector<char> in, out;
  };
  char* const inputs_;
  const char* const outputs_;
  std::array<Place, kPlaces> places_;
  StepOrder order_;
};

// The plain loop. Nothing is allocated once it stands.
class CpuProgram : public Program {
 public:
  CpuProgram(std::span<const OpCall> calls, ThreadPool& pool, CpuStepPort* port)
      : ctx_{pool}, port_(port) {
    ops_.reserve(calls.size());
    for (const OpCall& call : calls) ops_.push_back(call.op);
    seconds_.resize(ops_.size());
  }

  void Run() override {
    const uint64_t step = port_ == nullptr ? 0 : port_->Take();
    for (const Op& op : ops_) RunOp(op, ctx_);
    if (port_ != nullptr) port_->Leave(step);
  }

  std::span<const double> RunTimed() override {
    const uint64_t step = port_ == nullptr ? 0 : port_->Take();
    auto before = std::chrono::steady_clock::now();
    for (size_t i = 0; i < ops_.size(); ++i) {
      RunOp(ops_[i], ctx_);
      const auto after = std::chrono::steady_clock::now();
      seconds_[i] = std::chrono::duration<double>(after - before).count();
      before = after;
    }
    if (port_ != nullptr) port_->Leave(step);
    return seconds_;
  }

 private:
  const LaunchContext ctx_;
  CpuStepPort* const port_;  // or null
  std::vector<Op> ops_;
  std::vector<double> seconds_;
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
  std::unique_ptr<StepPort> MakeStepPort(void* inputs, int64_t input_bytes, const void* outputs,
                                         int64_t output_bytes) override {
    return std::make_unique<CpuStepPort>(inputs, input_bytes, outputs, output_bytes);
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

  std::unique_ptr<Program> Compile(std::span<const OpCall> calls, StepPort* port) override {
    return std::make_unique<CpuProgram>(calls, pool_, static_cast<CpuStepPort*>(port));
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
