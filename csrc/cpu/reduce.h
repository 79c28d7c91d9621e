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

// The same in all lanes in use.
template <class scalar_t>
HOOKSTATS_INLINE void exact_lanes(const Tile<scalar_t>& tile, Lanes<ExactSums>& exact) {
  exact.clear();
  for (int r = 0; r < tile.rows; ++r) {
    const scalar_t* row = tile.row(r);
#pragma omp simd
    for (int lane = 0; lane < tile.width; ++lane) exact.add(lane, widen(row[lane]));
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
  if (!few) exact_lanes(tile, exact);
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
  exact_lanes(tile, exact);
  Sample sample = exact.get(0).finish();
  for (int lane = 1; lane < tile.width; ++lane) sample.merge(exact.get(lane).finish());
  return sample;
}

}  // namespace hookstats::cpu
