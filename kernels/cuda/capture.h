// What a stream is given between construction and Finish, as a graph. Host code only.
#pragma once

#include <utility>

#include "kernels/cuda/runtime.h"

namespace qwend::cuda {

// The stream's capture, ended whatever happens: a capture that is left open would poison the
// stream.
class Capture {
 public:
  explicit Capture(cudaStream_t stream) : stream_(stream) {
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
  }
  ~Capture() {
    if (stream_ == nullptr) return;
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream_, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
  }
  GraphExec Finish() {
    cudaGraph_t graph = nullptr;
    const cudaError_t status = cudaStreamEndCapture(std::exchange(stream_, nullptr), &graph);
    const Graph owned(graph);
    Check(status, "ending a capture");
    cudaGraphExec_t exec = nullptr;
    Check(cudaGraphInstantiate(&exec, graph, 0), "instantiating a graph");
    GraphExec result(exec);
    return result;
  }

 private:
  cudaStream_t stream_;
};

}  // namespace qwend::cuda
