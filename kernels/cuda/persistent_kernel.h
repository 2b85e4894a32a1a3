// Launching the persistent step (persistent_step.cuh), for B = 1, 2 or 4 rows.
#pragma once

#include <algorithm>

#include "kernels/cuda/persistent_step.h"

namespace qwend::cuda {

// How many clusters the device runs at once, 0 where it cannot run the kernel; prepares the kernel.
// Once before the first launch, outside of captures.
template <int B>
int CountClustersOf(const StepArguments& a);
template <int B>
void LaunchStepOf(const StepArguments& a, cudaStream_t stream);

extern template int CountClustersOf<1>(const StepArguments&);
extern template int CountClustersOf<2>(const StepArguments&);
extern template int CountClustersOf<4>(const StepArguments&);
extern template void LaunchStepOf<1>(const StepArguments&, cudaStream_t);
extern template void LaunchStepOf<2>(const StepArguments&, cudaStream_t);
extern template void LaunchStepOf<4>(const StepArguments&, cudaStream_t);

inline int CountClusters(const StepArguments& a) {
  return std::min(std::min(CountClustersOf<1>(a), CountClustersOf<2>(a)),
                  std::min<int>(CountClustersOf<4>(a), kMaxClusters));
}

inline void LaunchStep(const StepArguments& a, cudaStream_t stream) {
  switch (a.shape.rows) {
    case 1:
      return LaunchStepOf<1>(a, stream);
    case 2:
      return LaunchStepOf<2>(a, stream);
    case 4:
      return LaunchStepOf<4>(a, stream);
  }
  Require(false, "LaunchStep: ", a.shape.rows, " rows in a pass");
}

}  // namespace qwend::cuda
