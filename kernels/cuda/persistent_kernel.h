// Launching the persistent step (persistent_step.cuh), for B = 1, 2, 4 or 8 rows.
#pragma once

#include <algorithm>

#include "kernels/cuda/persistent_step.h"

namespace qwend::cuda {

// How many clusters the device runs at once, 0 where it cannot run the kernel; prepares the kernel.
// Once before the first launch, outside of captures.
template <int B>
int CountClustersOf(const StepArguments& a);
template <int B>
void LaunchStepOf(const StepArguments& a, cudaStream_t stream, bool overlap);

extern template int CountClustersOf<1>(const StepArguments&);
extern template int CountClustersOf<2>(const StepArguments&);
extern template int CountClustersOf<4>(const StepArguments&);
extern template int CountClustersOf<8>(const StepArguments&);
extern template void LaunchStepOf<1>(const StepArguments&, cudaStream_t, bool);
extern template void LaunchStepOf<2>(const StepArguments&, cudaStream_t, bool);
extern template void LaunchStepOf<4>(const StepArguments&, cudaStream_t, bool);
extern template void LaunchStepOf<8>(const StepArguments&, cudaStream_t, bool);

inline int CountClusters(const StepArguments& a) {
  return std::min({CountClustersOf<1>(a), CountClustersOf<2>(a), CountClustersOf<4>(a),
                   CountClustersOf<8>(a), kMaxClusters});
}

// With `overlap` the kernel takes its place while the one before still runs, and waits before it
// reads the step's inputs; everything else that it reads must be older.
inline void LaunchStep(const StepArguments& a, cudaStream_t stream, bool overlap) {
  switch (a.shape.rows) {
    case 1:
      return LaunchStepOf<1>(a, stream, overlap);
    case 2:
      return LaunchStepOf<2>(a, stream, overlap);
    case 4:
      return LaunchStepOf<4>(a, stream, overlap);
    case 8:
      return LaunchStepOf<8>(a, stream, overlap);
  }
  Require(false, "LaunchStep: ", a.shape.rows, " rows in a pass");
}

}  // namespace qwend::cuda
