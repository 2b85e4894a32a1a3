// Marks what both the host's compiler and nvcc compile, for the host and for kernels.
#pragma once

#ifdef __CUDACC__
#define QWEND_HOST_DEVICE __host__ __device__
#else
#define QWEND_HOST_DEVICE
#endif
