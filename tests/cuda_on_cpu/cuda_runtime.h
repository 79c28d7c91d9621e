// CUDA kernels on a CPU, for tests: stands in for <cuda_runtime.h> when csrc/cuda/*.cu are compiled by a C++ compiler.
//
// Every CUDA thread is a fiber. Blocks run one after another, those of a cluster in turns, from barrier to barrier; in
// a block, fibers run one after another from barrier to barrier, in index order or, under a seed, both blocks and
// fibers in shuffled order: what then changes was ordered by nothing. It fails on a barrier that not every thread of
// the block reaches, on a write past a shared array, and on a block that takes more shared memory than the GPU has;
// shared memory starts out as garbage. An asynchronous copy is done when it is waited for, which must be before its
// block ends, and must be aligned; other accesses are not checked for that. One of a word may take bytes beside a
// tensor along: a GPU's memory is allotted in larger pieces. It says nothing about speed, or memory ordering between
// running blocks. Errors stay until they are asked for, as CUDA's do.
#pragma once

#include <ucontext.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorStreamCaptureImplicit = 906
};
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                 ? "no error"
         : error == cudaErrorInvalidValue     ? "invalid argument"
         : error == cudaErrorMemoryAllocation ? "out of memory"
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

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_on_cpu {

// The GPU that is imitated, and what its driver says.
struct Gpu {
  int shared_memory = 227 << 10;
  int capability = 90, driver = 13000, runtime = 13000;
  int built_for = 90;  // the code that it runs
  int multiprocessors = 132;

  auto all() const { return std::tie(shared_memory, capability, driver, runtime, built_for, multiprocessors); }
};
inline Gpu gpu;
inline unsigned long long capture = 0;  // of the stream, whichever; 0: none
inline bool captures_are_told = true;   // else asking is an error
inline bool has_memory = true;          // else there is none left
inline int64_t queries = 0;             // of kernels and devices
inline cudaError_t last_error = cudaSuccess;
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

inline unsigned shuffle_seed = 0;                                           // 0: in order
inline int64_t launches = 0, blocks = 0, cluster_launches = 0, copies = 0;  // so far
inline int dynamic_shared_bytes = 0;
inline std::function<void(uint64_t)> before_block;  // given the number of blocks that have run

// A thread's asynchronous copies, and where groups of them end.
class Copies {
 public:
  void add(void* to, const void* from, size_t bytes) {
    copies_.push_back({to, from, bytes});
    ++copies;
  }
  void end_group() { ends_.push_back(copies_.size()); }
  void wait_for_all_but(size_t groups) {
    if (ends_.size() <= groups) return;
    for (const size_t end = ends_[ends_.size() - 1 - groups]; done_ < end; ++done_) {
      const Copy& copy = copies_[done_];
      copy.bytes == 4 ? copy_word(copy.to, copy.from) : void(memcpy(copy.to, copy.from, copy.bytes));
    }
  }
  bool are_done() const { return done_ == copies_.size(); }

 private:
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
#if defined(__SANITIZE_ADDRESS__)
  __attribute__((no_sanitize_address)) static void copy_word(void* to, const void* from) {
    const char* bytes = static_cast<const char*>(from);
    int outside = 0;
    for (int i = 0; i < 4; ++i) outside += __asan_address_is_poisoned(bytes + i);
    if (outside == 4) throw std::runtime_error("cuda_on_cpu: an asynchronous copy of a word outside of any tensor");
    for (int i = 0; i < 4; ++i) static_cast<volatile char*>(to)[i] = static_cast<const volatile char*>(from)[i];
  }
#else
  static void copy_word(void* to, const void* from) { memcpy(to, from, 4); }
#endif
  std::vector<Copy> copies_;
  std::vector<size_t> ends_;
  size_t done_ = 0;
};

class Block {
 public:
  Block(dim3 block, const std::function<void()>& kernel) : kernel_(kernel), fibers_(block.x * block.y * block.z) {
    for (size_t i = 0; i < fibers_.size(); ++i) {
      auto& fiber = fibers_[i];
      fiber.index = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y);
      fiber.stack.reset(new char[kStackBytes]);
    }
  }

  // `cluster`: the blocks that run at the same time, this one among them.
  void begin(dim3 index, const std::vector<Block*>& cluster) {
    index_ = index;
    cluster_ = &cluster;
    shared_.clear();
    shared_bytes_ = 0;
    for (auto& fiber : fibers_) start(fiber);
  }

  // On to the next barrier, or to the end.
  void go_on(std::mt19937& random) {
    std::vector<size_t> order(fibers_.size());
    std::iota(order.begin(), order.end(), 0);
    if (shuffle_seed) std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) resume(fibers_[i]);
    check_barrier(std::count_if(fibers_.begin(), fibers_.end(), [](const Fiber& f) { return f.finished; }));
  }
  bool is_finished() const { return fibers_[0].finished; }
  bool is_at_cluster_barrier() const { return !is_finished() && fibers_[0].at_cluster_barrier; }

  void end() {
    for (const auto& array : shared_) array->check();
    for (const auto& fiber : fibers_) {
      if (!fiber.copies.are_done()) throw std::runtime_error("cuda_on_cpu: a block ends before its copies have");
    }
    if (!problem_.empty()) throw std::runtime_error(problem_);
  }

  void barrier(int line, bool of_cluster = false) {
    current_->barrier_line = line;
    current_->at_cluster_barrier = of_cluster;
    ++current_->barriers;
    swapcontext(&current_->context, &scheduler_);
  }

  Copies& copies() { return current_->copies; }

  // The same array for every thread of the block: threads ask in the same order.
  void* shared_array(size_t bytes) {
    const size_t i = current_->shared_arrays++;
    if (i == shared_.size()) {
      shared_.push_back(std::make_unique<SharedArray>(bytes));
      shared_bytes_ += bytes;
      if (shared_bytes_ > size_t(gpu.shared_memory)) {
        problem_ = "cuda_on_cpu: a block takes " + std::to_string(shared_bytes_) + " bytes of shared memory of " +
                   std::to_string(gpu.shared_memory);
      }
    }
    return shared_[i]->memory.data();
  }

  // The same place in a shared array of another block of the cluster.
  const void* in_block(const void* here, unsigned rank) {
    const Block& other = *cluster_->at(rank);
    if (other.is_finished() && &other != this) {
      problem_ = "cuda_on_cpu: the shared memory of a block that has ended is read";
    }
    const auto* at = static_cast<const unsigned char*>(here);
    for (size_t i = 0; i < shared_.size(); ++i) {
      const auto* begin = shared_[i]->memory.data();
      if (at < begin || at >= begin + shared_[i]->memory.size()) continue;
      if (i < other.shared_.size()) return other.shared_[i]->memory.data() + (at - begin);
    }
    problem_ = "cuda_on_cpu: an address that is in no shared array is looked for in another block";
    return here;
  }

  static inline Block* current = nullptr;

 private:
  static constexpr size_t kStackBytes = 128 << 10;

  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    dim3 index;
    bool finished;
    int barrier_line;
    bool at_cluster_barrier;
    int64_t barriers;  // reached so far
    size_t shared_arrays;
    Copies copies;
  };

  struct SharedArray {
    static constexpr size_t kGuard = 64;
    std::vector<unsigned char> memory;
    explicit SharedArray(size_t bytes) : memory(bytes + kGuard, 0xA5) {}
    void check() const {
      const auto broken = [](unsigned char c) { return c != 0xA5; };
      if (std::any_of(memory.end() - kGuard, memory.end(), broken)) {
        throw std::runtime_error("cuda_on_cpu: a write past the end of a shared array");
      }
    }
  };

  static void enter() {
    Block& block = *current;
    block.kernel_();
    block.current_->finished = true;
    swapcontext(&block.current_->context, &block.scheduler_);
  }

  void start(Fiber& fiber) {
    fiber.finished = false;
    fiber.barrier_line = 0;
    fiber.at_cluster_barrier = false;
    fiber.barriers = 0;
    fiber.shared_arrays = 0;
    fiber.copies = {};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }

  void resume(Fiber& fiber) {
    if (fiber.finished) return;
    current = this;
    current_ = &fiber;
    threadIdx = fiber.index;
    blockIdx = index_;
    swapcontext(&scheduler_, &fiber.context);
  }

  void check_barrier(size_t finished) const {
    if (finished == fibers_.size()) return;
    const auto running = [](const Fiber& fiber) { return !fiber.finished; };
    const Fiber& one = *std::find_if(fibers_.begin(), fibers_.end(), running);
    for (const auto& fiber : fibers_) {
      if (running(fiber) && fiber.barrier_line == one.barrier_line && fiber.barriers == one.barriers) continue;
      throw std::runtime_error("cuda_on_cpu: not every thread of the block reaches the barrier in line " +
                               std::to_string(one.barrier_line) + " (" + std::to_string(finished) + " of " +
                               std::to_string(fibers_.size()) + " have returned)");
    }
  }

  const std::function<void()>& kernel_;
  std::vector<Fiber> fibers_;
  std::vector<std::unique_ptr<SharedArray>> shared_;
  size_t shared_bytes_ = 0;
  std::string problem_;
  dim3 index_;
  const std::vector<Block*>* cluster_ = nullptr;
  Fiber* current_ = nullptr;
  ucontext_t scheduler_;
};

// The blocks of a cluster, all at the same time, from where they are to their ends.
inline void run_cluster(const std::vector<Block*>& blocks, std::mt19937& random) {
  std::vector<Block*> turns = blocks;
  for (;;) {
    size_t ended = 0, waiting = 0;
    if (shuffle_seed) std::shuffle(turns.begin(), turns.end(), random);
    for (Block* each : turns) {
      if (!each->is_finished() && !each->is_at_cluster_barrier()) each->go_on(random);
      ended += each->is_finished();
      waiting += each->is_at_cluster_barrier();
    }
    if (ended == blocks.size()) break;
    if (waiting == 0 || ended + waiting < blocks.size()) continue;
    if (ended > 0) throw std::runtime_error("cuda_on_cpu: not every block of the cluster reaches its barrier");
    for (Block* each : turns) each->go_on(random);
  }
  for (Block* each : blocks) each->end();
}

// in_cluster: of how many blocks of a column of the grid a cluster is.
inline void run(dim3 grid, dim3 block, const std::function<void()>& kernel, unsigned in_cluster = 1) {
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || block.x * block.y * block.z > 1024 ||
      in_cluster > 8 || grid.y % in_cluster) {
    throw std::runtime_error("cuda_on_cpu: invalid launch configuration");
  }
  ++launches;
  blocks += int64_t(grid.x) * grid.y * grid.z;
  gridDim = grid;
  blockDim = block;
  std::mt19937 random(shuffle_seed);
  const unsigned clusters_y = grid.y / in_cluster;
  std::vector<uint64_t> order(uint64_t(grid.x) * clusters_y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  if (shuffle_seed) std::shuffle(order.begin(), order.end(), random);
  std::vector<std::unique_ptr<Block>> owned;
  std::vector<Block*> cluster;
  for (unsigned i = 0; i < in_cluster; ++i) {
    owned.push_back(std::make_unique<Block>(block, kernel));
    cluster.push_back(owned.back().get());
  }
  uint64_t begun = 0;
  for (const uint64_t i : order) {
    for (unsigned rank = 0; rank < in_cluster; ++rank) {
      const unsigned y = unsigned(i / grid.x % clusters_y) * in_cluster + rank;
      cluster[rank]->begin(dim3(i % grid.x, y, i / grid.x / clusters_y), cluster);
    }
    for (Block* each : cluster) {
      if (before_block) before_block(begun++);
      each->go_on(random);
    }
    run_cluster(cluster, random);
  }
}

}  // namespace cuda_on_cpu

inline cudaError_t cudaGetLastError() { return std::exchange(cuda_on_cpu::last_error, cudaSuccess); }
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
// Registers allow two; the shared memory of a multiprocessor is not imitated.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel* kernel, int, size_t bytes) {
  ++cuda_on_cpu::queries;
  cuda_on_cpu::loaded.insert(reinterpret_cast<const void*>(kernel));
  *blocks = bytes > size_t(cuda_on_cpu::gpu.shared_memory) ? 0 : 2;
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int ptxVersion;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* of, Kernel* kernel) {
  cuda_on_cpu::loaded.insert(reinterpret_cast<const void*>(kernel));
  of->ptxVersion = cuda_on_cpu::gpu.built_for;
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
enum { cudaHostAllocMapped, cudaStreamNonBlocking, cudaEventDisableTiming };
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = malloc(bytes);
  return cudaSuccess;
}
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
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
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
  type* const name = static_cast<type*>(cuda_on_cpu::Block::current->shared_array(sizeof(type) * (count)))
#define HOOKSTATS_DYNAMIC_SHARED(name)                                     \
  HOOKSTATS_SHARED(char, name##_bytes, cuda_on_cpu::dynamic_shared_bytes); \
  double* const name = reinterpret_cast<double*>(name##_bytes)

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

template <class... Params, class... Args>
void start_as(bool in_cluster, bool, void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t,
              const Args&... args) {
  cuda_on_cpu::dynamic_shared_bytes = shared_bytes;
  cuda_on_cpu::run(grid, block, [&] { kernel(args...); }, in_cluster ? grid.y : 1);
  cuda_on_cpu::cluster_launches += in_cluster;
}
inline void wait_for_kernel_before() {}
inline void cluster_barrier(int line = __builtin_LINE()) { cuda_on_cpu::Block::current->barrier(line, true); }
template <class T>
const T* in_block(const T* shared, unsigned rank) {
  return static_cast<const T*>(cuda_on_cpu::Block::current->in_block(shared, rank));
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
inline void end_group() { cuda_on_cpu::Block::current->copies().end_group(); }
template <int groups>
void wait_for_all_but() {
  cuda_on_cpu::Block::current->copies().wait_for_all_but(groups);
}

}  // namespace hookstats::cuda
