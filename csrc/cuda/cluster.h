// Blocks that meet in their shared memory: a cluster, whose blocks run at the same time side by side (compute
// capability 9.0 and newer). Elsewhere blocks meet in device memory (fold.h), with the same results.
#pragma once

#include "device.h"

#if defined(__CUDACC__)
namespace hookstats::cuda {

// Waits for all threads of all blocks of the cluster; what they have written before is seen then.
__device__ inline void cluster_barrier() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __trap();  // is never launched so
#endif
}

// The same place in the shared memory of another block of the cluster, which must not have ended.
template <class T>
__device__ inline const T* in_block(const T* shared, [[maybe_unused]] unsigned rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint64_t at;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(at) : "l"(shared), "r"(rank));
  return reinterpret_cast<const T*>(at);
#else
  return shared;
#endif
}

// The blocks of a column of the grid are a cluster.
template <class... Params, class... Args>
void start_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
                    const Args&... args) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = cluster.val.clusterDim.z = 1;
  cluster.val.clusterDim.y = grid.y;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  (void)cudaLaunchKernelEx(&config, kernel, args...);  // `launch_clusters` asks for the error
}

}  // namespace hookstats::cuda
#endif

namespace hookstats::cuda {

// In a cluster at most. Four blocks are two multiprocessors' at a time, of which every group of them has a whole
// number: of eight, some would have to wait for the first ones to end.
constexpr unsigned kMostInCluster = 4;

// What is tried with small tensors, by HOOKSTATS_SMALL, bits: make gpu-bench measures all side by side.
enum Small : int { k_clusters = 1, k_finer = 2 };
inline int& small_variant() {
  static int bits = [] {
    const char* asked = std::getenv("HOOKSTATS_SMALL");
    return asked ? std::atoi(asked) : 0;
  }();
  return bits;
}

// Whether a kernel may be launched in clusters: the GPU has them, and what it runs was not compiled from the PTX of an
// older one, which has no code for them.
template <class Kernel>
bool has_clusters(Kernel* kernel, int device) {
  int major = 0;
  cudaFuncAttributes of{};
  if (message(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) || major < 9) return false;
  return !message(cudaFuncGetAttributes(&of, kernel)) && of.ptxVersion >= 90;
}

// As `launch`.
template <class... Params, class... Args>
cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
                            const Args&... args) {
  const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  start_clusters(kernel, grid, block, shared_bytes, stream, args...);
  return cudaGetLastError();
}

}  // namespace hookstats::cuda
