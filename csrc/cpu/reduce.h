// From the sums of a tile's lanes to statistics, and the slow way where the sums do not hold. Included by
// accumulate.cpp alone, as tile.h.
#pragma once

#include <cmath>
#include <limits>

#include "histogram.h"
#include "tile.h"

namespace hookstats::cpu {

// Statistics of kLanes lanes, member by member so that lanes are vectors. What a loop over lanes does to one of them is
// a function: g++ makes memory of a struct that is a variable of the loop itself.
template <class T>
struct Lanes {
  alignas(64) double member[sizeof(T) / sizeof(double)][kLanes];

  // All members, or as many as part_t has.
  template <class part_t = T>
  HOOKSTATS_INLINE part_t get(int lane) const {
    return load_slot<part_t>(member, kLanes, lane);
  }
  template <class part_t>
  HOOKSTATS_INLINE void set(int lane, const part_t& part) {
    store_slot(part, member, kLanes, lane);
  }
  template <class part_t>
  HOOKSTATS_INLINE void merge(int lane, const part_t& part) {
    part_t sum = get<part_t>(lane);
    sum.merge(part);
    set(lane, sum);
  }
  HOOKSTATS_INLINE void add(int lane, double x) {
    T sum = get(lane);
    sum.add(x);
    set(lane, sum);
  }
  HOOKSTATS_INLINE void clear() {
    for (int lane = 0; lane < kLanes; ++lane) set(lane, T::neutral());
  }
};

struct LaneSamples : Lanes<Sample> {
  using Lanes::merge;
  HOOKSTATS_INLINE void merge(const LaneSamples& other) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) merge_lane(lane, other);
  }
  HOOKSTATS_INLINE void merge_state(const double* moments, int64_t row_stride, int width) {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) merge_column(lane, moments, row_stride);
  }
  HOOKSTATS_INLINE void merge_into_state(double* moments, int64_t row_stride, int width) const {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) merge_into_column(lane, moments, row_stride);
  }

 private:
  HOOKSTATS_INLINE void merge_lane(int lane, const LaneSamples& other) { merge(lane, other.get(lane)); }
  HOOKSTATS_INLINE void merge_column(int lane, const double* moments, int64_t row_stride) {
    merge(lane, load_state<Sample>(moments + lane, row_stride));
  }
  HOOKSTATS_INLINE void merge_into_column(int lane, double* moments, int64_t row_stride) const {
    hookstats::merge_into_state(get(lane), moments + lane, row_stride);
  }
};

// False where the tile's sums do not hold, which then are left out.
template <class acc_t>
HOOKSTATS_INLINE bool merge_lane(const WideSums& tile, int lane, LaneSamples& samples) {
  const bool holds = sums_hold<acc_t>(tile);
  samples.merge(lane, tile.finish().where(holds));
  return holds;
}

// Returns the lanes that do not hold as a bit mask.
template <class acc_t>
HOOKSTATS_INLINE uint64_t merge_lanes(const LaneSums<acc_t>& sums, LaneSamples& samples) {
  alignas(64) double holds[kLanes];
#pragma omp simd
  for (int lane = 0; lane < kLanes; ++lane) {
    holds[lane] = merge_lane<acc_t>(sums.get(lane).widened(), lane, samples) ? 1 : 0;
  }
  uint64_t again = 0;
  for (int lane = 0; lane < kLanes; ++lane) again |= uint64_t(holds[lane] == 0) << lane;
  return again;
}

template <class scalar_t>
HOOKSTATS_INLINE Sample exact_lane(const Tile<scalar_t>& tile, int lane) {
  ExactSums exact = ExactSums::neutral();
  for (int r = 0; r < tile.rows; ++r) exact.add(widen(tile.row(r)[lane]));
  return exact.finish();
}

template <int kSize, class ints>
HOOKSTATS_INLINE bool all_set(const ints& lanes) {
  bool all = true;
  for (int lane = 0; lane < kSize; ++lane) all &= lanes[lane] != 0;
  return all;
}

// The same in all lanes in use: ExactSums::add for a register of lanes at a time, whose sums stay in registers. Values
// that do not count are taken for the pivot: g++ 12 takes vectors apart where two comparisons meet in one condition.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE void exact_lanes(const Tile<scalar_t>& tile, Lanes<ExactSums>& exact) {
  using V = Vector<kBytes, double>;
  using wide = typename V::type;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr int64_t kMagnitude = INT64_MAX, kInfinityBits = int64_t(2047) << 52;
  for (int first = 0; first < tile.width; first += V::kSize) {
    const int width = std::min(V::kSize, tile.width - first);
    const auto row = [&](int r) {
      if (width == V::kSize) return load_wide<V>(tile.row(r) + first);
      scalar_t padded[V::kSize] = {};
      std::memcpy(static_cast<void*>(padded), tile.row(r) + first, width * sizeof(scalar_t));
      return load_wide<V>(padded);
    };
    // The first value that counts is the pivot. Nearly always it is that of the first row; to look for it in the others
    // only until all lanes have one would take longer.
    typename V::ints pivot_bits{}, found{};
    for (int r = 0; r < tile.rows; ++r) {
      if (r == 1 && all_set<V::kSize>(found)) break;
      const auto x = bit_copy<typename V::ints>(row(r));
      const typename V::ints counts = (x & kMagnitude) < kInfinityBits;
      pivot_bits |= x & counts & ~found;
      found |= counts;
    }
    const auto pivot = bit_copy<wide>(pivot_bits);

    wide sum{}, square_sum{}, abs_sum{}, count{}, zeros{}, posinfs{}, neginfs{}, min = pivot, max = pivot;
    for (int r = 0; r < tile.rows; ++r) {
      const wide x = row(r), magnitude = bit_copy<wide>(bit_copy<typename V::ints>(x) & kMagnitude);
      const auto counts = magnitude < kInfinity;
      const wide counted = counts ? x : pivot, deviation = counted - pivot;
      sum += deviation;
      square_sum += deviation * deviation;
      min = counted < min ? counted : min;
      max = counted > max ? counted : max;
      abs_sum = counts ? abs_sum + magnitude : abs_sum;
      count = counts ? count + 1 : count;
      zeros = x == 0 ? zeros + 1 : zeros;
      posinfs = x == kInfinity ? posinfs + 1 : posinfs;
      neginfs = x == -kInfinity ? neginfs + 1 : neginfs;
    }
    for (int lane = 0; lane < width; ++lane) {
      ExactSums one = ExactSums::neutral();
      if (count[lane] > 0) {
        one.sum = sum[lane];
        one.square_sum = square_sum[lane];
        one.abs_sum = abs_sum[lane];
        one.pivot = pivot[lane];
        one.min = min[lane];
        one.max = max[lane];
        one.count = count[lane];
        one.zeros = zeros[lane];
      }
      one.nans = tile.rows - count[lane] - posinfs[lane] - neginfs[lane];
      one.posinfs = posinfs[lane];
      one.neginfs = neginfs[lane];
      exact.set(first + lane, one);
    }
  }
}

// Adds a tile to its lanes' sums, and to the histogram, a chunk of rows at a time.
template <int kBytes, class scalar_t, class acc_t>
HOOKSTATS_INLINE void add_chunks(const Tile<scalar_t>& tile, LaneSums<acc_t>& sums, const Counting& counting) {
  PaddedRows<scalar_t> padded;
  Keys keys;
  for (int r = 0; r < tile.rows; r += kCarryValues) {
    const int rows = std::min(kCarryValues, tile.rows - r);
    Tile<scalar_t> chunk{tile.data, tile.at + r, rows, tile.width, tile.known - r};
    if (tile.width % 16) chunk = padded.of(chunk);
    add_chunk<kBytes>(chunk, sums);
    if (counting.counts) add_keys<kBytes>(chunk, counting.kind, r, keys);
  }
  if (counting.counts) count_keys<kBytes>(keys, tile.rows, *counting.counts);
}

// Lanes are channels.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE void add_tile_in(const Tile<scalar_t>& tile, LaneSamples& samples, const Counting& counting) {
  LaneSums<acc_of<scalar_t>> sums;
  sums.start(tile, false);
  add_chunks<kBytes>(tile, sums, counting);
  const uint64_t in_use = ~uint64_t(0) >> (kLanes - tile.width);
  const uint64_t again = merge_lanes(sums, samples) & in_use;
  if (again == 0) return;
  Lanes<ExactSums> exact;
  const bool few = __builtin_popcountll(again) <= 4;  // for which a lane at a time is faster
  if (!few) exact_lanes<kBytes>(tile, exact);
  for (int lane = 0; lane < tile.width; ++lane) {
    if (again >> lane & 1) samples.merge(lane, few ? exact_lane(tile, lane) : exact.get(lane).finish());
  }
}

// Lanes are elements of one channel.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE Sample flat_tile_in(const Tile<scalar_t>& tile, const Counting& counting) {
  using acc_t = acc_of<scalar_t>;
  LaneSums<acc_t> sums;
  sums.start(tile, true);
  add_chunks<kBytes>(tile, sums, counting);
  const WideSums total = sums.fold(tile.width).widened();
  if (sums_hold<acc_t>(total)) return {total.finish(), 0, 0, 0};
  Lanes<ExactSums> exact;
  exact_lanes<kBytes>(tile, exact);
  Sample sample = exact.get(0).finish();
  for (int lane = 1; lane < tile.width; ++lane) sample.merge(exact.get(lane).finish());
  return sample;
}

}  // namespace hookstats::cpu
