// A block's histogram in shared memory: 32-bit counters by exponent, added to the state at the end.
// Counting must cost few instructions: there is a counter for every exponent, NaN's and Inf's too, so that no value is
// tested or clamped on the way. What is no bin is dropped when the counters are added up.
#pragma once

#include "fold.h"

namespace hookstats::cuda {

// Sign and exponent of the value as a float32.
HOOKSTATS_HD inline unsigned exponent_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits >> 23;
}
HOOKSTATS_HD inline unsigned exponent_of(double x) {
  const int bin = exponent_bin(x);
  return bin == kNoBin ? 255 : bin;
}

__device__ inline void add_to_bin(int64_t* bin, unsigned count) {
  atomicAdd(reinterpret_cast<unsigned long long*>(bin), (unsigned long long)count);
}

__device__ inline void clear_words(unsigned* words, int count, int thread) {
  struct alignas(16) Four {
    unsigned word[4];
  };
  for (int i = thread; i < count / 4; i += kThreads) reinterpret_cast<Four*>(words)[i] = Four{};
}

// kPlaces: channels of one lane. Lanes of a warp that meet in a counter are added up by the hardware, so that one copy
// for the block is enough, whatever the data.
template <HistogramKind kind, int kPlaces>
struct BlockHistogram {
  static constexpr int kWords = 0;
  __device__ BlockHistogram(unsigned*, const Geometry&, int) {}
  template <class acc_t>
  __device__ void add(acc_t, int) const {}
  __device__ void add_to_state(const State&, const Geometry&, int64_t, int64_t, int) const {}
};

template <int kPlaces>
struct BlockHistogram<HistogramKind::per_tensor, kPlaces> {
  static constexpr int kWords = kExponentBins;
  unsigned* counts;

  __device__ BlockHistogram(unsigned* shared, const Geometry&, int thread) : counts(shared) {
    clear_words(counts, kWords, thread);
  }

  template <class acc_t>
  __device__ void add(acc_t x, int) const {
    atomicAdd(&counts[exponent_of(x)], 1u);
  }

  __device__ void add_to_state(const State& state, const Geometry&, int64_t, int64_t, int thread) const {
    for (int i = thread; i < kWords; i += kThreads) {
      const int exponent = i & 255;
      if (counts[i] != 0 && exponent != 255) add_to_bin(&state.histogram[exponent == 0 ? 0 : i], counts[i]);
    }
  }
};

// Where lanes are neighbouring channels, the counters are [exponent][place][lane]: the lanes of a warp are in different
// banks. Else [lane][exponent].
template <int kPlaces>
struct BlockHistogram<HistogramKind::per_channel, kPlaces> {
  static constexpr int kExponents = 256, kChannels = kCountedChannels, kLanes = kChannels / kPlaces;
  static constexpr int kWords = kExponents * kChannels;
  unsigned* counts;
  unsigned lane_bytes, mask;
  int shift;  // of the exponent, to where it counts in bytes

  __device__ BlockHistogram(unsigned* shared, const Geometry& geometry, int thread) : counts(shared) {
    const bool by_exponent = geometry.lanes_first;
    clear_words(counts, by_exponent ? kWords : geometry.lanes * kExponents, thread);
    const int step = by_exponent ? kChannels : 1;
    static_assert(kChannels * sizeof(unsigned) == 1 << 7 && kPlaces * kLanes == kChannels);
    shift = by_exponent ? 23 - 7 : 23 - 2;
    mask = (kExponents - 1) * step * sizeof(unsigned);
    lane_bytes = geometry.lane(thread) * (by_exponent ? 1 : kExponents) * sizeof(unsigned);
  }

  // A shift, one logical operation, the atomic one.
  __device__ void add(float x, int place) const {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    add_at(bits >> shift & mask, place);
  }
  __device__ void add(double x, int place) const { add_at(exponent_of(x) << 23 >> shift & mask, place); }

  __device__ void add_at(unsigned exponent_bytes, int place) const {
    auto* at = reinterpret_cast<char*>(counts) + (exponent_bytes | lane_bytes);
    atomicAdd(reinterpret_cast<unsigned*>(at) + place * kLanes, 1u);
  }

  __device__ void add_to_state(const State& state, const Geometry& geometry, int64_t first_channel, int64_t channels,
                               int thread) const {
    // A thread stays with its place and lane, or with its exponent.
    const int row = geometry.lanes_first ? kChannels : kExponents;
    const int words = geometry.lanes_first ? kWords : geometry.lanes * kExponents;
    for (int i = thread; i < words; i += kThreads) {
      const unsigned count = counts[i];
      if (count == 0) continue;
      const int column = i % row, exponent = geometry.lanes_first ? i / row : column;
      const int in_block =
          geometry.lanes_first ? column % kLanes * kPlaces + column / kLanes : i / row;  // where a lane is its channel
      if (exponent != 255 && first_channel + in_block < channels) {
        add_to_bin(&state.histogram[(first_channel + in_block) * kOctaveBins + octave_bin(exponent)], count);
      }
    }
  }
};

}  // namespace hookstats::cuda
