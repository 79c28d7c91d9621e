// How a thread sums its share of a tensor: tiles of plain sums (tile_sums.h). A tile for which those do not hold, as
// one with NaN, is read again in an exact way, which is slower.
#pragma once

#include "tile_sums.h"

namespace hookstats::cuda {

// A thread's sums over all its tiles: in shared memory, a slot for each place, where they cost no registers while
// values are read.
template <class acc_t, int kPlaces>
struct ThreadSums {
  using Whole = BlockSums<acc_t>;
  static constexpr int kSlots = kThreads * kPlaces;
  double* const shared;
  const int thread;

  __device__ ThreadSums(double* shared, int thread) : shared(shared), thread(thread) {
    for (int place = 0; place < kPlaces; ++place) store(place, Whole::neutral());
  }
  __device__ Whole load(int place) const { return load_slot<Whole>(shared, kSlots, thread + place * kThreads); }
  __device__ void store(int place, const Whole& sums) const {
    store_slot(sums, shared, kSlots, thread + place * kThreads);
  }
  __device__ void merge(int place, const Whole& sums) const {
    Whole whole = load(place);
    whole.merge(sums);
    store(place, whole);
  }
};

// A thread's way through its share. The places of a pack are `kChannels` channels, or all of one. kLooks: as in
// TileSums.
template <class scalar_t, int kPack, int kChannels, template <class> class WalkerOf, bool kExchanges, bool kLooks,
          int kFlight>
struct Reader {
  using Walker = WalkerOf<scalar_t>;
  using Tile = TileSums<scalar_t, kPack, kChannels, kLooks>;
  using Load = typename Tile::Load;
  using acc_t = typename Tile::acc_t;
  using Whole = BlockSums<acc_t>;
  using Feed = std::conditional_t<(kPack > 1), Ring<scalar_t, kPack, Walker, kExchanges, kFlight>,
                                  Burst<scalar_t, kPack, Walker>>;
  static constexpr int kPlaces = Tile::kPlaces;

  const ThreadSums<acc_t, kChannels> sums;
  Tile tile;

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
      : sums(shared, thread),
        data(data),
        layout(layout),
        first(first),
        step(step),
        count(count),
        exchange(kExchanges && exchange ? kChannels / 2 : 0),
        valid(valid),
        feed(ring, thread, Walker(data, layout, first, step), count, exchange, valid * kPlaces) {}

  // On to pack number `until`, whole tiles, or to the last. `channel`: the first of the thread's channels in its block.
  template <class Histogram>
  __device__ void read(int until, const Histogram& histogram, const NonFinite& nonfinite, int channel) {
    constexpr int kGroup = Feed::kGroup;
    if (until > count) until = count;
    Load taken[kGroup];
    while (done < until) {
      tile.clear();
      const int packs = count - done < Tile::kMostPacks ? count - done : Tile::kMostPacks, tail = packs % kGroup;
      if constexpr (kLooks) {
        look(taken, packs);
        tile.choose_shift(taken);
      }
#pragma unroll 1
      for (int groups = packs / kGroup; groups > 0; --groups) {
        feed.take(taken, kGroup);
        tile.template add<4, true>(taken, histogram);
#pragma unroll
        for (int i = 4; i < kGroup; i += 4) tile.template add<4, false>(taken + i, histogram);
        feed.go_on();
      }
      if (tail > 0) {  // the last
        feed.take(taken, tail);
        tile.template add<1, true>(taken, histogram);
#pragma unroll
        for (int i = 1; i < kGroup - 1; ++i) {
          if (i < tail) tile.template add<1, false>(taken + i, histogram);
        }
      }
      bool all_hold = true;
      const acc_t inverse_count = acc_t(1) / acc_t(packs * kPlaces);
      for (int c = 0; c < kChannels; ++c) all_hold &= !exists(c) || tile.holds(c, inverse_count);
      if (all_hold) {
        for (int c = 0; c < kChannels; ++c) {
          sums.merge(c ^ exchange, tile.close(c, unsigned(packs * kPlaces)));
        }
      } else {
        read_exactly(packs, nonfinite, channel);
      }
      done += packs;
    }
  }

  // One value of the first channel alone.
  template <class Histogram>
  __device__ void add(scalar_t value, const Histogram& histogram, const NonFinite& nonfinite, int channel) {
    const acc_t x = widen(value);
    histogram.add(x, 0);
    if (x - x == 0) {
      Whole whole = sums.load(0);
      whole.add(x);
      sums.store(0, whole);
    } else {
      nonfinite.add(channel, x);
    }
  }

 private:
  // Whether the tensor has the channel of a thread's place.
  __device__ bool exists(int c) const { return Walker::kAligned || (c ^ exchange) < valid; }

  // Four of the next packs, spread over them: where values drift from row to row, the first ones lie far from the mean.
  __device__ void look(Load (&taken)[Feed::kGroup], int packs) const {
    Walker walker(data, layout, first + (done + packs / 8) * step, packs / 4 * step);
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      const scalar_t* at = walker.next();
      if constexpr (Walker::kAligned) {
        taken[d] = feed.words.template take<kExchanges>(reinterpret_cast<const char*>(at), feed.exchange);
      } else {
        for (int i = 0; i < kPack; ++i) taken[d].value[i] = at[(i ^ exchange) < valid * kPlaces ? i ^ exchange : 0];
      }
    }
  }

  // The exact way through a tile: in float64, one channel after the other, to leave the registers to the fast way.
  __device__ void read_exactly(int packs, const NonFinite& nonfinite, int channel) {
    const int channels = Walker::kAligned ? kChannels : valid;
#pragma unroll 1
    for (int place = 0; place < channels; ++place) read_channel(place, packs, nonfinite, channel + place);
  }
  __device__ void read_channel(int place, int packs, const NonFinite& nonfinite, int channel) {
    constexpr int kValues = 8, kBatch = kValues / kPlaces;
    Walker walker(data, layout, first + done * step, step);
    Whole whole = sums.load(place);
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
    sums.store(place, whole);
  }
};

}  // namespace hookstats::cuda
