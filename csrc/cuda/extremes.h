// What a thread keeps of a tile beside its sums: extremes and zeros, and how many values are not finite.
#pragma once

#include "feed.h"

namespace hookstats::cuda {

// Extremes and zeros at each place of a pack.
template <class scalar_t, int n, bool pairs = sizeof(scalar_t) == 2 && n % 2 == 0>
struct Extremes {
  using acc_t = acc_of<scalar_t>;
  acc_t lowest[n], highest[n];
  int zeros_at[n];

  __device__ void clear() {
    for (int i = 0; i < n; ++i) {
      lowest[i] = std::numeric_limits<acc_t>::infinity();
      highest[i] = -std::numeric_limits<acc_t>::infinity();
      zeros_at[i] = 0;
    }
  }
  __device__ void update(const Pack<scalar_t, n>&, const acc_t (&x)[n]) {
    for (int i = 0; i < n; ++i) {
      lowest[i] = std::fmin(lowest[i], x[i]);  // a NaN loses
      highest[i] = std::fmax(highest[i], x[i]);
      zeros_at[i] += x[i] == 0;
    }
  }
  __device__ acc_t min(int i) const { return lowest[i]; }
  __device__ acc_t max(int i) const { return highest[i]; }
  __device__ int zeros(int i) const { return zeros_at[i]; }
};

template <class scalar_t, int n>
struct Extremes<scalar_t, n, true> {
  static constexpr uint32_t kInfinity = std::is_same_v<scalar_t, BFloat16> ? 0x7f807f80 : 0x7c007c00;
  uint32_t lowest[n / 2], highest[n / 2], zeros_at[n / 2];

  __device__ void clear() {
    for (int i = 0; i < n / 2; ++i) {
      lowest[i] = kInfinity;
      highest[i] = kInfinity | 0x80008000;
      zeros_at[i] = 0;
    }
  }
  __device__ void update(const Pack<scalar_t, n>& pack, const float (&)[n]) {
    uint32_t words[n / 2];
    memcpy(words, &pack, sizeof words);
    for (int i = 0; i < n / 2; ++i) {
      lowest[i] = min2<scalar_t>(lowest[i], words[i]);
      highest[i] = max2<scalar_t>(highest[i], words[i]);
      zeros_at[i] = add_zeros2<scalar_t>(zeros_at[i], words[i]);
    }
  }
  __device__ float min(int i) const { return half_of<scalar_t>(lowest[i / 2], i % 2); }
  __device__ float max(int i) const { return half_of<scalar_t>(highest[i / 2], i % 2); }
  __device__ int zeros(int i) const { return zeros_of<scalar_t>(zeros_at[i / 2], i % 2); }
};

// Values that are not finite, by channel of the block: [NaN, +Inf, -Inf][kBlockChannels] in shared memory.
struct NonFinite {
  static constexpr int kKinds = 3, kWords = kKinds * kBlockChannels;
  unsigned* counts;

  __device__ NonFinite(unsigned* shared, int thread) : counts(shared) {
    if (thread < kWords) counts[thread] = 0;
  }
  __device__ void add(int channel, double x) const {
    const int kind = x != x ? 0 : x > 0 ? 1 : 2;
    atomicAdd(&counts[kind * kBlockChannels + channel], 1u);
  }
  // Whole numbers: the order of the additions does not matter.
  __device__ void add_to_state(const State& state, int64_t first_channel, int thread) const {
    static_assert(kWords <= kThreads && k_posinfs == k_nans + 1 && k_neginfs == k_nans + 2);
    if (thread >= kWords || counts[thread] == 0) return;
    const int kind = thread / kBlockChannels, channel = thread % kBlockChannels;
    atomicAdd(&state.moments[(k_nans + kind) * state.row_stride + first_channel + channel], double(counts[thread]));
  }
};

}  // namespace hookstats::cuda
