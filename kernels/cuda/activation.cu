#include "kernels/cuda/math.cuh"

namespace qwend::cuda {
namespace {

// Elementwise over [rows, cols]: block (x, row) covers columns of one row. Bytes: inputs read,
// output written.
template <typename A, typename Function>
__global__ void ElementwiseKernel(View<A> out, View<const A> a, View<const A> b, int cols,
                                  Function f) {
  WaitForPrevious();
  const int col = blockIdx.x * blockDim.x + threadIdx.x;
  if (col >= cols) return;
  const int row = blockIdx.y;
  out.At(row)[col] = FromFloat<A>(f(ToFloat(a.At(row)[col]), ToFloat(b.At(row)[col])));
}

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct SiluTimes {
  __device__ float operator()(float gate, float up) const { return Silu(gate) * up; }
};

template <typename Function>
void Elementwise(const char* name, const TensorView& out, const TensorView& a, const TensorView& b,
                 const LaunchContext& ctx) {
  const int cols = static_cast<int>(out.cols());
  DispatchActivation(out.dtype, name, [&](auto t) {
    using A = decltype(t);
    Launch(ctx, ElementwiseKernel<A, Function>, dim3(CeilDiv(cols, 256), out.rows()), dim3(256), 0,
           MakeView<A>(out), MakeView<const A>(a), MakeView<const A>(b), cols, Function{});
  });
}

// Block (head, row): x *= sigmoid(gate), in place. Bytes: x read and written, gate read.
template <typename A>
__global__ void OutputGateKernel(View<A> x, View<const A> gate, int head_dim) {
  WaitForPrevious();
  const int head = blockIdx.x, row = blockIdx.y;
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    A& v = x.At(row, head)[i];
    v = FromFloat<A>(ToFloat(v) * Sigmoid(ToFloat(gate.At(row, head)[i])));
  }
}

// One thread per (row, value head). Bytes: a, b, two outputs.
template <typename A>
__global__ void DeltaGatesKernel(View<float> beta, View<float> log_decay, View<const A> a,
                                 View<const A> b, Vector a_log, Vector dt_bias, int heads,
                                 int rows) {
  WaitForPrevious();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows * heads) return;
  const int row = i / heads, head = i % heads;
  beta.At(row)[head] = Sigmoid(ToFloat(b.At(row)[head]));
  log_decay.At(row)[head] = -expf(a_log[head]) * Softplus(ToFloat(a.At(row)[head]) + dt_bias[head]);
}

}  // namespace

void Run(const ops::ResidualAdd& op, const LaunchContext& ctx) {
  Elementwise<Add>("ResidualAdd", op.out, op.a, op.b, ctx);
}

void Run(const ops::SiluMul& op, const LaunchContext& ctx) {
  Elementwise<SiluTimes>("SiluMul", op.out, op.gate, op.up, ctx);
}

void Run(const ops::OutputGate& op, const LaunchContext& ctx) {
  DispatchActivation(op.x.dtype, "OutputGate", [&](auto t) {
    using A = decltype(t);
    Launch(ctx, OutputGateKernel<A>, dim3(op.x.dim(1), op.x.rows()), dim3(128), 0,
           MakeView<A>(op.x), MakeView<const A>(op.gate), static_cast<int>(op.x.dim(2)));
  });
}

void Run(const ops::DeltaGates& op, const LaunchContext& ctx) {
  const int rows = static_cast<int>(op.a.rows()), heads = static_cast<int>(op.a.cols());
  DispatchActivation(op.a.dtype, "DeltaGates", [&](auto t) {
    using A = decltype(t);
    Launch(ctx, DeltaGatesKernel<A>, dim3(CeilDiv(rows * heads, 128)), dim3(128), 0,
           MakeView<float>(op.beta), MakeView<float>(op.log_decay), MakeView<const A>(op.a),
           MakeView<const A>(op.b), MakeVector(op.a_log), MakeVector(op.dt_bias), heads, rows);
  });
}

}  // namespace qwend::cuda
