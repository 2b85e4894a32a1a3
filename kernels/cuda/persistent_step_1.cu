// The persistent step for one row, a translation unit of its own since each takes long to compile.
#include "kernels/cuda/persistent_step.cuh"

namespace qwend::cuda {

template int CountClustersOf<1>(const StepArguments& a);
template void LaunchStepOf<1>(const StepArguments& a, cudaStream_t stream, bool overlap);

}  // namespace qwend::cuda
