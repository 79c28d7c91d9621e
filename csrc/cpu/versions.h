// What all CPU kernels need of the processor: versions of a function for its instruction sets, and subnormals kept.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hookstats::cpu {

// Flush-to-zero would lose subnormals and count them as zeros; a trainer may have set it on this thread.
class KeepSubnormals {
#if defined(__x86_64__)
 public:
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

}  // namespace hookstats::cpu

// X(target, bytes, type): a function in versions for AVX-512, AVX2 and the baseline, chosen when the library is loaded.
// They are written out, where target_clones would do with less, because the vectors of each version are as wide as its
// registers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#if __GNUC__ >= 12
#define HOOKSTATS_VERSIONS(X, type)                      \
  X(__attribute__((target("arch=x86-64-v4"))), 64, type) \
  X(__attribute__((target("arch=x86-64-v3"))), 32, type) \
  X(__attribute__((target("default"))), 16, type)
#else
#define HOOKSTATS_VERSIONS(X, type)            \
  X(__attribute__((target("avx2"))), 32, type) \
  X(__attribute__((target("default"))), 16, type)
#endif
#else
#define HOOKSTATS_VERSIONS(X, type) X(, 16, type)
#endif
