// Values of one byte are not summed but counted: there are only 256 of them, so that a counter for each, by channel,
// holds every statistic and every histogram exactly, with NaN and infinities. A value takes two instructions: one makes
// the address of its counter, the other counts.
#pragma once

#include "histogram.h"
#include "read.h"

namespace hookstats::cuda {

// Whether packs of these elements are counted.
template <class scalar_t, int kPack>
constexpr bool kCounted = sizeof(scalar_t) == 1 && kPack == 4;

// Counts that follow each other: those of one bin are added to the state at once.
struct BinRun {
  int64_t* const bins;
  int bin = kNoBin;
  unsigned count = 0;

  __device__ void add(int to, unsigned more) {
    if (to != bin) end();
    bin = to;
    count += more;
  }
  __device__ void end() {
    if (count != 0) add_to_bin(&bins[bin], count);
    count = 0;
  }
};

// Counters in shared memory, [value][column]. A channel of the block has one column; where the block has fewer
// channels, several that lie side by side, so that lanes of a warp which share a channel count in different banks. With
// 16 lanes of four places, the two groups of a warp would meet in the same 16 banks: the odd one takes its places in
// another order.
template <class scalar_t, HistogramKind kind, int kPlaces>
struct ValueCounts {
  static constexpr int kValues = 256, kColumns = kBlockChannels, kWords = kValues * kColumns;
  static constexpr int kSpan = 8;  // values of a thread, where all channels are added up
  using Whole = BlockSums<float>;
  static_assert(kThreads == kValues && kColumns * sizeof(unsigned) == 1 << 8);

  unsigned* const counts;
  const int channels, copies;  // of the block, of a channel
  unsigned at[kPlaces];        // of the columns, in bytes
  unsigned selector[4];        // puts a byte of a word before one of `at`

  __device__ ValueCounts(unsigned* shared, const State&, const Geometry& geometry, int64_t, int thread)
      : counts(shared), channels(geometry.lanes * kPlaces), copies(kColumns / channels) {
    clear_words<kThreads>(counts, kWords, thread);
    const int lane = geometry.lane(thread), group = geometry.group(thread);
    const int exchange = kPlaces > 1 ? group / copies % 2 : 0;
    for (int i = 0; i < kPlaces; ++i) {
      at[i] = (first_column(lane * kPlaces + (i ^ exchange)) + group % copies) * sizeof(unsigned);
    }
    for (int i = 0; i < 4; ++i) selector[i] = 0x7604 | (i ^ exchange) << 4;
  }

  // Neighbouring lanes in neighbouring columns, one place behind the other.
  __device__ int first_column(int channel) const {
    return (channel % kPlaces * (channels / kPlaces) + channel / kPlaces) * copies;
  }

  __device__ void add(uint32_t word) const {
    for (int i = 0; i < 4; ++i) {
      const uint32_t bytes = choose_bytes(word, at[i % kPlaces], selector[i]);
      atomicAdd(reinterpret_cast<unsigned*>(reinterpret_cast<char*>(counts) + bytes), 1u);
    }
  }

  __device__ void add(scalar_t value) const {
    atomicAdd(&counts[value.bits * kColumns + at[0] / sizeof(unsigned)], 1u);
  }

  // How often a value was met in `n` columns. Threads begin at different ones, in different banks.
  __device__ unsigned count(int value, int first, int n, int thread) const {
    unsigned sum = 0;
    for (int i = 0, column = thread % n; i < n; ++i) {
      sum += counts[value * kColumns + first + column];
      column = column + 1 < n ? column + 1 : 0;
    }
    return sum;
  }

  // After a barrier: the sums of a thread's share of the values of a channel. What is not finite goes to the state, and
  // so do the bins of channels.
  __device__ Whole sums(const State& state, const Geometry& merging, int64_t first_channel, int thread) const {
    const int channel = thread % channels, first = first_column(channel);
    const int share = (kValues + merging.groups - 1) / merging.groups, from = thread / channels * share;
    BinRun run{by_channel(state) ? state.histogram + (first_channel + channel) * state.bins : nullptr};
    Whole sums = Whole::neutral();
    if (first_channel + channel >= state.channels) return sums;
    for (int value = from; value < from + share && value < kValues; ++value) {
      const unsigned n = count(value, first, copies, thread / channels);
      if (n == 0) continue;
      const float x = widen(scalar_t{uint8_t(value)});
      if (!(x - x == 0)) {
        const int field = x != x ? k_nans : x > 0 ? k_posinfs : k_neginfs;
        atomicAdd(&state.moments[field * state.row_stride + first_channel + channel], double(n));
        continue;
      }
      sums.merge(Whole{0, 0, n * double(std::fabs(x)), x, x, x, n, x == 0 ? n : 0});
      if (by_channel(state)) run.add(bin_of(x, state), n);
    }
    run.end();
    return sums;
  }

  // The bins of all channels together. Every thread calls it, after a barrier.
  __device__ void add_to_state(const State& state, unsigned* totals, int thread) const {
    if (kind == HistogramKind::none || by_channel(state)) return;
    totals[thread] = count(thread, 0, kColumns, thread);
    __syncthreads();
    if (thread >= kValues / kSpan) return;
    BinRun run{state.histogram};
    for (int value = thread * kSpan; value < (thread + 1) * kSpan; ++value) {
      const float x = widen(scalar_t{uint8_t(value)});
      if (totals[value] != 0 && x - x == 0) run.add(bin_of(x, state), totals[value]);
    }
    run.end();
  }

 private:
  __device__ static bool by_channel(const State& state) {
    return kind == HistogramKind::per_channel || (kind == HistogramKind::linear && state.by_channel);
  }
  __device__ static int bin_of(float x, const State& state) {
    if (kind == HistogramKind::per_tensor) return exponent_bin(x);
    if (kind == HistogramKind::per_channel) return octave_bin(exponent_bin(x));
    return linear_bin(x, float(state.low), float(state.high), state.bins);
  }
};

// A thread's packs, counted.
template <class scalar_t, int kPack, int kPlaces, template <class> class WalkerOf, class Size>
struct CountingReader {
  using Feed = Ring<scalar_t, kPack, WalkerOf<scalar_t>, false, Size>;
  const int count;
  Feed feed;

  __device__ CountingReader(double*, void* ring, int thread, const scalar_t* data, const Layout& layout, int64_t first,
                            int64_t step, int count, bool, int valid)
      : count(count),
        feed(ring, thread, WalkerOf<scalar_t>(data, layout, first, step), count, false, valid * (kPack / kPlaces)) {}

  template <class Counts>
  __device__ void add(scalar_t value, const Counts& counts, const NonFinite&, int) {
    counts.add(value);
  }

  template <class Counts>
  __device__ void read(const Counts& counts) {
    constexpr int kGroup = Feed::kGroup;
    typename Feed::Load taken[kGroup];
    const auto add = [&](int i) {
      uint32_t word;
      memcpy(&word, &taken[i], sizeof word);
      counts.add(word);
    };
#pragma unroll 1
    for (int groups = count / kGroup; groups > 0; --groups) {
      feed.take(taken, kGroup);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) add(i);
      feed.go_on();
    }
    const int tail = count % kGroup;
    feed.take(taken, tail);
#pragma unroll
    for (int i = 0; i < kGroup - 1; ++i) {
      if (i < tail) add(i);
    }
  }
};

}  // namespace hookstats::cuda
