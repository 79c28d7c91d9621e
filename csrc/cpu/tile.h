// One tile on the CPU: `rows` x up to 64 values, reduced in vector lanes. Where channels lie side by side a lane is a
// channel; otherwise the lanes are neighbouring elements of one channel. Included by accumulate.cpp alone, whose
// functions are compiled once per instruction set: everything here is inlined into them.
#pragma once

#include <algorithm>
#include <cstring>

#include "../kernels.h"

#define HOOKSTATS_INLINE inline __attribute__((always_inline))

namespace hookstats::cpu {

constexpr int kLanes = 64;
constexpr int kMostRows = 128;
constexpr int kAhead = 24;  // rows to prefetch: they may lie on pages of their own, where the hardware does not follow
constexpr int kOctaveStride = kOctaveBins + 1;  // counters of one channel; the last takes NaN and Inf, and is dropped

// A tile in memory: row r begins at `data + at[r]`.
template <class scalar_t>
struct Tile {
  const scalar_t* data;
  const int64_t* at;
  int rows;
  int width;  // lanes in use

  const scalar_t* row(int r) const { return data + at[r]; }
};

// 64 bytes of acc_t, in whatever registers the instruction set has.
template <class acc_t>
struct Vector {
  using bits_t = std::conditional_t<sizeof(acc_t) == 4, uint32_t, uint64_t>;
  using int_t = std::make_signed_t<bits_t>;
  static constexpr int kSize = 64 / sizeof(acc_t);
  typedef acc_t type __attribute__((vector_size(64)));
  typedef bits_t bits __attribute__((vector_size(64)));
  typedef int_t ints __attribute__((vector_size(64)));
  typedef double wide __attribute__((vector_size(kSize * sizeof(double))));
};
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

template <class To, class From>
HOOKSTATS_INLINE To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

HOOKSTATS_INLINE void load(const float* at, Vector<float>::type& x) { memcpy(&x, at, sizeof x); }
HOOKSTATS_INLINE void load(const double* at, Vector<double>::type& x) { memcpy(&x, at, sizeof x); }

// The same steps as widen() in kernels.h, in lanes.
HOOKSTATS_INLINE void load(const BFloat16* at, Vector<float>::type& x) {
  Halves halves;
  memcpy(&halves, at, sizeof halves);
  x = bit_copy<Vector<float>::type>(__builtin_convertvector(halves, Vector<float>::bits) << 16);
}
HOOKSTATS_INLINE Vector<float>::type widen_float16(Vector<float>::bits wide) {
  const auto scaled = bit_copy<Vector<float>::type>((wide & 0x7fff) << 13) * 5.192296858534828e33f;
  auto bits = bit_copy<Vector<float>::bits>(scaled) | (wide & 0x8000) << 16;
  bits |= ((wide & 0x7c00) == 0x7c00) & 0x7f800000;
  return bit_copy<Vector<float>::type>(bits);
}
HOOKSTATS_INLINE void load(const Float16* at, Vector<float>::type& x) {
  Halves halves;
  memcpy(&halves, at, sizeof halves);
  x = widen_float16(__builtin_convertvector(halves, Vector<float>::bits));
}
HOOKSTATS_INLINE void load(const Float8e5m2* at, Vector<float>::type& x) {
  Bytes bytes;
  memcpy(&bytes, at, sizeof bytes);
  x = widen_float16(__builtin_convertvector(bytes, Vector<float>::bits) << 8);
}
HOOKSTATS_INLINE void load(const Float8e4m3fn* at, Vector<float>::type& x) {
  Bytes bytes;
  memcpy(&bytes, at, sizeof bytes);
  const auto wide = __builtin_convertvector(bytes, Vector<float>::bits);
  const auto scaled = bit_copy<Vector<float>::type>((wide & 0x7f) << 20) * 1.329227995784916e36f;
  auto bits = bit_copy<Vector<float>::bits>(scaled) | (wide & 0x80) << 24;
  bits |= ((wide & 0x7f) == 0x7f) & 0x7fc00000;
  x = bit_copy<Vector<float>::type>(bits);
}

// FastTile in kLanes lanes.
template <class acc_t>
struct LaneSums {
  alignas(64) acc_t shift[kLanes], min[kLanes], max[kLanes];
  alignas(64) double sum[kLanes], square_sum[kLanes], abs_sum[kLanes];
  alignas(64) typename Vector<acc_t>::int_t zeros[kLanes];
};

template <class V>
HOOKSTATS_INLINE void load_vector(const void* at, V& x) {
  memcpy(&x, at, sizeof x);
}
template <class V>
HOOKSTATS_INLINE void store_vector(void* at, const V& x) {
  memcpy(at, &x, sizeof x);
}

// FastTile::update for kGroups vectors of each of the rows [first, last), then FastTile::carry.
template <int kGroups, class scalar_t, class acc_t>
HOOKSTATS_INLINE void add_rows(const Tile<scalar_t>& tile, int first, int last, int lane, LaneSums<acc_t>& sums) {
  using V = Vector<acc_t>;
  typename V::type shift[kGroups], min[kGroups], max[kGroups], sum[kGroups], square_sum[kGroups], abs_sum[kGroups];
  typename V::ints zeros[kGroups];
  for (int g = 0; g < kGroups; ++g) {
    const int at = lane + g * V::kSize;
    load_vector(&sums.shift[at], shift[g]);
    load_vector(&sums.min[at], min[g]);
    load_vector(&sums.max[at], max[g]);
    load_vector(&sums.zeros[at], zeros[g]);
    sum[g] = square_sum[g] = abs_sum[g] = typename V::type{};
  }
  for (int r = first; r < last; ++r) {
    const scalar_t* row = tile.row(r) + lane;
    if (kGroups > 1 && r + kAhead < tile.rows) {
      const char* ahead = reinterpret_cast<const char*>(tile.row(r + kAhead) + lane);
      for (size_t line = 0; line < kGroups * V::kSize * sizeof(scalar_t); line += 64) __builtin_prefetch(ahead + line);
    }
    for (int g = 0; g < kGroups; ++g) {
      typename V::type x;
      load(row + g * V::kSize, x);
      const auto deviation = x - shift[g];
      sum[g] += deviation;
      square_sum[g] += deviation * deviation;
      abs_sum[g] += bit_copy<typename V::type>(bit_copy<typename V::bits>(x) << 1 >> 1);
      min[g] = x < min[g] ? x : min[g];
      max[g] = x > max[g] ? x : max[g];
      zeros[g] -= x == 0;
    }
  }
  const auto carry = [](const typename V::type& part, double* total) __attribute__((always_inline)) {
    typename V::wide wide;
    load_vector(total, wide);
    store_vector(total, wide + __builtin_convertvector(part, typename V::wide));
  };
  for (int g = 0; g < kGroups; ++g) {
    const int at = lane + g * V::kSize;
    store_vector(&sums.min[at], min[g]);
    store_vector(&sums.max[at], max[g]);
    store_vector(&sums.zeros[at], zeros[g]);
    carry(sum[g], &sums.sum[at]);
    carry(square_sum[g], &sums.square_sum[at]);
    carry(abs_sum[g], &sums.abs_sum[at]);
  }
}

// Sums the tile's lanes, `width` of them rounded up to whole vectors: the caller sees to it that they can be read.
template <class scalar_t, class acc_t>
HOOKSTATS_INLINE void sum_rows(const Tile<scalar_t>& tile, bool one_channel, LaneSums<acc_t>& sums) {
  constexpr int kSize = Vector<acc_t>::kSize;
  const scalar_t* first = tile.row(0);
  for (int lane = 0; lane < kLanes; ++lane) {
    const acc_t x = lane < tile.width ? widen(first[one_channel ? 0 : lane]) : 0;
    sums.shift[lane] = sums.min[lane] = sums.max[lane] = x;
    sums.sum[lane] = sums.square_sum[lane] = sums.abs_sum[lane] = 0;
    sums.zeros[lane] = 0;
  }
  for (int r = 0; r < tile.rows; r += kCarryValues) {
    const int last = std::min(r + kCarryValues, tile.rows);
    int lane = 0;
    for (; lane + 4 * kSize <= tile.width; lane += 4 * kSize) add_rows<4>(tile, r, last, lane, sums);
    for (; lane < tile.width; lane += kSize) add_rows<1>(tile, r, last, lane, sums);
  }
}

// A tile whose width is not whole vectors, copied to where it is, with zeros behind.
template <class scalar_t>
struct PaddedTile {
  alignas(64) scalar_t values[kMostRows * kLanes];
  int64_t at[kMostRows];

  HOOKSTATS_INLINE Tile<scalar_t> of(const Tile<scalar_t>& tile) {
    const int padded = (tile.width + 15) / 16 * 16;
    for (int r = 0; r < tile.rows; ++r) {
      at[r] = r * padded;
      std::memcpy(values + at[r], tile.row(r), tile.width * sizeof(scalar_t));
      std::memset(static_cast<void*>(values + at[r] + tile.width), 0, (padded - tile.width) * sizeof(scalar_t));
    }
    return {values, at, tile.rows, tile.width};
  }
};

// Samples of kLanes lanes, field by field so that lanes are vectors.
struct LaneSamples {
  double field[kFields][kLanes];

  void clear() {
    const Sample neutral = Sample::neutral();
    for (int lane = 0; lane < kLanes; ++lane) neutral.store(&field[0][lane], kLanes);
  }
  Sample get(int lane) const { return Sample::load(&field[0][lane], kLanes); }
  void merge(int lane, const Sample& sample) {
    Sample sum = get(lane);
    sum.merge(sample);
    sum.store(&field[0][lane], kLanes);
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

// Lanes are channels.
template <class scalar_t>
HOOKSTATS_INLINE void add_tile(const Tile<scalar_t>& tile, LaneSamples& samples) {
  LaneSums<acc_of<scalar_t>> sums;
  sum_rows(tile, false, sums);
  const uint64_t again = merge_lanes(sums, tile.rows, samples);
  if (again == 0) return;
  for (int lane = 0; lane < tile.width; ++lane) {
    if (!(again >> lane & 1)) continue;
    ExactTile exact;
    for (int r = 0; r < tile.rows; ++r) exact.update(widen(tile.row(r)[lane]));
    samples.merge(lane, exact.finish());
  }
}

// Lanes are elements of one channel: their sums share the shift and are added.
template <class scalar_t>
HOOKSTATS_INLINE Sample flat_tile(const Tile<scalar_t>& tile) {
  using acc_t = acc_of<scalar_t>;
  LaneSums<acc_t> sums;
  sum_rows(tile, true, sums);
  FastTile<double> total(sums.shift[0]);
  for (int lane = 0; lane < tile.width; ++lane) {
    total.sum += sums.sum[lane];
    total.square_sum += sums.square_sum[lane];
    total.abs_sum += sums.abs_sum[lane];
    total.min = std::min<double>(total.min, sums.min[lane]);
    total.max = std::max<double>(total.max, sums.max[lane]);
    total.zeros += int32_t(sums.zeros[lane]);
  }
  total.count = tile.rows * tile.width;
  if (sums_hold<acc_t>(total.count, total.sum, total.square_sum, total.abs_sum, total.min, total.max)) {
    return total.finish();
  }
  ExactTile exact;
  for (int r = 0; r < tile.rows; ++r) {
    for (int lane = 0; lane < tile.width; ++lane) exact.update(widen(tile.row(r)[lane]));
  }
  return exact.finish();
}

// The counters that a row's values fall into: `index[lane]` = offset[lane] + bin. Without branches: NaN and Inf get
// counters that are dropped later, and the per-tensor bin of negative subnormals is moved to bin 0 (see
// ThreadHistogram::flush).
template <class scalar_t>
HOOKSTATS_INLINE void index_row(const scalar_t* row, int width, bool octaves, const int32_t* offset, int32_t* index) {
  if constexpr (std::is_same_v<acc_of<scalar_t>, double>) {
    for (int lane = 0; lane < width; ++lane) {
      const int bin = exponent_bin(widen(row[lane]));
      const int none = octaves ? kOctaveBins : 255;
      index[lane] = offset[lane] + (bin == kNoBin ? none : octaves ? octave_bin(bin) : bin);
    }
  } else {
    using V = Vector<float>;
    for (int lane = 0; lane < width; lane += V::kSize) {
      V::type x;
      V::ints offsets;
      load(row + lane, x);
      load_vector(offset + lane, offsets);
      auto bins = bit_copy<V::ints>(bit_copy<V::bits>(x) >> 23);
      if (octaves) {
        const auto exponents = bins & 255;
        bins = exponents - (127 + kFirstOctave - 1);
        bins = bins < 0 ? 0 : bins;
        bins = bins > kOctaveBins - 1 ? kOctaveBins - 1 : bins;
        bins = exponents == 255 ? kOctaveBins : bins;
      }
      store_vector(index + lane, bins + offsets);
    }
  }
}

// Counts the values of a tile; lane l counts from `offset[l]` on.
template <class scalar_t>
HOOKSTATS_INLINE void count_tile(const Tile<scalar_t>& tile, bool octaves, const int32_t* offset, uint32_t* counts) {
  alignas(64) int32_t index[kLanes];
  for (int r = 0; r < tile.rows; ++r) {
    index_row(tile.row(r), tile.width, octaves, offset, index);
    for (int lane = 0; lane < tile.width; ++lane) ++counts[index[lane]];
  }
}

}  // namespace hookstats::cpu
