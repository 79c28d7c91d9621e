// From the sums of a tile's lanes to statistics, and the slow way where the sums do not hold. Included by
// accumulate.cpp alone, as tile.h.
#pragma once

#include <cmath>
#include <limits>

#include "histogram.h"
#include "tile.h"

namespace hookstats::cpu {

// Samples of kLanes lanes, field by field so that lanes are vectors.
struct LaneSamples {
  double field[kFields][kLanes];

  void clear() {
    const Sample neutral = Sample::neutral();
    for (int lane = 0; lane < kLanes; ++lane) neutral.store(&field[0][lane], kLanes);
  }
  HOOKSTATS_INLINE Sample get(int lane) const { return Sample::load(&field[0][lane], kLanes); }
  HOOKSTATS_INLINE void merge(int lane, const Sample& sample) {
    Sample sum = get(lane);
    sum.merge(sample);
    sum.store(&field[0][lane], kLanes);
  }
  HOOKSTATS_INLINE void merge(const LaneSamples& other) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) merge(lane, other.get(lane));
  }
  HOOKSTATS_INLINE void merge_state(const double* moments, int64_t row_stride, int width) {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) merge(lane, Sample::load_state(moments + lane, row_stride));
  }
  HOOKSTATS_INLINE void merge_into_state(double* moments, int64_t row_stride, int width) const {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) get(lane).merge_into_state(moments + lane, row_stride);
  }
};

// FastTile::finish and Sample::merge in kLanes lanes. Lanes that do not hold are left out, and returned as a bit mask.
template <class acc_t>
HOOKSTATS_INLINE uint64_t merge_lanes(const LaneSums<acc_t>& sums, int rows, LaneSamples& samples) {
  alignas(64) double holds[kLanes];
  auto& field = samples.field;
#pragma omp simd
  for (int lane = 0; lane < kLanes; ++lane) {
    const bool good = sums_hold<acc_t>(rows, sums.sum[lane], sums.square_sum[lane], sums.abs_sum[lane], sums.min[lane],
                                       sums.max[lane]);
    holds[lane] = good ? 1 : 0;
    double mean, m2;
    finish_moments(rows, sums.shift[lane], sums.sum[lane], sums.square_sum[lane], mean, m2);
    merge_moments(field[k_count][lane], field[k_mean][lane], field[k_m2][lane], good ? rows : 0.0, good ? mean : 0.0,
                  good ? m2 : 0.0);
    const double low = good ? sums.min[lane] : field[k_min][lane], high = good ? sums.max[lane] : field[k_max][lane];
    field[k_min][lane] = low < field[k_min][lane] ? low : field[k_min][lane];
    field[k_max][lane] = high > field[k_max][lane] ? high : field[k_max][lane];
    field[k_abs_sum][lane] += good ? sums.abs_sum[lane] : 0;
    field[k_zeros][lane] += good ? double(sums.zeros[lane]) : 0;
  }
  uint64_t again = 0;
  for (int lane = 0; lane < kLanes; ++lane) again |= uint64_t(holds[lane] == 0) << lane;
  return again;
}

template <class scalar_t>
HOOKSTATS_INLINE Sample exact_lane(const Tile<scalar_t>& tile, int lane) {
  ExactTile exact;
  for (int r = 0; r < tile.rows; ++r) exact.update(widen(tile.row(r)[lane]));
  return exact.finish();
}

// ExactTile in all lanes in use.
template <class scalar_t>
HOOKSTATS_INLINE void exact_lanes(const Tile<scalar_t>& tile, LaneSamples& samples) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  alignas(64) double shift[kLanes] = {}, sum[kLanes] = {}, square_sum[kLanes] = {};
  auto& field = samples.field;
  samples.clear();
  for (int r = 0; r < tile.rows; ++r) {
    const scalar_t* row = tile.row(r);
#pragma omp simd
    for (int lane = 0; lane < tile.width; ++lane) {
      const double x = widen(row[lane]), magnitude = std::fabs(x);
      const bool finite = magnitude < kInfinity;
      shift[lane] = ((field[k_count][lane] == 0) & finite) ? x : shift[lane];
      const double deviation = finite ? x - shift[lane] : 0;
      sum[lane] += deviation;
      square_sum[lane] += deviation * deviation;
      field[k_count][lane] += finite ? 1 : 0;
      field[k_abs_sum][lane] += finite ? magnitude : 0;
      field[k_min][lane] = (finite & (x < field[k_min][lane])) ? x : field[k_min][lane];
      field[k_max][lane] = (finite & (x > field[k_max][lane])) ? x : field[k_max][lane];
      field[k_zeros][lane] += x == 0 ? 1 : 0;
      field[k_nans][lane] += x != x ? 1 : 0;
      field[k_posinfs][lane] += x == kInfinity ? 1 : 0;
      field[k_neginfs][lane] += x == -kInfinity ? 1 : 0;
    }
  }
  for (int lane = 0; lane < tile.width; ++lane) {
    const double count = field[k_count][lane];
    if (count == 0) continue;
    finish_moments(count, shift[lane], sum[lane], square_sum[lane], field[k_mean][lane], field[k_m2][lane]);
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
  sums.start(tile.row(0), tile.width, false);
  add_chunks<kBytes>(tile, sums, counting);
  const uint64_t in_use = ~uint64_t(0) >> (kLanes - tile.width);
  const uint64_t again = merge_lanes(sums, tile.rows, samples) & in_use;
  if (again == 0) return;
  LaneSamples exact;
  const bool few = __builtin_popcountll(again) <= 4;  // for which a lane at a time is faster
  if (!few) exact_lanes(tile, exact);
  for (int lane = 0; lane < tile.width; ++lane) {
    if (again >> lane & 1) samples.merge(lane, few ? exact_lane(tile, lane) : exact.get(lane));
  }
}

// Lanes are elements of one channel.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE Sample flat_tile_in(const Tile<scalar_t>& tile, const Counting& counting) {
  using acc_t = acc_of<scalar_t>;
  LaneSums<acc_t> sums;
  sums.start(tile.row(0), tile.width, true);
  add_chunks<kBytes>(tile, sums, counting);
  const FastTile<double> total = sums.fold(tile.rows, tile.width);
  if (sums_hold<acc_t>(total.count, total.sum, total.square_sum, total.abs_sum, total.min, total.max)) {
    return total.finish();
  }
  LaneSamples exact;
  exact_lanes(tile, exact);
  Sample sample = exact.get(0);
  for (int lane = 1; lane < tile.width; ++lane) sample.merge(exact.get(lane));
  return sample;
}

}  // namespace hookstats::cpu
