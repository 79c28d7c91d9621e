// What the kernels use of CUDA beyond plain C++: the launch, shared memory, 16-bit arithmetic in pairs. The one place
// where nvcc and the harness that runs the same kernels on a CPU (tests/cuda_on_cpu) differ.
#pragma once

#include <cuda_runtime.h>

#include "../kernels.h"

#if defined(__CUDACC__)

// Defines `type name[count]`, one per block; and `double name[]`, as large as the launch says.
#define HOOKSTATS_SHARED(type, name, count) __shared__ type name[count]
#define HOOKSTATS_DYNAMIC_SHARED(name) extern __shared__ double name[]

namespace hookstats::cuda {

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream,
                   const Args&... args) {
  if (shared_bytes > 48 << 10) {  // more than any kernel gets unasked
    const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, block, shared_bytes, stream>>>(args...);
  return cudaGetLastError();
}

// What another block wrote: not from this multiprocessor's cache.
__device__ inline double load_fresh(const double* at) { return __ldcg(at); }

}  // namespace hookstats::cuda

#endif

namespace hookstats::cuda {

inline const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

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
