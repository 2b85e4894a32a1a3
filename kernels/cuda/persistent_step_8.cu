// The persistent step for eight rows, a translation unit of its own since each takes long to
// compile.
#include "kernels/cuda/persistent_step.cuh"

namespace qwend::cuda {

template int CountClustersOf<8>(const StepArguments& a);
template void LaunchStepOf<8>(const StepArguments& a, cudaStream_t stream, bool overlap);

}  // namespace qwend::cuda
