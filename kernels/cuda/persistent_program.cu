#include <optional>
#include <utility>
#include <vector>

#include "kernels/cuda/capture.h"
#include "kernels/cuda/persistent_kernel.h"
#include "kernels/cuda/persistent_program.h"
#include "kernels/cuda/persistent_schedule.h"

namespace qwend::cuda {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// From the driver at run time, so that nothing links against it.
EncodeTiled Encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  Check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                         cudaEnableDefault, &result),
        "finding cuTensorMapEncodeTiled");
  Need(function != nullptr, "the driver does not know tensor maps");
  return reinterpret_cast<EncodeTiled>(function);
}

std::vector<CUtensorMap> Encode(const std::vector<BoxMap>& boxes) {
  static const EncodeTiled encode = Encoder();
  std::vector<CUtensorMap> maps;
  for (const auto& [tensor, rows, k_blocks] : boxes) {
    const bool state = k_blocks == 0;
    const auto columns = static_cast<cuuint64_t>(state ? tensor.dim(3) : tensor.cols());
    const auto all_rows = static_cast<cuuint64_t>(
        state ? tensor.dim(0) * tensor.dim(1) * tensor.dim(2) : tensor.rows());
    const cuuint64_t sizes[3] = {state ? columns : kBoxK, all_rows, columns / kBoxK};
    const cuuint64_t strides[2] = {columns * (state ? 4 : 2), kBoxK * 2};
    const cuuint32_t box[3] = {state ? static_cast<cuuint32_t>(columns / kRanks) : kBoxK,
                               static_cast<cuuint32_t>(rows), static_cast<cuuint32_t>(k_blocks)};
    const cuuint32_t steps[3] = {1, 1, 1};
    CUtensorMap map;
    const CUresult status = encode(
        &map, state ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        state ? 2 : 3, tensor.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        state ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    Need(status == CUDA_SUCCESS, "the driver refused a tensor map, error ",
         static_cast<int>(status));
    maps.push_back(map);
  }
  return maps;
}

// Rows [first, first + rows) of a step.
StepArguments PassOf(StepArguments a, int first, int rows) {
  a.shape.rows = rows;
  a.token_ids += first;
  a.positions += first;
  a.state_slot += first;
  a.block_table += first * a.block_table_stride;
  a.logits.data += first * a.logits.s0;
  a.sampling += first;
  a.best += first;
  return a;
}

// An SM may keep a tensor map that it has used, by its address, so an address that was one map's
// never becomes another's: these few KB a program live as long as the process.
void KeepForEver(Buffer maps) {
  static auto* const kept = new std::vector<Buffer>;
  kept->push_back(std::move(maps));
}

// What the passes of a step are told: those of eight rows and those of fewer, where there are any.
struct StepPasses {
  std::optional<StepSchedule> of_eight, of_fewer;
};

StepPasses MakePasses(const StepModel& model, int clusters) {
  const int rows = model.arguments.shape.rows;
  StepPasses passes;
  if (rows >= 8) passes.of_eight = MakeStepSchedule(model, clusters, 8);
  if (rows % 8 != 0) passes.of_fewer = MakeStepSchedule(model, clusters, 4);
  return passes;
}

// Passes of eight, four, two and one rows, one kernel each, then the sampler, between the port's
// kernels where there is a port. A second graph has the same kernels with timestamps between their
// operators.
class PersistentProgram : public Program {
 public:
  PersistentProgram(const StepPasses& passes, const LaunchContext& ctx, CudaStepPort* port,
                    std::function<Buffer(int64_t)> allocate)
      : ctx_(ctx), port_(port), allocate_(std::move(allocate)) {
    const StepSchedule& any = passes.of_eight ? *passes.of_eight : *passes.of_fewer;
    const StepShape& shape = any.arguments.shape;
    sampler_ = any.sampler;
    const int operators = 1 + 5 * shape.layers + 1;  // but for the sampler
    seconds_.resize(operators + 1);
    words_ = static_cast<unsigned long long*>(Upload(std::vector<unsigned long long>(
        static_cast<size_t>(4) * kMaxStepRows * static_cast<size_t>(shape.hidden))));
    turn_ = static_cast<uint32_t*>(Upload(std::vector<uint32_t>{0}));
    StepArguments of_eight, of_fewer;
    if (passes.of_eight) of_eight = UploadTables(*passes.of_eight);
    if (passes.of_fewer) of_fewer = UploadTables(*passes.of_fewer);
    for (int first = 0; first < shape.rows;) {
      const int left = shape.rows - first;
      const int rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
      passes_.push_back(PassOf(rows == 8 ? of_eight : of_fewer, first, rows));
      first += rows;
    }
    memory_.push_back(allocate_(static_cast<int64_t>(passes_.size()) * (operators + 1) *
                                int64_t{sizeof(uint64_t)}));
    times_.resize(passes_.size() * (operators + 1));
    RunOnce(nullptr, false);
    Check(cudaStreamSynchronize(ctx_.stream), "running the persistent kernel before the capture");
    plain_ = Record(nullptr);
    timed_ = Record(static_cast<uint64_t*>(memory_.back().data()));
  }

  void Run() override {
    if (port_ != nullptr) port_->BeforeRun();
    Check(cudaGraphLaunch(plain_.get(), ctx_.stream), "launching a graph");
  }

  std::span<const double> RunTimed() override {
    if (port_ != nullptr) port_->BeforeRun();
    Check(cudaGraphLaunch(timed_.get(), ctx_.stream), "launching an instrumented graph");
    Check(cudaMemcpyAsync(times_.data(), memory_.back().data(), times_.size() * sizeof(uint64_t),
                          cudaMemcpyDeviceToHost, ctx_.stream),
          "reading timestamps");
    Check(cudaStreamSynchronize(ctx_.stream), "running an instrumented graph");
    const size_t operators = seconds_.size() - 1;
    for (size_t i = 0; i < operators; ++i) {
      seconds_[i] = 0;
      for (size_t pass = 0; pass < passes_.size(); ++pass) {
        const uint64_t* t = &times_[pass * (operators + 1) + i];
        seconds_[i] += static_cast<double>(t[1] - t[0]) * 1e-9;
      }
    }
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, before_sampler_.get(), after_sampler_.get()),
          "reading an event");
    seconds_[operators] = milliseconds * 1e-3;
    return seconds_;
  }

 private:
  template <typename T>
  void* Upload(const std::vector<T>& table) {
    const auto bytes = static_cast<int64_t>(table.size() * sizeof(T));
    memory_.push_back(allocate_(bytes));
    Check(cudaMemcpyAsync(memory_.back().data(), table.data(), bytes, cudaMemcpyHostToDevice,
                          ctx_.stream),
          "copying a schedule");
    Check(cudaStreamSynchronize(ctx_.stream), "copying a schedule");
    return memory_.back().data();
  }
  StepArguments UploadTables(const StepSchedule& schedule) {
    StepArguments a = schedule.arguments;
    a.layers = static_cast<const StepLayer*>(Upload(schedule.layers));
    a.maps = static_cast<const CUtensorMap*>(Upload(Encode(schedule.maps)));
    KeepForEver(std::move(memory_.back()));
    memory_.pop_back();
    a.commands = static_cast<const CopyCommand*>(Upload(schedule.commands));
    a.first_command = static_cast<const int*>(Upload(schedule.first_command));
    a.first_head_tile = static_cast<const int*>(Upload(schedule.first_head_tile));
    a.words = words_;
    a.turn = turn_;
    return a;
  }
  // With `overlap` the first pass begins while the port's first kernel brings the inputs.
  void RunOnce(uint64_t* times, bool overlap) {
    for (StepArguments pass : passes_) {
      pass.times = times;
      LaunchStep(pass, ctx_.stream, std::exchange(overlap, false));
      if (times != nullptr) times += seconds_.size();
    }
    if (times != nullptr) Stamp(before_sampler_);
    cuda::Run(sampler_, ctx_);
    if (times != nullptr) Stamp(after_sampler_);
  }
  void Stamp(const Event& event) {
    Check(cudaEventRecordWithFlags(event.get(), ctx_.stream, cudaEventRecordExternal),
          "recording an event");
  }
  GraphExec Record(uint64_t* times) {
    Capture capture(ctx_.stream);
    if (port_ != nullptr) port_->LaunchTake();
    RunOnce(times, port_ != nullptr);
    if (port_ != nullptr) port_->LaunchLeave();
    GraphExec graph = capture.Finish();
    Check(cudaGraphUpload(graph.get(), ctx_.stream), "uploading a graph");
    Check(cudaStreamSynchronize(ctx_.stream), "uploading a graph");
    return graph;
  }

  LaunchContext ctx_;
  CudaStepPort* const port_;  // or null
  const std::function<Buffer(int64_t)> allocate_;
  ops::TokenSampler sampler_;
  unsigned long long* words_ = nullptr;
  uint32_t* turn_ = nullptr;
  std::vector<Buffer> memory_;  // the last one is the timestamps'
  std::vector<StepArguments> passes_;
  std::vector<uint64_t> times_;
  std::vector<double> seconds_;
  Event before_sampler_ = MakeEvent(), after_sampler_ = MakeEvent();
  GraphExec plain_, timed_;
};

}  // namespace

std::unique_ptr<Program> MakePersistentProgram(std::span<const OpCall> calls,
                                               const LaunchContext& ctx, CudaStepPort* port,
                                               const std::function<Buffer(int64_t)>& allocate,
                                               std::string& why_not) {
  try {
    const StepModel model = ReadStepModel(calls);
    const int clusters = CountClusters(model.arguments);
    Need(clusters >= 2,
         "the device does not run clusters of 16 blocks with 220 KB of shared memory "
         "each (compute capability 9.0 does)");
    return std::make_unique<PersistentProgram>(MakePasses(model, clusters), ctx, port, allocate);
  } catch (const Refusal& refusal) {
    why_not = refusal.why;
    return nullptr;
  } catch (const DeviceError& e) {
    // A device that has no room, or refuses the launch, goes on with another plan; one that has
    // failed does not.
    if (cudaStreamSynchronize(ctx.stream) != cudaSuccess) throw;
    cudaGetLastError();
    why_not = e.what();
    return nullptr;
  }
}

}  // namespace qwend::cuda
