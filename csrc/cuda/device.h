// What the kernels use of CUDA beyond plain C++: the launch, shared memory. The one place where nvcc and the harness
// that runs the same kernels on a CPU (tests/cuda_on_cpu) differ.
#pragma once

#include <cuda_runtime.h>

#if defined(__CUDACC__)

// Defines `type name[count]`, one per block.
#define HOOKSTATS_SHARED(type, name, count) __shared__ type name[count]

namespace hookstats::cuda {

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, const Args&... args) {
  kernel<<<grid, block, 0, stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace hookstats::cuda

#endif
