// CUDA kernels on a CPU, for tests: stands in for <cuda_runtime.h> when csrc/cuda/*.cu are compiled by a C++ compiler.
//
// How its threads run stands in blocks.h. Errors stay until they are asked for, as CUDA's do.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __grid_constant__

using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchTimeout = 702,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureImplicit = 906
};
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                 ? "no error"
         : error == cudaErrorInvalidValue     ? "invalid argument"
         : error == cudaErrorMemoryAllocation ? "out of memory"
         : error == cudaErrorIllegalAddress   ? "an illegal memory access was encountered"
                                              : "capture implicit";
}
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};

namespace cuda_on_cpu {

inline unsigned long long capture = 0;  // of the stream, whichever; 0: none
inline bool captures_are_told = true;   // else asking is an error
inline bool has_memory = true;          // else there is none left
inline int64_t queries = 0;             // of kernels and devices
inline cudaError_t last_error = cudaSuccess;
inline bool device_failed = false;    // in a kernel before
inline std::set<const void*> loaded;  // kernels; drivers before 12.3 load none in a capture

// What streams were told: "record STREAM" of an event, "wait STREAM behind STREAM", "launch STREAM".
inline std::vector<std::string> order;
inline std::string name_of(void* stream) { return std::to_string(reinterpret_cast<intptr_t>(stream)); }

// Of captures, what is told when their graphs are no more.
struct UserObject {
  void (*destroy)(void*);
  void* held;
};
inline std::multimap<unsigned long long, UserObject> of_graphs;
inline void end_graph(unsigned long long number) {
  const auto [first, last] = of_graphs.equal_range(number);
  for (auto each = first; each != last; ++each) each->second.destroy(each->second.held);
  of_graphs.erase(first, last);
}

inline cudaError_t with(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

}  // namespace cuda_on_cpu

inline cudaError_t cudaGetLastError() {
  if (cuda_on_cpu::device_failed) return cudaErrorIllegalAddress;
  return std::exchange(cuda_on_cpu::last_error, cudaSuccess);
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = cuda_on_cpu::gpu.runtime;
  return cudaSuccess;
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = cuda_on_cpu::gpu.driver;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const auto& gpu = cuda_on_cpu::gpu;
  ++cuda_on_cpu::queries;
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? gpu.shared_memory
           : attribute == cudaDevAttrMultiProcessorCount        ? gpu.multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor     ? gpu.capability / 10
                                                                : gpu.capability % 10;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  ++cuda_on_cpu::queries;
  return cuda_on_cpu::with(bytes > cuda_on_cpu::gpu.shared_memory ? cudaErrorInvalidValue : cudaSuccess);
}
// As many as registers allow, two of 256 threads; the shared memory of a multiprocessor is not imitated.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel* kernel, int threads, size_t bytes) {
  ++cuda_on_cpu::queries;
  cuda_on_cpu::loaded.insert(reinterpret_cast<const void*>(kernel));
  *blocks = bytes > size_t(cuda_on_cpu::gpu.shared_memory) ? 0 : 2 * 256 / threads;
  return cudaSuccess;
}
struct cudaFuncAttributes {};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel* kernel) {
  cuda_on_cpu::loaded.insert(reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}

using cudaGraph_t = void*;  // the number of its capture
using cudaUserObject_t = cuda_on_cpu::UserObject*;
enum { cudaUserObjectNoDestructorSync = 1, cudaGraphUserObjectMove = 1 };
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* number,
                                            cudaGraph_t* graph) {
  if (!cuda_on_cpu::captures_are_told) return cuda_on_cpu::with(cudaErrorStreamCaptureImplicit);
  *status = cuda_on_cpu::capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *number = cuda_on_cpu::capture;
  if (graph) *graph = reinterpret_cast<void*>(cuda_on_cpu::capture);
  return cudaSuccess;
}
inline cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* held, void (*destroy)(void*), unsigned,
                                        unsigned) {
  *object = new cuda_on_cpu::UserObject{destroy, held};
  return cudaSuccess;
}
inline cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned) {
  object->destroy(object->held);
  delete object;
  return cudaSuccess;
}
inline cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned, unsigned) {
  cuda_on_cpu::of_graphs.emplace(reinterpret_cast<unsigned long long>(graph), *object);
  delete object;
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// Memory of a device is garbage at first, and is never freed here.
inline cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (!cuda_on_cpu::has_memory) return cuda_on_cpu::with(cudaErrorMemoryAllocation);
  *memory = malloc(bytes);
  memset(*memory, 0xA5, bytes);
  return cudaSuccess;
}
enum { cudaStreamNonBlocking, cudaEventDisableTiming };
inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  memset(memory, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

// An event is the stream on which it was recorded last.
using cudaEvent_t = void**;
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new void*(nullptr);
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  *event = stream;
  cuda_on_cpu::order.push_back("record " + cuda_on_cpu::name_of(stream));
  return cudaSuccess;
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  cuda_on_cpu::order.push_back("wait " + cuda_on_cpu::name_of(stream) + " behind " + cuda_on_cpu::name_of(*event));
  return cudaSuccess;
}

#define HOOKSTATS_SHARED(type, name, count) \
  type* const name =                        \
      static_cast<type*>(cuda_on_cpu::Block::current->shared_array(sizeof(type) * (count), alignof(type)))
#define HOOKSTATS_DYNAMIC_SHARED(name) \
  double* const name =                 \
      static_cast<double*>(cuda_on_cpu::Block::current->shared_array(cuda_on_cpu::dynamic_shared_bytes, 16))

inline void __syncthreads(int line = __builtin_LINE()) { cuda_on_cpu::Block::current->barrier(line); }
inline void __threadfence() {}

template <class T>
T atomicAdd(T* at, T value) {
  const T old = *at;
  *at = old + value;
  return old;
}

namespace hookstats::cuda {

template <class... Params, class... Args>
void start(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
           const Args&... args) {
  const bool is_new = cuda_on_cpu::loaded.insert(reinterpret_cast<const void*>(kernel)).second;
  if (is_new && cuda_on_cpu::capture && cuda_on_cpu::gpu.driver < 12030) {
    cuda_on_cpu::loaded.erase(reinterpret_cast<const void*>(kernel));
    cuda_on_cpu::with(cudaErrorStreamCaptureImplicit);
    return;
  }
  cuda_on_cpu::order.push_back("launch " + cuda_on_cpu::name_of(stream));
  cuda_on_cpu::dynamic_shared_bytes = shared_bytes;
  cuda_on_cpu::run(grid, block, [&] { kernel(args...); });
}

inline double load_fresh(const double* at) { return *at; }
template <class T>
T load_constant(const T* at) {
  return *at;
}

template <int bytes>
void copy_async(void* shared, const void* global) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global)) % bytes) {
    throw std::runtime_error("cuda_on_cpu: an asynchronous copy from or to an address that is not aligned");
  }
  cuda_on_cpu::Block::current->copies().add(shared, global, bytes);
}
template <int bytes, int behind_shared, int behind_global>
void copy_async_if(bool wanted, void* shared, const void* global) {
  if (wanted)
    copy_async<bytes>(static_cast<char*>(shared) + behind_shared, static_cast<const char*>(global) + behind_global);
}
inline void end_group() { cuda_on_cpu::Block::current->copies().end_group(); }
template <int groups>
void wait_for_all_but() {
  cuda_on_cpu::Block::current->wait_for_all_but(groups);
}

}  // namespace hookstats::cuda
