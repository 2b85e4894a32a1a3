#include "kernels/cuda/cuda_backend.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/cuda/bandwidth.h"
#include "kernels/cuda/capture.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/host_copy.h"
#include "kernels/cuda/persistent_program.h"
#include "kernels/cuda/runtime.h"

namespace qwend {
namespace cuda {
namespace {

void RunOp(const Op& op, const LaunchContext& ctx) {
  std::visit([&](const auto& o) { Run(o, ctx); }, op);
}

// Two graphs of the same operators: the plain one, and one with an event node before, between and
// after them. The plain one carries no trace of the other.
class CudaProgram : public Program {
 public:
  CudaProgram(std::span<const OpCall> calls, const LaunchContext& ctx)
      : ctx_(ctx), seconds_(calls.size()) {
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

  void Run() override { Check(cudaGraphLaunch(plain_.get(), ctx_.stream), "launching a graph"); }

  std::span<const double> RunTimed() override {
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
    between(0);
    for (size_t i = 0; i < calls.size(); ++i) {
      try {
        RunOp(calls[i].op, ctx_);
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
    RunEach(calls, between);
    return capture.Finish();
  }

  LaunchContext ctx_;
  std::vector<Event> events_;
  std::vector<double> seconds_;
  GraphExec plain_, timed_;
};

// Through page-locked memory, so that the copy runs beside the host.
class CudaReadback : public Readback {
 public:
  CudaReadback(cudaStream_t stream, int64_t max_bytes)
      : stream_(stream), done_(MakeEvent(cudaEventDisableTiming)) {
    void* memory = nullptr;
    Check(cudaMallocHost(&memory, std::max<int64_t>(max_bytes, 1)), "page-locking host memory");
    memory_ = HostMemory(memory);
  }
  void Start(const void* from, int64_t bytes) override {
    if (IsSmallCopy(memory_.get(), from, bytes)) {
      CopyByKernel(memory_.get(), from, bytes, stream_);
    } else {
      Check(cudaMemcpyAsync(memory_.get(), from, bytes, cudaMemcpyDeviceToHost, stream_),
            "copying from the device");
    }
    Check(cudaEventRecord(done_.get(), stream_), "recording an event");
  }
  const void* Wait() override {
    Check(cudaEventSynchronize(done_.get()), "waiting for a copy from the device");
    return memory_.get();
  }

 private:
  cudaStream_t stream_;
  Event done_;
  HostMemory memory_;
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(int device) : device_(device) {
    BindThread();
    Check(cudaGetDeviceProperties(&properties_, device), "reading the device's properties");
    stream_ = MakeStream();
    uploads_.emplace(stream_.get());
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
    if (IsSmallCopy(to, from_host, bytes)) return uploads_->Copy(to, from_host, bytes);
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

  std::unique_ptr<Readback> MakeReadback(int64_t max_bytes) override {
    return std::make_unique<CudaReadback>(stream_.get(), max_bytes);
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
  std::unique_ptr<Program> Compile(std::span<const OpCall> calls) override {
    return std::make_unique<CudaProgram>(calls, ctx_);
  }
  std::unique_ptr<Program> CompilePersistent(std::span<const OpCall> calls,
                                             std::string& why_not) override {
    return MakePersistentProgram(
        calls, ctx_, [this](int64_t bytes) { return Allocate(bytes); }, why_not);
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
  std::optional<Uploads> uploads_;
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
