// A block's histogram in shared memory, added to the state at the end.
// Counting exponents must cost few instructions: there is a counter for every exponent, NaN's and Inf's too, so that no
// value is tested or clamped on the way. What is no bin is dropped when the counters are added up.
#pragma once

#include "fold.h"

namespace hookstats::cuda {

// A float32 whose sign and exponent are those of the value.
HOOKSTATS_HD inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
HOOKSTATS_HD inline uint32_t bits_of(double x) {
  const int bin = exponent_bin(x);
  return unsigned(bin == kNoBin ? 255 : bin) << 23;
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

// kPlaces: channels of one lane. kPlanes: never are lanes neighbouring channels. Lanes of a warp that meet in a counter
// are added up by the hardware, so that one copy for the block is enough, whatever the data.
template <HistogramKind kind, int kPlaces, bool kPlanes>
struct BlockHistogram {
  static constexpr int kWords = 0, kMostRows = INT32_MAX;
  __device__ BlockHistogram(unsigned*, const State&, const Geometry&, int64_t, int) {}
  __device__ void clear(const Geometry&, int) const {}
  template <class acc_t>
  __device__ void add(acc_t, int) const {}
  __device__ void add_to_state(const State&, const Geometry&, int64_t, int64_t, int) const {}
};

template <int kPlaces, bool kPlanes>
struct BlockHistogram<HistogramKind::per_tensor, kPlaces, kPlanes> {
  static constexpr int kWords = kExponentBins, kMostRows = INT32_MAX;
  unsigned* counts;
  const unsigned begin;  // their address

  __device__ BlockHistogram(unsigned* shared, const State&, const Geometry& geometry, int64_t, int thread)
      : counts(shared), begin(address_of(shared)) {
    clear(geometry, thread);
  }
  __device__ void clear(const Geometry&, int thread) const { clear_words(counts, kWords, thread); }

  template <class acc_t>
  __device__ void add(acc_t x, int) const {
    if constexpr (kKeepsAddresses) {
      count_at<23 - 2>(begin, bits_of(x) & 0xff800000, 1u);
    } else {
      atomicAdd(&counts[bits_of(x) >> 23], 1u);
    }
  }

  __device__ void add_to_state(const State& state, const Geometry&, int64_t, int64_t, int thread) const {
    for (int i = thread; i < kWords; i += kThreads) {
      const int exponent = i & 255;
      if (counts[i] != 0 && exponent != 255) add_to_bin(&state.histogram[exponent == 0 ? 0 : i], counts[i]);
    }
  }
};

// By channel. Where lanes share a channel, 32-bit counters [lane][exponent]. Where lanes are neighbouring channels,
// 16-bit counters in pairs, [exponent][32 words]: half the memory lets two blocks run on a multiprocessor; the block
// adds them up before one can overflow. A word holds two places of a lane, or lanes 32 apart, so that the lanes of a
// warp are in different banks: with four places a warp is two groups of 16 lanes, of which the odd ones have the halves
// of their packs exchanged.
template <int kPlaces, bool kPlanes>
struct BlockHistogram<HistogramKind::per_channel, kPlaces, kPlanes> {
  static constexpr int kExponents = 256, kRowWords = kBlockChannels / 2, kWords = kExponents * kRowWords;
  static constexpr int kMostRows = 65535;  // of a block, before its counters must be added up
  static constexpr bool kByAddress = kKeepsAddresses && (kPlaces > 1 || kPlanes);
  unsigned* counts;
  unsigned at[2],
      mask;   // of the lower and the upper places, as addresses or behind `counts`; of the exponent: in bytes
  int shift;  // of the exponent, to where it counts in bytes
  unsigned unit;
  bool pairs;

  __device__ BlockHistogram(unsigned* shared, const State&, const Geometry& geometry, int64_t, int thread)
      : counts(shared), pairs(geometry.lanes_first) {
    clear(geometry, thread);
    const int lane = geometry.lane(thread);
    static_assert(kRowWords * sizeof(unsigned) == 1 << 7);
    shift = pairs ? 23 - 7 : 23 - 2;
    mask = (kExponents - 1) << (23 - shift);
    const int word = pairs ? lane % kRowWords : lane * kExponents;
    const bool exchanged = exchanges<kPlaces>(geometry, thread);
    const unsigned begin = kByAddress ? address_of(shared) : 0;
    for (int i = 0; i < 2; ++i)
      at[i] = begin + (word + (kPlaces == 4 && (i == 1) != exchanged ? kRowWords / 2 : 0)) * sizeof(unsigned);
    unit = pairs && lane >= kRowWords ? 1 << 16 : 1;
  }

  __device__ static int words(const Geometry& geometry) {
    return geometry.lanes_first ? kWords : geometry.lanes * kExponents;
  }
  __device__ void clear(const Geometry& geometry, int thread) const { clear_words(counts, words(geometry), thread); }

  // A shift, one logical operation, the atomic one; or a logical operation, a shift with a sum, the atomic one.
  template <class acc_t>
  __device__ void add(acc_t x, int place) const {
    if constexpr (kByAddress) {
      constexpr unsigned kShift = kPlaces > 1 ? 23 - 7 : 23 - 2;
      count_at<kShift>(at[kPlaces == 4 ? place / 2 : 0], bits_of(x) & 0x7f800000, place % 2 ? 1u << 16 : 1u);
    } else {
      add_at(bits_of(x) >> shift & mask, place);
    }
  }

  __device__ void add_at(unsigned exponent_bytes, int place) const {
    const unsigned bytes = exponent_bytes | at[kPlaces == 4 ? place / 2 : 0];
    auto* counter = reinterpret_cast<unsigned*>(reinterpret_cast<char*>(counts) + bytes);
    if (kPlaces > 1) {
      atomicAdd(counter, place % 2 ? 1u << 16 : 1u);
    } else if (kPlanes || !pairs) {
      atomicAdd(counter, 1u);
    } else {
      atomicAdd(counter, unit);
    }
  }

  __device__ void add_to_state(const State& state, const Geometry& geometry, int64_t first_channel, int64_t channels,
                               int thread) const {
    for (int i = thread; i < words(geometry); i += kThreads) {
      const unsigned word = counts[i];
      if (word == 0) continue;
      if (!pairs) {
        add_one(state, first_channel + i / kExponents, channels, i % kExponents, word);
        continue;
      }
      const int column = i % kRowWords, exponent = i / kRowWords;
      for (int half = 0; half < 2; ++half) {
        const unsigned count = word >> 16 * half & 0xffff;
        const int channel = kPlaces == 4   ? column % 16 * 4 + column / 16 * 2 + half
                            : kPlaces == 2 ? column * 2 + half
                                           : column + half * kRowWords;
        if (count) add_one(state, first_channel + channel, channels, exponent, count);
      }
    }
  }

  __device__ static void add_one(const State& state, int64_t channel, int64_t channels, int exponent, unsigned count) {
    if (exponent == 255 || channel >= channels) return;
    add_to_bin(&state.histogram[channel * kOctaveBins + octave_bin(exponent)], count);
  }
};

// Linear bins, in shared memory where the block's channels' counters fit there, else in the state itself.
template <int kPlaces, bool kPlanes>
struct BlockHistogram<HistogramKind::linear, kPlaces, kPlanes> {
  static constexpr int kWords = 8192, kMostRows = INT32_MAX;
  unsigned* counts;  // null: in the state
  const State& state;
  int64_t first;  // of the lane's counters in the state
  int at, step;   // of the lane's counters in the block, and from place to place

  __device__ BlockHistogram(unsigned* shared, const State& state, const Geometry& geometry, int64_t first_channel,
                            int thread)
      : counts(words(state, geometry, first_channel) <= kWords ? shared : nullptr), state(state) {
    step = state.by_channel ? state.bins : 0;
    at = geometry.lane(thread) * kPlaces * step;
    first = first_channel * step + at;
    if (counts) clear_words(counts, (words(state, geometry, first_channel) + 3) / 4 * 4, thread);
  }
  __device__ static int words(const State& state, const Geometry& geometry, int64_t first_channel) {
    const int64_t channels = state.channels - first_channel, most = geometry.lanes * kPlaces;
    const int64_t words = state.by_channel ? (channels < most ? channels : most) * state.bins : state.bins;
    return words <= kWords ? int(words) : kWords + 1;
  }
  __device__ void clear(const Geometry&, int) const {}  // only where counters are of 16 bits

  template <class acc_t>
  __device__ void add(acc_t x, int place) const {
    if (!(x - x == 0)) return;
    const int bin = place * step + linear_bin(x, acc_t(state.low), acc_t(state.high), state.bins);
    if (counts) {
      atomicAdd(&counts[at + bin], 1u);
    } else {
      add_to_bin(&state.histogram[first + bin], 1);
    }
  }

  __device__ void add_to_state(const State&, const Geometry& geometry, int64_t first_channel, int64_t,
                               int thread) const {
    if (!counts) return;
    const int all = words(state, geometry, first_channel);
    for (int i = thread; i < all; i += kThreads) {
      if (counts[i] != 0) add_to_bin(&state.histogram[first_channel * step + i], counts[i]);
    }
  }
};

}  // namespace hookstats::cuda
