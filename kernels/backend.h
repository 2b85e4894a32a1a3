// The one door to a device: memory, weights, operators, and compiled sequences of operators.
//
// Threads: all calls from one thread at a time (the engine thread once it runs).
// Errors: std::invalid_argument for a programmer's mistake, DeviceError for the device's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace qwend {

class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Device memory with one owner. Zero-filled when allocated.
class Buffer {
 public:
  Buffer() = default;
  Buffer(void* data, int64_t bytes, void (*release)(void*, int64_t))
      : data_(data), bytes_(bytes), release_(release) {}
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    std::swap(release_, o.release_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) release_(data_, bytes_);
  }
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  void (*release_)(void*, int64_t) = nullptr;
};

// A weight [rows, cols] that Gemv reads faster in `parts` parts along K when it has few rows of x.
struct SplitK {
  int64_t rows = 0;
  int64_t cols = 0;
  int parts = 1;
};

// 1 for a shape that is not in the table.
inline int GemvSplits(std::span<const SplitK> table, int64_t rows, int64_t cols) {
  for (const SplitK& s : table) {
    if (s.rows == rows && s.cols == cols) return s.parts;
  }
  return 1;
}

struct BackendInfo {
  std::string name;         // cpu | cuda
  std::string device_name;  // as the machine reports it
  DType activation_type = DType::kF32;
  DType kv_type = DType::kF32;    // key and value pages
  DType conv_type = DType::kF32;  // convolution state
  bool asynchronous = false;      // Run returns before the operator is done
  int64_t memory_bytes = 0;       // what the device has in all
  int64_t free_bytes = 0;         // and had free when asked
  std::vector<SplitK> split_k;    // measured by `qwend-bench --sweep=splitk`; empty: all in one
};

// How a step's inputs reach the device and its outputs the host, without a call beside the step's
// own. A port has a region of inputs and one of outputs; a program that was compiled with it takes,
// before its first operator, the oldest inputs that were put and not yet taken, and leaves its
// outputs after its last. A run for which nothing was put keeps the device's inputs and leaves
// nothing. Several programs may share a port, which must outlive them and what they have queued.
// After a DeviceError from Put, Run or Collect a port is of no more use.
class StepPort {
 public:
  static constexpr int kPlaces = 4;  // steps that may be put and not yet collected
  virtual ~StepPort() = default;
  // For the next run that has none yet: bytes [begin, end) of the inputs, copied at once from the
  // same bytes of `image`; the other bytes stay as they are on the device. Both are multiples
  // of 16.
  virtual void Put(const void* image, int64_t begin, int64_t end) = 0;
  // The outputs of the oldest step that was put and run and not yet collected; waits for them. They
  // stay until kPlaces more steps were run.
  virtual const void* Collect() = 0;
};

// A fixed sequence of operators, ready to be run again and again. Addresses were fixed when it was
// compiled; whatever changes from run to run is read from the memory behind them, or comes through
// a StepPort. On CUDA a captured graph, on the CPU the plain loop.
class Program {
 public:
  virtual ~Program() = default;
  virtual void Run() = 0;
  // Runs once with a timestamp between operators and returns the seconds each one took, in list
  // order. The values stay until the next call.
  virtual std::span<const double> RunTimed() = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual BackendInfo Info() const = 0;

  // In every thread that takes the backend over from the one that made it, before its first call.
  virtual void BindThread() {}

  // Zero-filled memory. Throws DeviceError when there is not enough.
  virtual Buffer Allocate(int64_t bytes) = 0;
  // In order with Run. The source may be reused at once.
  virtual void CopyToDevice(void* to, const void* from_host, int64_t bytes) = 0;
  // Waits for everything queued before it, and returns when the bytes are there.
  virtual void CopyToHost(void* to_host, const void* from, int64_t bytes) = 0;
  virtual void Zero(void* at, int64_t bytes) = 0;
  // Both regions are device memory; `inputs` takes whole 16 bytes, `outputs` whole 4 bytes.
  virtual std::unique_ptr<StepPort> MakeStepPort(void* inputs, int64_t input_bytes,
                                                 const void* outputs, int64_t output_bytes) = 0;

  // Projection weights take the layout that this backend's Gemv reads fastest. A packed table also
  // serves EmbeddingLookup, so tied weights are kept once. `host` is row-major [N, K]: bf16, f16 or
  // f32. bf16 stays bf16; f16 becomes f32 where the backend has no f16 path (exact). The packed
  // bytes go to `to`, PackedBytes() of them.
  virtual int64_t PackedBytes(DType dtype, int64_t rows, int64_t cols) const = 0;
  virtual TensorView Pack(const TensorView& host, void* to) = 0;

  virtual void Run(const Op& op) = 0;  // returns when the operator is queued (CUDA) or done (CPU)
  // A port must be one of this backend's own.
  virtual std::unique_ptr<Program> Compile(std::span<const OpCall> calls,
                                           StepPort* port = nullptr) = 0;
  // A decode step of the fused plan as one kernel that stays on the device from its first operator
  // to its last. Gives what Compile's program gives but for rounding, and may leave the tensors
  // between its operators unwritten. Null where this backend cannot, with the reason in `why_not`.
  virtual std::unique_ptr<Program> CompilePersistent(std::span<const OpCall> calls, StepPort* port,
                                                     std::string& why_not) {
    static_cast<void>(calls);
    static_cast<void>(port);
    why_not = "the " + Info().name + " backend has no persistent kernel";
    return nullptr;
  }
  virtual void Synchronize() = 0;

  // Allocations of device memory so far; does not grow once a server is ready.
  virtual int64_t AllocationCount() const { return 0; }

  // Bytes per second of a plain read of memory that no cache holds, measured now (about 0.3 s),
  // best of several passes.
  virtual double MeasureReadBandwidth() = 0;
};

// threads: 0 = one per core this process may use.
std::unique_ptr<Backend> MakeCpuBackend(int threads = 0);

// Throws DeviceError when there is no device, or this build has no CUDA backend.
std::unique_ptr<Backend> MakeCudaBackend(int device = 0);
bool CudaBackendBuilt();
int CudaDeviceCount();  // 0 without a driver, a device, or a CUDA build

}  // namespace qwend
