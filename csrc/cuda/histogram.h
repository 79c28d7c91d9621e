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

// kPlaces: channels of one lane.
template <HistogramKind kind, int kPlaces>
struct BlockHistogram {
  static constexpr int kWords = 0;
  __device__ BlockHistogram(unsigned*, const Geometry&, int) {}
  template <class acc_t>
  __device__ void add(acc_t, int) const {}
  __device__ void add_to_state(const State&, const Geometry&, int64_t, int) const {}
};

template <int kPlaces>
struct BlockHistogram<HistogramKind::per_tensor, kPlaces> {
  static constexpr int kWords = kExponentBins;
  unsigned* counts;

  __device__ BlockHistogram(unsigned* shared, const Geometry&, int thread) : counts(shared) {
    for (int i = thread; i < kWords; i += kThreads) counts[i] = 0;
  }

  // One copy for the block: lanes of a warp that meet in a counter are added up by the hardware.
  template <class acc_t>
  __device__ void add(acc_t x, int) const {
    atomicAdd(&counts[exponent_of(x)], 1u);
  }

  __device__ void add_to_state(const State& state, const Geometry&, int64_t, int thread) const {
    for (int i = thread; i < kWords; i += kThreads) {
      const int exponent = i & 255;
      if (counts[i] != 0 && exponent != 255) add_to_bin(&state.histogram[exponent == 0 ? 0 : i], counts[i]);
    }
  }
};

// Counters [exponent][place][slot]. The lanes of a place have a slot each, or several, which their groups share out.
template <int kPlaces>
struct BlockHistogram<HistogramKind::per_channel, kPlaces> {
  static constexpr int kExponents = 256, kSlots = kBlockChannels / kPlaces;
  static constexpr int kWords = kExponents * kBlockChannels;
  static constexpr unsigned kRowBytes = kBlockChannels * sizeof(unsigned);
  unsigned* counts;
  unsigned slot_bytes;

  __device__ BlockHistogram(unsigned* shared, const Geometry& geometry, int thread) : counts(shared) {
    for (int i = thread; i < kWords; i += kThreads) counts[i] = 0;
    const int slot = geometry.lane(thread) + geometry.group(thread) % copies(geometry) * geometry.lanes;
    slot_bytes = slot * sizeof(unsigned);
  }

  __device__ static int copies(const Geometry& geometry) { return kSlots / geometry.lanes; }

  // A shift, one logical operation and the atomic one: rows are a power of two long, so the slot's address is or-ed in.
  __device__ void add(float x, int place) const {
    static_assert(kRowBytes == 1 << 8);
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    add_at((bits >> (23 - 8) & 255 * kRowBytes) | slot_bytes, place);
  }
  __device__ void add(double x, int place) const { add_at((exponent_of(x) & 255) * kRowBytes | slot_bytes, place); }

  __device__ void add_at(unsigned bytes, int place) const {
    atomicAdd(reinterpret_cast<unsigned*>(reinterpret_cast<char*>(counts) + bytes) + place * kSlots, 1u);
  }

  __device__ void add_to_state(const State& state, const Geometry& geometry, int64_t first_channel, int thread) const {
    const int lanes = geometry.lanes, channels = lanes * kPlaces, copies = this->copies(geometry);
    for (int i = thread; i < kExponents * channels; i += kThreads) {
      const int exponent = i / channels, place = i % channels / lanes, lane = i % lanes;
      const unsigned* at = &counts[exponent * kBlockChannels + place * kSlots + lane];
      unsigned sum = 0;
      // Threads start at different copies: those of one lane lie 64 words apart, in one bank.
      for (int k = 0; k < copies; ++k) sum += at[(k + exponent) % copies * lanes];
      if (sum == 0 || exponent == 255) continue;
      const int64_t channel = first_channel + lane * kPlaces + place;
      add_to_bin(&state.histogram[channel * kOctaveBins + octave_bin(exponent)], sum);
    }
  }
};

}  // namespace hookstats::cuda
