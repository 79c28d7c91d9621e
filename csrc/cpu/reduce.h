// From the sums of a tile's lanes to statistics, and the slow way where the sums do not hold. Included by
// accumulate.cpp alone, as tile.h.
#pragma once

#include <cmath>
#include <limits>

#include "histogram.h"
#include "tile.h"

namespace hookstats::cpu {

HOOKSTATS_INLINE Sample sample_of(const Sample& sample) { return sample; }
HOOKSTATS_INLINE Sample sample_of(const WideSums& sums) { return {sums.finish(), 0, 0, 0}; }

// kLanes of T, Samples or WideSums, member by member so that lanes are vectors: sums that are finished together are
// divided in the time of one. What a loop over lanes does to one of them is a function: g++ makes memory of a struct
// that is a variable of the loop itself.
template <class T>
struct Lanes {
  alignas(64) double member[sizeof(T) / sizeof(double)][kLanes];

  // All members, or as many as part_t has.
  template <class part_t = T>
  HOOKSTATS_INLINE part_t get(int lane) const {
    return load_slot<part_t>(member, kLanes, lane);
  }
  HOOKSTATS_INLINE void set(int lane, const T& one) { store_slot(one, member, kLanes, lane); }
  HOOKSTATS_INLINE void merge_into_state(double* moments, int64_t row_stride, int width) const {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) merge_into_column(lane, moments, row_stride);
  }

 private:
  HOOKSTATS_INLINE void merge_into_column(int lane, double* moments, int64_t row_stride) const {
    hookstats::merge_into_state(sample_of(get(lane)), moments + lane, row_stride);
  }
};

struct LaneSamples : Lanes<Sample> {
  template <class part_t>
  HOOKSTATS_INLINE void merge(int lane, const part_t& part) {
    part_t sum = get<part_t>(lane);
    sum.merge(part);
    store_slot(sum, member, kLanes, lane);
  }
  HOOKSTATS_INLINE void clear() {
    for (int lane = 0; lane < kLanes; ++lane) set(lane, Sample::neutral());
  }

  HOOKSTATS_INLINE void merge(const LaneSamples& other) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) merge_lane(lane, other, lane);
  }
  // The first of each `width` lanes, which are a power of two, takes the others: halves are merged with halves.
  HOOKSTATS_INLINE void fold(int width) {
    for (int half = width / 2; half > 0; half /= 2) {
      for (int first = 0; first < kLanes; first += width) {
#pragma omp simd
        for (int lane = 0; lane < half; ++lane) merge_lane(first + lane, *this, first + lane + half);
      }
    }
  }
  HOOKSTATS_INLINE void merge_state(const double* moments, int64_t row_stride, int width) {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) merge_column(lane, moments, row_stride);
  }

 private:
  HOOKSTATS_INLINE void merge_lane(int lane, const LaneSamples& other, int from) { merge(lane, other.get(from)); }
  HOOKSTATS_INLINE void merge_column(int lane, const double* moments, int64_t row_stride) {
    merge(lane, load_state<Sample>(moments + lane, row_stride));
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

// The number of lanes that are set.
template <int kSize, class ints>
HOOKSTATS_INLINE int set_lanes(const ints& lanes) {
  int set = 0;
  for (int lane = 0; lane < kSize; ++lane) set += lanes[lane] != 0;
  return set;
}

// Exact sums of some lanes, in memory. An element of a vector in a register is not asked for: g++ would store the
// vector in each round of the loop.
template <int kSize>
struct ExactLanes {
#define HOOKSTATS_LANES(name) alignas(64) double name[kSize];
  HOOKSTATS_LANES(sum)
  HOOKSTATS_LANES(square_sum)
  HOOKSTATS_LANES(abs_sum)
  HOOKSTATS_LANES(pivot)
  HOOKSTATS_LANES(min)
  HOOKSTATS_LANES(max)
  HOOKSTATS_LANES(count)
  HOOKSTATS_LANES(posinfs)
  HOOKSTATS_LANES(neginfs)
#undef HOOKSTATS_LANES

  HOOKSTATS_INLINE Sample finish(int lane, int rows, double zeros) const {
    const WideSums finite{sum[lane], square_sum[lane], abs_sum[lane], pivot[lane],
                          min[lane], max[lane],        count[lane],   zeros};
    const double nans = rows - count[lane] - posinfs[lane] - neginfs[lane];
    return {finite.finish(), nans, posinfs[lane], neginfs[lane]};
  }
};

// Exact statistics of the lanes whose bit is set, neutral ones of the others: ExactSums::add for two registers of lanes
// at a time (of float32 in AVX-512, a line of the cache), whose sums stay in registers. The plain sums have counted
// zeros rightly in any case, and know the extremes where no value is infinite. g++ 12 takes vectors apart where two
// comparisons meet in one condition.
template <int kBytes, class scalar_t, class acc_t>
HOOKSTATS_INLINE void exact_lanes(const Tile<scalar_t>& tile, const LaneSums<acc_t>& sums, uint64_t wanted,
                                  LaneSamples& samples) {
  using V = Vector<kBytes, double>;
  using wide = typename V::type;
  constexpr int kVectors = 2, kSize = kVectors * V::kSize;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr int64_t kMagnitude = INT64_MAX, kInfinityBits = int64_t(2047) << 52;
  samples.clear();
  for (int first = 0; first < tile.width; first += kSize) {
    const int width = std::min(kSize, tile.width - first);
    alignas(64) scalar_t padded[kSize] = {};
    const auto row = [&](int r) {
      const scalar_t* at = tile.row(r) + first;
      if (width == kSize) return at;
      std::memcpy(static_cast<void*>(padded), at, width * sizeof(scalar_t));
      return static_cast<const scalar_t*>(padded);
    };
    // The first value that counts is the pivot, nearly always that of the first row or the second.
    typename V::ints pivot_bits[kVectors]{}, found[kVectors]{};
    const auto lanes_found = [&] { return set_lanes<V::kSize>(found[0]) + set_lanes<V::kSize>(found[1]); };
    for (int r = 0; r < tile.rows && ((r & (r - 1)) != 0 || lanes_found() < kSize); ++r) {
      const scalar_t* values = row(r);
      for (int v = 0; v < kVectors; ++v) {
        const auto x = bit_copy<typename V::ints>(load_wide<V>(values + v * V::kSize));
        const typename V::ints counts = (x & kMagnitude) < kInfinityBits;
        pivot_bits[v] |= x & counts & ~found[v];
        found[v] |= counts;
      }
    }
    wide pivot[kVectors];
    memcpy(pivot, pivot_bits, sizeof pivot);

    wide sum[kVectors]{}, square_sum[kVectors]{}, abs_sum[kVectors]{}, count[kVectors]{};
    const int rows = lanes_found() > 0 ? tile.rows : 0;  // often all of a tile is NaN
    for (int r = 0; r < rows; ++r) {
      const scalar_t* values = row(r);
      for (int v = 0; v < kVectors; ++v) {
        const wide x = load_wide<V>(values + v * V::kSize);
        const wide magnitude = bit_copy<wide>(bit_copy<typename V::ints>(x) & kMagnitude);
        const auto counts = magnitude < kInfinity;
        const wide deviation = counts ? x - pivot[v] : wide{};
        sum[v] += deviation;
        square_sum[v] += deviation * deviation;
        abs_sum[v] = counts ? abs_sum[v] + magnitude : abs_sum[v];
        count[v] = counts ? count[v] + 1 : count[v];
      }
    }
    ExactLanes<kSize> exact{};
    memcpy(exact.sum, sum, sizeof sum);
    memcpy(exact.square_sum, square_sum, sizeof square_sum);
    memcpy(exact.abs_sum, abs_sum, sizeof abs_sum);
    memcpy(exact.pivot, pivot, sizeof pivot);
    memcpy(exact.count, count, sizeof count);

    bool infinite = false;
    for (int lane = 0; lane < width; ++lane) {
      exact.min[lane] = sums.min[first + lane];
      exact.max[lane] = sums.max[first + lane];
      infinite |= (exact.min[lane] == -kInfinity) | (exact.max[lane] == kInfinity);
    }
    if (infinite) {
      wide min[kVectors], max[kVectors], posinfs[kVectors]{}, neginfs[kVectors]{};
      for (int v = 0; v < kVectors; ++v) min[v] = wide{} + kInfinity, max[v] = -min[v];
      for (int r = 0; r < tile.rows; ++r) {
        const scalar_t* values = row(r);
        for (int v = 0; v < kVectors; ++v) {
          const wide x = load_wide<V>(values + v * V::kSize);
          const auto is_posinf = x == kInfinity, is_neginf = x == -kInfinity;
          const wide upper = is_neginf ? wide{} + kInfinity : x, lower = is_posinf ? wide{} - kInfinity : x;
          min[v] = upper < min[v] ? upper : min[v];
          max[v] = lower > max[v] ? lower : max[v];
          posinfs[v] = is_posinf ? posinfs[v] + 1 : posinfs[v];
          neginfs[v] = is_neginf ? neginfs[v] + 1 : neginfs[v];
        }
      }
      memcpy(exact.min, min, sizeof min);
      memcpy(exact.max, max, sizeof max);
      memcpy(exact.posinfs, posinfs, sizeof posinfs);
      memcpy(exact.neginfs, neginfs, sizeof neginfs);
    }
    for (int lane = 0; lane < width; ++lane) {
      if (wanted >> (first + lane) & 1) {
        samples.set(first + lane, exact.finish(lane, tile.rows, sums.zeros[first + lane]));
      }
    }
  }
}

template <class scalar_t>
HOOKSTATS_INLINE uint64_t lanes_in_use(const Tile<scalar_t>& tile) {
  return ~uint64_t(0) >> (kLanes - tile.width);
}

// Adds a tile to its lanes' sums, and to the histogram, a chunk of rows at a time.
template <int kBytes, class scalar_t, class acc_t>
HOOKSTATS_INLINE void add_chunks(const Tile<scalar_t>& tile, LaneSums<acc_t>& sums, Counting& counting) {
  PaddedRows<scalar_t> padded;
  for (int r = 0; r < tile.rows; r += kCarryValues) {
    const int rows = std::min(kCarryValues, tile.rows - r);
    Tile<scalar_t> chunk{tile.data, tile.at + r, rows, tile.width, tile.known - r};
    if (tile.width % 16) chunk = padded.of(chunk);
    add_chunk<kBytes>(chunk, sums);
    if (counting.counts) add_keys<kBytes>(chunk, counting);
  }
}

// Lanes are channels.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE void add_tile_in(const Tile<scalar_t>& tile, LaneSamples& samples, Counting& counting) {
  LaneSums<acc_of<scalar_t>> sums;
  sums.start(tile, false);
  add_chunks<kBytes>(tile, sums, counting);
  const uint64_t again = merge_lanes(sums, samples) & lanes_in_use(tile);
  if (again == 0) return;
  if (__builtin_popcountll(again) <= 4) {  // for which a lane at a time is faster
    for (int lane = 0; lane < tile.width; ++lane) {
      if (again >> lane & 1) samples.merge(lane, exact_lane(tile, lane));
    }
    return;
  }
  LaneSamples exact;
  exact_lanes<kBytes>(tile, sums, again, exact);
  samples.merge(exact);
}

// Elements of one channel: whole rows of kLanes, and `left` more, which are fewer.
template <class scalar_t>
struct FlatTile {
  Tile<scalar_t> rows;
  const scalar_t* rest;
  int left;

  Tile<scalar_t> last_row() const {
    static constexpr int64_t kHere = 0;
    return {rest, &kHere, left > 0 ? 1 : 0, left};
  }
};

// All elements of a vector as one: halves are combined with halves.
template <class V, class F>
HOOKSTATS_INLINE auto fold_vector(const V& x, const F& combine) {
  using element = std::remove_cv_t<std::remove_reference_t<decltype(x[0])>>;
  if constexpr (sizeof(V) > 16) {
    typedef element Half __attribute__((vector_size(sizeof(V) / 2)));
    Half half[2];
    memcpy(half, &x, sizeof x);
    return fold_vector(combine(half[0], half[1]), combine);
  } else {
    element all = x[0];
    for (int i = 1; i < int(sizeof(V) / sizeof(element)); ++i) all = combine(all, element(x[i]));
    return all;
  }
}

// Sums of the elements of a FlatTile, in registers: short channels have few rows, for which LaneSums' memory would take
// longer than the elements.
template <class V>
struct FlatSums {
  using vector = typename V::type;
  using acc_t = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<vector&>()[0])>>;
  static constexpr int kVectors = sizeof(vector) == 64 ? 4 : 2;
  // Rows between two carries, which combine kVectors sums: kCarryValues roundings in all.
  static constexpr int kRows = kCarryValues - kVectors / 2;

  vector pivot, min[kVectors], max[kVectors];
  typename V::ints zeros[kVectors]{};
  typename V::wide sum{}, square_sum{}, abs_sum{};
  int no_zeros = 0;  // that were counted

  HOOKSTATS_INLINE explicit FlatSums(acc_t first) : pivot(vector{} + first) {
    for (int v = 0; v < kVectors; ++v) min[v] = max[v] = pivot;
  }

  // kMany vectors of at most kRows rows.
  template <int kMany, class scalar_t>
  HOOKSTATS_INLINE void add_rows(const Tile<scalar_t>& tile, int lane) {
    vector part[kMany]{}, squares[kMany]{}, magnitudes[kMany]{};
    for (int r = 0; r < tile.rows; ++r) {
      const scalar_t* row = tile.row(r) + lane;
      prefetch<kMany * V::kSize>(tile, r, lane);
      for (int v = 0; v < kMany; ++v) {
        const auto x = load<V>(row + v * V::kSize);
        add_vector<V>(x, pivot, part[v], squares[v], magnitudes[v], min[v], max[v], zeros[v]);
      }
    }
    for (int v = 1; v < kMany; v *= 2) {
      for (int to = 0; to + v < kMany; to += 2 * v) {
        part[to] += part[to + v];
        squares[to] += squares[to + v];
        magnitudes[to] += magnitudes[to + v];
      }
    }
    carry_all(part[0], squares[0], magnitudes[0]);
  }

  // Fewer elements than a vector has: the others are the pivot where it is subtracted, and else 0.
  template <class scalar_t>
  HOOKSTATS_INLINE void add_few(const scalar_t* at, int count) {
    alignas(64) acc_t padded[2][V::kSize]{};
    for (int i = 0; i < V::kSize; ++i) padded[0][i] = i < count ? acc_t(widen(at[i])) : acc_t(pivot[0]);
    std::memcpy(padded[1], padded[0], count * sizeof(acc_t));
    const auto x = load<V>(padded[0]), plain = load<V>(padded[1]);
    const auto deviation = x - pivot;
    min[0] = x < min[0] ? x : min[0];
    max[0] = x > max[0] ? x : max[0];
    zeros[0] -= plain == 0;
    no_zeros += V::kSize - count;
    carry_all(deviation, deviation * deviation, magnitude_of<V>(plain));
  }

  HOOKSTATS_INLINE WideSums fold(int64_t count) const {
    const auto add = [](const auto& a, const auto& b) { return a + b; };
    const auto lower = [](const auto& a, const auto& b) { return b < a ? b : a; };
    const auto higher = [](const auto& a, const auto& b) { return b > a ? b : a; };
    vector low = min[0], high = max[0];
    auto none = zeros[0];
    for (int v = 1; v < kVectors; ++v) {
      low = lower(low, min[v]);
      high = higher(high, max[v]);
      none += zeros[v];
    }
    return {fold_vector(sum, add),
            fold_vector(square_sum, add),
            fold_vector(abs_sum, add),
            double(pivot[0]),
            double(fold_vector(low, lower)),
            double(fold_vector(high, higher)),
            double(count),
            double(fold_vector(none, add) - no_zeros)};
  }

 private:
  HOOKSTATS_INLINE static typename V::wide widened(const vector& part) {
    constexpr int kPieces = sizeof(double) / sizeof(acc_t);
    typedef acc_t Piece __attribute__((vector_size(sizeof(part) / kPieces)));
    Piece piece[kPieces];
    memcpy(piece, &part, sizeof part);
    auto all = __builtin_convertvector(piece[0], typename V::wide);
    if constexpr (kPieces == 2) all += __builtin_convertvector(piece[1], typename V::wide);
    return all;
  }
  HOOKSTATS_INLINE void carry_all(const vector& part, const vector& squares, const vector& magnitudes) {
    sum += widened(part);
    square_sum += widened(squares);
    abs_sum += widened(magnitudes);
  }
};

template <int kBytes, class scalar_t>
HOOKSTATS_INLINE Sample exact_flat(const Tile<scalar_t>& tile) {
  LaneSums<acc_of<scalar_t>> sums;
  Counting none{};
  sums.start(tile, true);
  add_chunks<kBytes>(tile, sums, none);
  LaneSamples exact;
  exact_lanes<kBytes>(tile, sums, lanes_in_use(tile), exact);
  exact.fold(kLanes);
  return exact.get(0);
}

// Lanes are elements of one channel. Returns whether the sums hold; where they do not, `exact` is the tile's.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE bool flat_tile_in(const FlatTile<scalar_t>& tile, Counting& counting, WideSums& total, Sample& exact) {
  using acc_t = acc_of<scalar_t>;
  using V = Vector<kBytes, acc_t>;
  constexpr int kMany = FlatSums<V>::kVectors, kRows = FlatSums<V>::kRows;
  const Tile<scalar_t>&rows = tile.rows, last = tile.last_row();
  FlatSums<V> sums(widen(rows.rows ? *rows.row(0) : *tile.rest));
  for (int r = 0; r < rows.rows; r += kRows) {
    const Tile<scalar_t> chunk{rows.data, rows.at + r, std::min(kRows, rows.rows - r), kLanes, rows.known - r};
    for (int lane = 0; lane < kLanes; lane += kMany * V::kSize) sums.template add_rows<kMany>(chunk, lane);
    if (counting.counts) add_keys<kBytes>(chunk, counting);
  }
  if (tile.left) {
    int lane = 0;
    for (; lane + V::kSize <= tile.left; lane += V::kSize) sums.template add_rows<1>(last, lane);
    if (lane < tile.left) sums.add_few(tile.rest + lane, tile.left - lane);
    if (counting.counts) {
      PaddedRows<scalar_t> padded;
      add_keys<kBytes>(padded.of(last), counting);
    }
  }
  total = sums.fold(int64_t(rows.rows) * kLanes + tile.left);
  if (sums_hold<acc_t>(total)) return true;
  exact = rows.rows ? exact_flat<kBytes>(rows) : Sample::neutral();
  if (tile.left) exact.merge(exact_flat<kBytes>(last));
  return false;
}

}  // namespace hookstats::cpu
