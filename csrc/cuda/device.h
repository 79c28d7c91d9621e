// What the kernels use of CUDA beyond plain C++: the launch, shared memory, 16-bit arithmetic in pairs. The one place
// where nvcc and the harness that runs the same kernels on a CPU (tests/cuda_on_cpu) differ.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "../kernels.h"

#if defined(__CUDACC__)

// Defines `type name[count]`, one per block; and `double name[]`, as large as the launch says, on 16 bytes.
#define HOOKSTATS_SHARED(type, name, count) __shared__ type name[count]
#define HOOKSTATS_DYNAMIC_SHARED(name) extern __shared__ __align__(16) double name[]

namespace hookstats::cuda {

template <class... Params, class... Args>
void start(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
           const Args&... args) {
  kernel<<<grid, block, shared_bytes, stream>>>(args...);
}

// What another block wrote: not from this multiprocessor's cache.
__device__ inline double load_fresh(const double* at) { return __ldcg(at); }

// What the kernel never writes: it may be read ahead of other accesses.
template <class T>
__device__ inline T load_constant(const T* at) {
  return __ldg(at);
}

// Copies 4, 8 or 16 bytes into shared memory while the thread goes on. Copies are waited for in groups, in their order.
template <int bytes>
__device__ inline void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(unsigned(__cvta_generic_to_shared(shared))),
               "l"(global), "n"(bytes)
               : "memory");
}
// The same if it is wanted, so many bytes behind these addresses: the compiler would add them up once more for each
// copy.
template <int bytes, int behind_shared, int behind_global>
__device__ inline void copy_async_if(bool wanted, void* shared, const void* global) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %0, 0; @p cp.async.ca.shared.global [%1 + %2], [%3 + %4], %5; }" ::"r"(
                   int(wanted)),
               "r"(unsigned(__cvta_generic_to_shared(shared))), "n"(behind_shared), "l"(global), "n"(behind_global),
               "n"(bytes)
               : "memory");
}
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int groups>
__device__ inline void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

}  // namespace hookstats::cuda

#endif

namespace hookstats::cuda {

// Whether a kernel that has been launched before, by anybody, has failed: then every call does until the process ends.
inline bool is_of_device(cudaError_t error) {
  return error == cudaErrorIllegalAddress || error == cudaErrorLaunchTimeout || error == cudaErrorAssert ||
         (cudaErrorHardwareStackError <= error && error <= cudaErrorLaunchFailure);
}

// Whether a call failed. The runtime keeps an error until it is asked for the last one: it is, or the next launch would
// be taken for the one that failed.
inline bool failed(cudaError_t error) {
  if (error == cudaSuccess) return false;
  (void)cudaGetLastError();
  return true;
}

// Throws what the runtime said.
inline void check(cudaError_t error, const char* expected = "") {
  if (!failed(error)) return;
  const char* before = is_of_device(error) ? "the device had failed before, in any kernel of this process: " : "";
  throw std::runtime_error(std::string("hookstats: CUDA: ") + expected + before + cudaGetErrorString(error));
}

constexpr int kMostDevices = 64;  // of which what CUDA says is remembered

// What a device is.
struct Facts {
  int shared_memory;  // bytes that a block may have: 227 KB (H100, B200), 163 KB (A100), 99 KB (L4)
  int multiprocessors;
  int capability;  // 86 is 8.6
};

// Asked for once. HOOKSTATS_SHARED_MEMORY imitates a GPU that has less, for tests.
inline Facts facts_of(int device) {
  static std::atomic<const Facts*> known[kMostDevices];
  const bool is_kept = 0 <= device && device < kMostDevices;
  if (const Facts* facts = is_kept ? known[device].load(std::memory_order_acquire) : nullptr) return *facts;
  const auto ask = [device](cudaDeviceAttr attribute, int otherwise) {
    int value = 0;
    return failed(cudaDeviceGetAttribute(&value, attribute, device)) ? otherwise : value;
  };
  Facts facts{ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, 48 << 10), ask(cudaDevAttrMultiProcessorCount, 1),
              10 * ask(cudaDevAttrComputeCapabilityMajor, 0) + ask(cudaDevAttrComputeCapabilityMinor, 0)};
  const char* imitated = std::getenv("HOOKSTATS_SHARED_MEMORY");
  if (imitated && std::atoi(imitated) < facts.shared_memory) facts.shared_memory = std::atoi(imitated);
  if (is_kept) known[device].store(new Facts(facts), std::memory_order_release);
  return facts;
}

// All kernels that are launched anywhere.
inline std::vector<const void*>& kernels() {
  static auto* all = new std::vector<const void*>;
  return *all;
}
template <auto kernel>
inline const bool kIsAmongKernels = (kernels().push_back(reinterpret_cast<const void*>(kernel)), true);

// How many blocks of so many threads and so much shared memory, which the kernel may have then, a multiprocessor has at
// a time. Asked for once.
template <auto kernel>
int blocks_at_once(int threads, int shared_bytes, int device) {
  static std::atomic<int> known[kMostDevices];  // 0: not asked yet
  const bool is_kept = 0 <= device && device < kMostDevices;
  int blocks = is_kept ? known[device].load(std::memory_order_relaxed) : 0;
  if (blocks > 0) return blocks;
  if (shared_bytes > 32 << 10) {  // beyond 48 KB, fixed arrays included, a kernel must ask
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, size_t(shared_bytes)));
  if (blocks == 0) check(cudaErrorInvalidValue);  // never fits
  if (is_kept) known[device].store(blocks, std::memory_order_relaxed);
  return blocks;
}

template <auto kernel, class... Args>
void launch(dim3 grid, int threads, int shared_bytes, void* stream, const Args&... args) {
  (void)kIsAmongKernels<kernel>;
  start(kernel, grid, dim3(threads), shared_bytes, static_cast<cudaStream_t>(stream), args...);
  check(cudaGetLastError());
}

// Puts items into a plan's table, of which the kernel finds a copy on the device.
template <class T>
void append(std::vector<unsigned char>& table, const std::vector<T>& items) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(items.data());
  table.insert(table.end(), bytes, bytes + items.size() * sizeof(T));
}

// Around a launch on sites, the State.counters of each: it comes behind their last launch, where that was on another
// stream, and no other thread launches on them meanwhile; so with scratch that streams share. Which launches a capture
// records is not looked at.
class InTurn {
 public:
  InTurn(const Launch& launch, const void* const* sites, size_t count);

 private:
  std::unique_lock<std::mutex> lock_, sharing_;
};

// Calls f, which launches, on its device and in turn; behind it, those who wait for it can.
template <class F>
void launch_in_turn(const Launch& to, const void* const* sites, size_t count, const F& f) {
  check(cudaSetDevice(to.device));
  const InTurn turn(to, sites, count);
  f();
  if (to.launched) check(cudaEventRecord(static_cast<cudaEvent_t>(to.launched), static_cast<cudaStream_t>(to.stream)));
}

// Two float32, which newer GPUs add and multiply with one instruction, each rounded as alone.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kHasFloatPairs = true;
struct FloatPair {
  uint64_t both;

  __device__ FloatPair(float low, float high) { asm("mov.b64 %0, {%1, %2};" : "=l"(both) : "f"(low), "f"(high)); }
  __device__ FloatPair operator+(FloatPair other) const {
    FloatPair sum = *this;
    asm("add.rn.f32x2 %0, %1, %2;" : "=l"(sum.both) : "l"(both), "l"(other.both));
    return sum;
  }
  __device__ FloatPair operator*(FloatPair other) const {
    FloatPair product = *this;
    asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(product.both) : "l"(both), "l"(other.both));
    return product;
  }
  __device__ void add_squares(FloatPair of) { asm("fma.rn.f32x2 %0, %1, %1, %0;" : "+l"(both) : "l"(of.both)); }
  __device__ void split(float& low, float& high) const {
    asm("mov.b64 {%0, %1}, %2;" : "=f"(low), "=f"(high) : "l"(both));
  }
};
#else
constexpr bool kHasFloatPairs = false;
struct FloatPair {  // is never made
  HOOKSTATS_HD FloatPair(float, float) {}
  HOOKSTATS_HD FloatPair operator+(FloatPair) const { return *this; }
  HOOKSTATS_HD FloatPair operator*(FloatPair) const { return *this; }
  HOOKSTATS_HD void add_squares(FloatPair) {}
  HOOKSTATS_HD void split(float&, float&) const {}
};
#endif

// Whether the address of a counter in shared memory is a number that is kept: newer GPUs else work out anew for each
// access where shared memory begins. Its sum with shifted bits is one instruction there, and was more on older ones.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kKeepsAddresses = true;
#else
constexpr bool kKeepsAddresses = false;
#endif

// As such a number; 0 where none is kept.
HOOKSTATS_HD inline unsigned address_of([[maybe_unused]] const void* shared) {
  unsigned address = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"(unsigned(__cvta_generic_to_shared(shared))));
#endif
  return address;
}

// Adds to the counter that lies (masked >> shift) bytes behind an address.
template <unsigned shift>
HOOKSTATS_HD inline void count_at([[maybe_unused]] unsigned address, [[maybe_unused]] uint32_t masked,
                                  [[maybe_unused]] unsigned value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  unsigned at;
  asm("mad.hi.u32 %0, %1, %2, %3;" : "=r"(at) : "r"(masked), "n"(1u << (32 - shift)), "r"(address));
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(at), "r"(value) : "memory");
#endif
}

// The 32 bits from bit `shift` on, of 0 .. 31, of two words.
HOOKSTATS_HD inline uint32_t shift_out(uint32_t low, uint32_t high, unsigned shift) {
#if defined(__CUDA_ARCH__)
  return __funnelshift_r(low, high, shift);
#else
  return uint32_t((uint64_t(high) << 32 | low) >> shift);
#endif
}

// Two 16-bit floating-point values in a word.
template <class scalar_t>
HOOKSTATS_HD inline float half_of(uint32_t word, int i) {
  return widen(scalar_t{uint16_t(word >> 16 * i)});
}

template <class scalar_t, class Before>
HOOKSTATS_HD inline uint32_t choose2(uint32_t a, uint32_t b, Before before) {
  uint32_t chosen = 0;
  for (int i = 0; i < 2; ++i) {
    const float x = half_of<scalar_t>(a, i), y = half_of<scalar_t>(b, i);
    chosen |= ((before(y, x) || x != x ? b : a) >> 16 * i & 0xffff) << 16 * i;
  }
  return chosen;
}

// Both halves, widened.
template <class scalar_t>
HOOKSTATS_HD inline void widen2(uint32_t word, float& low, float& high) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000);
  } else {
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high)
        : "r"(word));
  }
#else
  low = half_of<scalar_t>(word, 0);
  high = half_of<scalar_t>(word, 1);
#endif
}

// The smaller and the larger of each pair; a NaN loses.
template <class scalar_t>
HOOKSTATS_HD inline uint32_t min2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
#else
  return choose2<scalar_t>(a, b, [](float y, float x) { return y < x; });
#endif
}
template <class scalar_t>
HOOKSTATS_HD inline uint32_t max2(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t r;
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  }
  return r;
#else
  return choose2<scalar_t>(a, b, [](float y, float x) { return y > x; });
#endif
}

// exp(x) for x <= 0, on a GPU by its own instruction: wrong by |x| ulp, so where it is large by few.
HOOKSTATS_HD inline double exp_fast(double x) { return exp(x); }
HOOKSTATS_HD inline float exp_fast(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  return expf(x);
#endif
}

// Counts the zeros of pairs, up to 256 in each half. Where the GPU compares and adds pairs, the counts are 16-bit
// floating-point numbers themselves; elsewhere integers.
template <class scalar_t>
HOOKSTATS_HD inline uint32_t add_zeros2(uint32_t counts, uint32_t word) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t r;
  if constexpr (std::is_same_v<scalar_t, BFloat16>) {
    asm("{ .reg .b32 is; set.eq.bf16x2.bf16x2 is, %1, %2; add.rn.bf16x2 %0, %3, is; }"
        : "=r"(r)
        : "r"(word), "r"(0), "r"(counts));
  } else {
    asm("{ .reg .b32 is; set.eq.f16x2.f16x2 is, %1, %2; add.rn.f16x2 %0, %3, is; }"
        : "=r"(r)
        : "r"(word), "r"(0), "r"(counts));
  }
  return r;
#else
  return counts + ((word & 0x7fff) == 0) + ((word & 0x7fff0000) == 0) * 0x10000u;
#endif
}
template <class scalar_t>
HOOKSTATS_HD inline int zeros_of(uint32_t counts, int i) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return int(half_of<scalar_t>(counts, i));
#else
  return counts >> 16 * i & 0xffff;
#endif
}

}  // namespace hookstats::cuda
