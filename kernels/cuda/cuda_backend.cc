#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/bandwidth.h"
#include "kernels/cuda/capture.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/persistent_program.h"
#include "kernels/cuda/runtime.h"
#include "kernels/cuda/step_port.h"

namespace qwend {
namespace cuda {
namespace {

void RunOp(const Op& op, const LaunchContext& ctx) {
  std::visit([&](const auto& o) { Run(o, ctx); }, op);
}

// Two graphs of the same operators: the plain one, and one with an event node before, between and
// after them. The plain one carries no trace of the other. Both begin and end with the port's
// kernels where there is a port.
class CudaProgram : public Program {
 public:
  CudaProgram(std::span<const OpCall> calls, const LaunchContext& ctx, CudaStepPort* port)
      : ctx_(ctx), port_(port), seconds_(calls.size()) {
    for (size_t i = 0; i <= calls.size(); ++i) events_.push_back(MakeEvent());
    RunEach(calls, [this](size_t) {  // one by one, so that a fault is the fault of one
      Check(cudaStreamSynchronize(ctx_.stream), "running it before the capture");
    });
    plain_ = Record(calls, [](size_t) {});
    timed_ = Record(calls, [this](size_t i) {
      Check(cudaEventRecordWithFlags(events_[i].get(), ctx_.stream, cudaEventRecordExternal),
            "recording an event");
    });
    Check(cudaGraphUpload(plain_.get(), ctx_.stream), "uploading a graph");
    Check(cudaGraphUpload(timed_.get(), ctx_.stream), "uploading a graph");
    Check(cudaStreamSynchronize(ctx_.stream), "uploading a graph");
  }

  void Run() override {
    if (port_ != nullptr) port_->BeforeRun();
    Check(cudaGraphLaunch(plain_.get(), ctx_.stream), "launching a graph");
  }

  std::span<const double> RunTimed() override {
    if (port_ != nullptr) port_->BeforeRun();
    Check(cudaGraphLaunch(timed_.get(), ctx_.stream), "launching an instrumented graph");
    Check(cudaStreamSynchronize(ctx_.stream), "running an instrumented graph");
    for (size_t i = 0; i < seconds_.size(); ++i) {
      float milliseconds = 0;
      Check(cudaEventElapsedTime(&milliseconds, events_[i].get(), events_[i + 1].get()),
            "reading an event");
      seconds_[i] = milliseconds * 1e-3;
    }
    return seconds_;
  }

 private:
  template <typename Between>
  void RunEach(std::span<const OpCall> calls, Between between) {
    LaunchContext ctx = ctx_;
    // Some kernels read inputs before they wait. The first operator begins only when the port's
    // first kernel, which writes them, has ended, and those behind it begin no earlier.
    ctx.begin_early = port_ == nullptr;
    between(0);
    for (size_t i = 0; i < calls.size(); ++i) {
      try {
        RunOp(calls[i].op, ctx);
        ctx.begin_early = true;
        between(i + 1);
      } catch (const std::exception& e) {
        const std::string layer =
            calls[i].layer < 0 ? "" : " of layer " + std::to_string(calls[i].layer);
        throw DeviceError("operator " + calls[i].tag + layer + ": " + e.what());
      }
    }
  }

  template <typename Between>
  GraphExec Record(std::span<const OpCall> calls, Between between) {
    Capture capture(ctx_.stream);
    if (port_ != nullptr) port_->LaunchTake();
    RunEach(calls, between);
    if (port_ != nullptr) port_->LaunchLeave();
    return capture.Finish();
  }

  LaunchContext ctx_;
  CudaStepPort* const port_;  // or null
  std::vector<Event> events_;
  std::vector<double> seconds_;
  GraphExec plain_, timed_;
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(int device) : device_(device) {
    BindThread();
    Check(cudaGetDeviceProperties(&properties_, device), "reading the device's properties");
    stream_ = MakeStream();
    workspace_ = Allocate(kWorkspaceBytes);
    ctx_ = {stream_.get(), properties_.multiProcessorCount, properties_.major >= 9,
            workspace_.data()};
    PrepareAttentionKernels();
  }

  // CUDA keeps the current device thread by thread.
  void BindThread() override {
    Check(cudaSetDevice(device_), ("choosing CUDA device " + std::to_string(device_)).c_str());
  }

  BackendInfo Info() const override {
    size_t free_bytes = 0, total_bytes = 0;
    Check(cudaMemGetInfo(&free_bytes, &total_bytes), "reading the device's memory");
    BackendInfo info;
    info.name = "cuda";
    info.device_name = properties_.name;
    info.activation_type = DType::kF32;
    info.kv_type = DType::kBF16;
    info.conv_type = DType::kF32;
    info.asynchronous = true;
    info.memory_bytes = static_cast<int64_t>(total_bytes);
    info.free_bytes = static_cast<int64_t>(free_bytes);
    info.split_k = SplitKTable();
    return info;
  }

  Buffer Allocate(int64_t bytes) override {
    void* data = nullptr;
    Check(cudaMalloc(&data, std::max<int64_t>(bytes, 1)),
          ("allocating " + std::to_string(bytes) + " bytes").c_str());
    Buffer buffer(data, bytes, [](void* p, int64_t) { cudaFree(p); });
    ++allocations_;
    Zero(data, bytes);
    Synchronize();
    return buffer;
  }

  void CopyToDevice(void* to, const void* from_host, int64_t bytes) override {
    Check(cudaMemcpyAsync(to, from_host, bytes, cudaMemcpyHostToDevice, stream_.get()),
          "copying to the device");
  }
  void CopyToHost(void* to_host, const void* from, int64_t bytes) override {
    Check(cudaMemcpyAsync(to_host, from, bytes, cudaMemcpyDeviceToHost, stream_.get()),
          "copying from the device");
    Synchronize();
  }
  void Zero(void* at, int64_t bytes) override {
    if (bytes > 0) Check(cudaMemsetAsync(at, 0, bytes, stream_.get()), "clearing device memory");
  }

  std::unique_ptr<StepPort> MakeStepPort(void* inputs, int64_t input_bytes, const void* outputs,
                                         int64_t output_bytes) override {
    return std::make_unique<CudaStepPort>(ctx_, inputs, input_bytes, outputs, output_bytes,
                                          Allocate(sizeof(CudaStepPort::State)));
  }

  int64_t PackedBytes(DType dtype, int64_t rows, int64_t cols) const override {
    return rows * cols * SizeOf(dtype);
  }
  TensorView Pack(const TensorView& host, void* to) override {
    Require(host.contiguous(), "Pack: ", host.ShapeString(), " must be contiguous");
    CopyToDevice(to, host.data, host.bytes());
    Synchronize();  // the source may go away
    TensorView packed = host;
    packed.data = to;
    return packed;
  }

  void Run(const Op& op) override { RunOp(op, ctx_); }
  std::unique_ptr<Program> Compile(std::span<const OpCall> calls, StepPort* port) override {
    return std::make_unique<CudaProgram>(calls, ctx_, static_cast<CudaStepPort*>(port));
  }
  std::unique_ptr<Program> CompilePersistent(std::span<const OpCall> calls, StepPort* port,
                                             std::string& why_not) override {
    return MakePersistentProgram(
        calls, ctx_, static_cast<CudaStepPort*>(port),
        [this](int64_t bytes) { return Allocate(bytes); }, why_not);
  }
  void Synchronize() override {
    Check(cudaStreamSynchronize(stream_.get()), "waiting for the device");
  }
  int64_t AllocationCount() const override { return allocations_; }
  double MeasureReadBandwidth() override { return cuda::MeasureReadBandwidth(ctx_); }

 private:
  const int device_;
  cudaDeviceProp properties_{};
  Stream stream_;
  Buffer workspace_;
  LaunchContext ctx_;
  int64_t allocations_ = 0;
};

}  // namespace

int DeviceCount() {
  // Every kernel is loaded when the device is first used, none while requests wait. The first call
  // into CUDA reads this.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::unique_ptr<Backend> MakeBackend(int device) {
  const int count = DeviceCount();
  if (count == 0) throw DeviceError("there is no CUDA device here; use --backend cpu");
  if (device < 0 || device >= count) {
    throw DeviceError("CUDA device " + std::to_string(device) +
                      " does not exist; this machine has " + std::to_string(count) +
                      ", counted from 0");
  }
  return std::make_unique<CudaBackend>(device);
}

}  // namespace cuda
}  // namespace qwend
