// How a thread sums its share of a tensor: tiles of plain sums in the arithmetic of the data. A tile for which those do
// not hold is read again, masked: what is not finite is left out. Where that does not hold either, there is an exact
// way.
#pragma once

#include "extremes.h"
#include "feed.h"

namespace hookstats::cuda {

// A thread's sums. The places of a pack are `kChannels` channels, or all of one. kMasks: a tile is read again masked,
// not all of it exactly.
template <class scalar_t, int kPack_, int kChannels_, template <class> class WalkerOf, bool kExchanges, bool kMasks,
          int kFlight>
struct Reader {
  using Walker = WalkerOf<scalar_t>;
  using Load = Pack<scalar_t, kPack_>;
  using acc_t = acc_of<scalar_t>;
  using Feed = std::conditional_t<(kPack_ > 1), Ring<scalar_t, kPack_, Walker, kExchanges, kFlight>,
                                  Burst<scalar_t, kPack_, Walker>>;
  static constexpr int kPack = kPack_, kChannels = kChannels_;
  static constexpr int kPlaces = kPack / kChannels;  // of a channel in a pack
  static constexpr int kTilePacks = 128;
  static_assert(kTilePacks <= 256, "zeros are counted in 16-bit floating point");

  // Over all tiles: sums in shared memory, a slot for each place, where they cost no registers while values are read.
  using Whole = BlockSums<acc_t>;
  static constexpr int kSlots = kThreads * kChannels;
  double* const shared;
  const int thread;

  // Over the tile: sums about a shift.
  acc_t shift[kChannels], sum[kChannels], square_sum[kChannels], abs_sum[kChannels];
  Extremes<scalar_t, kPack> extremes;
  bool shifted = false, guessed, masked = false;

  // What it reads: the packs first, first + step, ..., `count` of them.
  const scalar_t* const data;
  const Layout& layout;
  const int64_t first, step;
  const int count;
  int done = 0;
  const int exchange;  // exclusive or: from a thread's place to the place in the tensor
  const int valid;     // of the places in the tensor, those that it has: fewer where its channels are no whole packs
  Feed feed;

  // Asks for the first packs.
  __device__ Reader(double* shared, void* ring, int thread, const scalar_t* data, const Layout& layout, int64_t first,
                    int64_t step, int count, bool exchange, int valid)
      : shared(shared),
        thread(thread),
        data(data),
        layout(layout),
        first(first),
        step(step),
        count(count),
        exchange(kExchanges && exchange ? kChannels / 2 : 0),
        valid(valid),
        feed(ring, thread, Walker(data, layout, first, step), count, exchange, valid * kPlaces) {
    for (int c = 0; c < kChannels; ++c) store_slot(Whole::neutral(), shared, kSlots, thread + c * kThreads);
  }

  // The tile's packs, and all that follow.
  __device__ Walker tile() const { return Walker(data, layout, first + done * step, step); }

  // Between the middle two of the channel's first four values, so that one that lies far from the others does not move
  // it: of those that are finite, and a guess where none is.
  __device__ void choose_shift(const Load* pack, int packs) {
    acc_t x[4][kPack];
    for (int d = 0; d < 4; ++d) widen_pack(pack[d], x[d]);
    guessed = false;
    for (int c = 0; c < kChannels; ++c) {
      acc_t y[4];
      for (int d = 0; d < 4; ++d) {
        y[d] = finite_or_nan(x[d][c]);
        if (d >= packs) y[d] = y[0];
      }
      const acc_t low = std::fmax(std::fmin(y[0], y[1]), std::fmin(y[2], y[3]));  // a NaN loses
      const acc_t high = std::fmin(std::fmax(y[0], y[1]), std::fmax(y[2], y[3]));
      const acc_t middle = low + (high - low) / 2;
      const bool is_finite = middle - middle == 0;
      shift[c] = is_finite ? middle : 0;
      guessed |= !is_finite;
    }
    shifted = true;
  }

  // Rounding: a value passes a chain of four additions, a tree over the places, and one addition per four packs.
  template <int packs, bool may_be_first, class Histogram>
  __device__ void update(const Pack<scalar_t, kPack>* pack, const Histogram& histogram) {
    acc_t x[packs][kPack];
    for (int d = 0; d < packs; ++d) {
      widen_pack(pack[d], x[d]);
      extremes.update(pack[d], x[d]);
    }
    if (!kMasks && may_be_first && !shifted) {  // their mean: the middle would take registers that are not there
      for (int c = 0; c < kChannels; ++c) {
        acc_t first = x[0][c];
        for (int d = 1; d < packs; ++d) first += x[d][c];
        shift[c] = first * (acc_t(1) / packs);
      }
      shifted = true;
    }
    acc_t s[kPack], q[kPack], a[kPack];  // of each place
    if constexpr (kHasFloatPairs && sizeof(acc_t) == sizeof(float) && kPack % 2 == 0) {
      for (int i = 0; i < kPack; i += 2) add_pairs<packs>(x, i, s, q);
    } else {
      for (int i = 0; i < kPack; ++i) {
        s[i] = x[0][i] - shift[i % kChannels];
        q[i] = s[i] * s[i];
        for (int d = 1; d < packs; ++d) {
          const acc_t deviation = x[d][i] - shift[i % kChannels];
          s[i] += deviation;
          q[i] += deviation * deviation;
        }
      }
    }
    for (int i = 0; i < kPack; ++i) {
      a[i] = std::fabs(x[0][i]);
      for (int d = 1; d < packs; ++d) a[i] += std::fabs(x[d][i]);
    }
    add_places(s, q, a);
    for (int d = 0; d < packs; ++d) {
      for (int i = 0; i < kPack; ++i) histogram.add(x[d][i], i % kChannels);
    }
  }
  // The same sums of deviations and of their squares, of two neighbouring places at once.
  template <int packs>
  __device__ void add_pairs(const acc_t (&x)[packs][kPack], int i, acc_t (&s)[kPack], acc_t (&q)[kPack]) const {
    const FloatPair minus(-float(shift[i % kChannels]), -float(shift[(i + 1) % kChannels]));
    FloatPair sums = FloatPair(float(x[0][i]), float(x[0][i + 1])) + minus, squares = sums * sums;
    for (int d = 1; d < packs; ++d) {
      const FloatPair deviations = FloatPair(float(x[d][i]), float(x[d][i + 1])) + minus;
      sums = sums + deviations;
      squares.add_squares(deviations);
    }
    float low = 0, high = 0;
    sums.split(low, high);
    s[i] = low;
    s[i + 1] = high;
    squares.split(low, high);
    q[i] = low;
    q[i + 1] = high;
  }
  __device__ void add_places(acc_t (&s)[kPack], acc_t (&q)[kPack], acc_t (&a)[kPack]) {
    for (int half = kPack / 2; half >= kChannels; half /= 2) {
      for (int i = 0; i < half; ++i) {
        s[i] += s[i + half];
        q[i] += q[i + half];
        a[i] += a[i + half];
      }
    }
    for (int c = 0; c < kChannels; ++c) {
      sum[c] += s[c];
      square_sum[c] += q[c];
      abs_sum[c] += a[c];
    }
  }

  // How many values of a channel are finite, +Inf and -Inf, in ten bits each.
  static constexpr int kKindBits = 10;
  static_assert(kTilePacks * kPlaces < 1 << kKindBits);

  // The sums of the finite values of four packs, of which `packs` are there. Doubles go into the tile's sums one by
  // one, since registers are scarce there and digits are not.
  template <class Histogram>
  __device__ void update_masked(const Load* pack, int packs, unsigned (&kinds)[kChannels], bool in_histogram,
                                const Histogram& histogram) {
    constexpr acc_t kInfinity = std::numeric_limits<acc_t>::infinity();
    constexpr bool kOneByOne = sizeof(acc_t) == sizeof(double);
    acc_t s[kPack]{}, q[kPack]{}, a[kPack]{};
    for (int d = 0; d < 4; ++d) {
      if (d >= packs) break;
      Load here = pack[d];
      acc_t x[kPack];
      widen_pack(here, x);
      bool infinite = false;
      for (int i = 0; i < kPack; ++i) infinite |= std::fabs(x[i]) == kInfinity;
      if (infinite) {  // rare beside NaN: counted, and made NaN
        for (int i = 0; i < kPack; ++i) {
          if (std::fabs(x[i]) == kInfinity) kinds[i % kChannels] += 1 << (x[i] > 0 ? 1 : 2) * kKindBits;
        }
        finite_or_nan(here, x);
      }
      for (int i = 0; i < kPack; ++i) {
        const int c = i % kChannels;
        const acc_t deviation = x[i] - shift[c];
        if (x[i] != x[i]) continue;
        (kOneByOne ? sum[c] : s[i]) += deviation;
        (kOneByOne ? square_sum[c] : q[i]) += deviation * deviation;
        (kOneByOne ? abs_sum[c] : a[i]) += std::fabs(x[i]);
        kinds[c] += 1;
      }
      extremes.update(here, x);
      if (in_histogram) continue;
      for (int i = 0; i < kPack; ++i) histogram.add(x[i], i % kChannels);
    }
    if (!kOneByOne) add_places(s, q, a);
  }

  // As sums_hold in stats.h, in the arithmetic of the data. Equal values far from the shift, if it is the mean of the
  // tile before, vary so much with that one that what is lost here does not show.
  __device__ bool holds(int c, acc_t low, acc_t high, acc_t inverse_count) const {
    if (!Walker::kAligned && (c ^ exchange) >= valid) return true;
    constexpr acc_t kLargest = std::numeric_limits<acc_t>::max(), kSmallest = std::numeric_limits<acc_t>::min();
    const acc_t q = square_sum[c];
    const bool finite = (q <= kLargest / 32) & (abs_sum[c] <= kLargest);
    const bool constant = low == high, in_range = q * inverse_count >= kSmallest;
    const bool shift_is_near = 16 * (q - sum[c] * inverse_count * sum[c]) >= q;
    const bool equal = constant & ((low == shift[c]) | (!(kMasks && guessed) & (q != 0)));
    return finite & (equal | (in_range & shift_is_near));
  }

  __device__ acc_t tile_min(int c) const {
    acc_t low = extremes.min(c);
    for (int i = c + kChannels; i < kPack; i += kChannels) low = std::fmin(low, extremes.min(i));
    return low;
  }
  __device__ acc_t tile_max(int c) const {
    acc_t high = extremes.max(c);
    for (int i = c + kChannels; i < kPack; i += kChannels) high = std::fmax(high, extremes.max(i));
    return high;
  }
  __device__ unsigned tile_zeros(int c) const {
    int zeros = extremes.zeros(c);
    for (int i = c + kChannels; i < kPack; i += kChannels) zeros += extremes.zeros(i);
    return unsigned(zeros);
  }

  __device__ void close_tile(int packs, acc_t inverse_count) {
    for (int c = 0; c < kChannels; ++c) close_channel(c, unsigned(packs * kPlaces), inverse_count);
  }
  __device__ void close_channel(int c, unsigned values, acc_t inverse_count) {
    const Whole tile{double(sum[c]), double(square_sum[c]), double(abs_sum[c]), shift[c], tile_min(c), tile_max(c),
                     values,         tile_zeros(c)};
    const int slot = thread + (c ^ exchange) * kThreads;
    Whole whole = load_slot<Whole>(shared, kSlots, slot);
    whole.merge(tile);
    store_slot(whole, shared, kSlots, slot);
    shift[c] += sum[c] * inverse_count;  // the next tile's
  }

  // Before a tile is read again: the shift as near to its mean as is known. With a value that is not finite, it stays.
  __device__ void correct_shift(acc_t inverse_count) {
    for (int c = 0; c < kChannels; ++c) {
      const acc_t low = tile_min(c), mean = shift[c] + sum[c] * inverse_count;
      const acc_t nearer = low == tile_max(c) ? low : mean;
      if (nearer - nearer == 0) shift[c] = nearer;
    }
  }

  // A masked tile. The next one is masked, too, if this one had to be.
  __device__ void close_masked(int packs, const unsigned (&kinds)[kChannels], const NonFinite& nonfinite, int channel) {
    const unsigned values = packs * kPlaces;
    unsigned wrong = 0;  // bits of the places for which the sums do not hold
    bool none = false;   // of a channel's values is finite
    masked = false;
    for (int c = 0; c < kChannels; ++c) {
      const int place = c ^ exchange;
      if (!Walker::kAligned && place >= valid) continue;
      constexpr unsigned kMask = (1 << kKindBits) - 1;
      const unsigned finite = kinds[c] & kMask, positive = kinds[c] >> kKindBits & kMask,
                     negative = kinds[c] >> 2 * kKindBits;
      masked |= finite < values;
      none |= finite == 0;
      const acc_t inverse_count = acc_t(1) / acc_t(finite);
      if (finite > 0 && !holds(c, tile_min(c), tile_max(c), inverse_count)) {
        wrong |= 1u << place;
        continue;
      }
      if (finite > 0) close_channel(c, finite, inverse_count);
      nonfinite.add(channel + place, 0, values - finite - positive - negative);
      nonfinite.add(channel + place, 1, positive);
      nonfinite.add(channel + place, 2, negative);
    }
    guessed &= none;
    if (wrong == 0) return;
    masked = true;
    read_exactly(wrong, packs, nonfinite, channel);
  }

  // The exact way through a tile, for the places whose bit is set: in float64, one channel after the other, to leave
  // the registers to the fast way.
  __device__ void read_exactly(unsigned places, int packs, const NonFinite& nonfinite, int channel) {
    shifted = false;
#pragma unroll 1
    for (int place = 0; place < kChannels; ++place) {
      if (places >> place & 1) read_channel(place, packs, nonfinite, channel + place);
    }
  }
  __device__ void read_channel(int place, int packs, const NonFinite& nonfinite, int channel) {
    constexpr int kValues = 8, kBatch = kValues / kPlaces;
    Walker walker = tile();
    Whole whole = load_slot<Whole>(shared, kSlots, thread + place * kThreads);
#pragma unroll 1
    for (int left = packs; left > 0; left -= kBatch) {
      scalar_t values[kValues];
      for (int d = 0; d < kBatch; ++d) {
        if (d >= left) break;
        const scalar_t* at = walker.next() + place;
        for (int i = 0; i < kPlaces; ++i) values[d * kPlaces + i] = at[i];
      }
      for (int i = 0; i < kValues; ++i) {
        if (i / kPlaces >= left) break;
        const acc_t x = widen(values[i]);
        if (x - x == 0) {
          whole.add(x);
        } else {
          nonfinite.add(channel, x);
        }
      }
    }
    store_slot(whole, shared, kSlots, thread + place * kThreads);
  }

  // One value of the first channel alone.
  template <class Histogram>
  __device__ void add(scalar_t value, const Histogram& histogram, const NonFinite& nonfinite, int channel) {
    const acc_t x = widen(value);
    histogram.add(x, 0);
    if (x - x == 0) {
      Whole whole = load_slot<Whole>(shared, kSlots, thread);
      whole.add(x);
      store_slot(whole, shared, kSlots, thread);
    } else {
      nonfinite.add(channel, x);
    }
  }

  // On to pack number `until`, whole tiles, or to the last. `channel`: the first of the thread's channels in its block.
  template <class Histogram>
  __device__ void read(int until, const Histogram& histogram, const NonFinite& nonfinite, int channel) {
    constexpr int kGroup = Feed::kGroup;
    if (until > count) until = count;
    Load taken[kGroup];
    [[maybe_unused]] bool again = false;  // whether the tile has been read before
    while (done < until) {
      for (int c = 0; c < kChannels; ++c) sum[c] = square_sum[c] = abs_sum[c] = 0;
      extremes.clear();
      const int packs = count - done < kTilePacks ? count - done : kTilePacks, tail = packs % kGroup;
      if constexpr (kMasks) {
        if (!shifted) {
          feed.look(taken, packs);
          choose_shift(taken, packs);
        }
        if (masked) {
          unsigned kinds[kChannels]{};
#pragma unroll 1
          for (int left = packs; left > 0; left -= kGroup) {
            feed.take(taken, left);
#pragma unroll
            for (int i = 0; i < kGroup; i += 4) update_masked(taken + i, left - i, kinds, again, histogram);
            feed.go_on();
          }
          close_masked(packs, kinds, nonfinite, channel);
          again = false;
          done += packs;
          continue;
        }
      }
#pragma unroll 1
      for (int groups = packs / kGroup; groups > 0; --groups) {
        feed.take(taken, kGroup);
        update<4, true>(taken, histogram);
#pragma unroll
        for (int i = 4; i < kGroup; i += 4) update<4, false>(taken + i, histogram);
        feed.go_on();
      }
      if (tail > 0) {  // the last
        feed.take(taken, tail);
        update<1, true>(taken, histogram);
#pragma unroll
        for (int i = 1; i < kGroup - 1; ++i) {
          if (i < tail) update<1, false>(taken + i, histogram);
        }
      }
      bool all_hold = true;
      const acc_t inverse_count = acc_t(1) / acc_t(packs * kPlaces);
      for (int c = 0; c < kChannels; ++c) all_hold &= holds(c, tile_min(c), tile_max(c), inverse_count);
      if (all_hold) {
        close_tile(packs, inverse_count);
        done += packs;
      } else if constexpr (kMasks) {
        correct_shift(inverse_count);
        masked = again = true;
        feed.stop();
        feed.start(tile(), count - done);
      } else {
        read_exactly((1u << (Walker::kAligned ? kChannels : valid)) - 1, packs, nonfinite, channel);
        done += packs;
      }
    }
  }
};

}  // namespace hookstats::cuda
