// What GPUs have from compute capability 9.0 on. A cluster: blocks that run at the same time and meet in their shared
// memory; elsewhere they meet in device memory (fold.h), with the same results. And kernels that are started while the
// one before them ends.
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

// In a kernel that may be started early, before anything is read or written: waits until the kernel before it has ended
// and what that one has written is seen. Does nothing where it was started as ever.
__device__ inline void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// in_cluster: the blocks of a column of the grid are a cluster. early: the kernel is started while the one before ends.
template <class... Params, class... Args>
void start_as(bool in_cluster, bool early, void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes,
              cudaStream_t stream, const Args&... args) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (in_cluster) {
    auto& cluster = attributes[count++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = cluster.val.clusterDim.z = 1;
    cluster.val.clusterDim.y = grid.y;
  }
  if (early) {
    auto& serialization = attributes[count++];
    serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    serialization.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  (void)cudaLaunchKernelEx(&config, kernel, args...);  // `launch_as` asks for the error
}

}  // namespace hookstats::cuda
#endif

namespace hookstats::cuda {

// In a cluster at most. Four blocks are two multiprocessors' at a time, of which every group of them has a whole
// number: of eight, some would have to wait for the first ones to end.
constexpr unsigned kMostInCluster = 4;

// What is tried with small tensors, by HOOKSTATS_SMALL, bits: make gpu-bench measures all side by side.
enum Small : int { k_clusters = 1, k_finer = 2, k_early = 4 };
inline int& small_variant() {
  static int bits = [] {
    const char* asked = std::getenv("HOOKSTATS_SMALL");
    return asked ? std::atoi(asked) : 0;
  }();
  return bits;
}

// Whether a kernel may be launched so: the GPU can, and what it runs was not compiled from the PTX of an older one,
// which has no code for it.
template <class Kernel>
bool may_launch_as(Kernel* kernel, int device) {
  cudaFuncAttributes of{};
  if (facts_of(device).capability < 90) return false;
  return !message(cudaFuncGetAttributes(&of, kernel)) && of.ptxVersion >= 90;
}

// As `launch`.
template <class... Params, class... Args>
cudaError_t launch_as(bool in_cluster, bool early, void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes,
                      cudaStream_t stream, const Args&... args) {
  const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  start_as(in_cluster, early, kernel, grid, block, shared_bytes, stream, args...);
  return cudaGetLastError();
}

}  // namespace hookstats::cuda
