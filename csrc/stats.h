// What a statistic is: its neutral element, its update by one value, its merge with another part.
// Host and device code; knows nothing of torch, layouts or threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__CUDACC__)
#define HOOKSTATS_HD __host__ __device__
#else
#define HOOKSTATS_HD
#endif

namespace hookstats {

// The rows of a site's state, in order. Python reads this list from the extension.
//   count    finite values                         mean, m2   mean and sum of squared deviations of them
//   min, max extremes of the finite values         abs_sum    sum of |x| over them
//   zeros    exact zeros of either sign            nans, posinfs, neginfs   what count leaves out
// All in float64: squares of float64 data beyond 1e154 overflow there, and show as an infinite or NaN m2.
#define HOOKSTATS_FIELDS(X) X(count) X(mean) X(m2) X(min) X(max) X(abs_sum) X(zeros) X(nans) X(posinfs) X(neginfs)

enum Field : int {
#define HOOKSTATS_ENUM(name) k_##name,
  HOOKSTATS_FIELDS(HOOKSTATS_ENUM)
#undef HOOKSTATS_ENUM
      kFields
};

// Combines two (count, mean, m2) triples: Chan, Golub & LeVeque 1979, eq. 2.1. An empty side has all three zero.
HOOKSTATS_HD inline void merge_moments(double& count, double& mean, double& m2, double other_count, double other_mean,
                                       double other_m2) {
  const double total = count + other_count;
  const double share = total > 0 ? other_count / total : 0.0;
  const double delta = other_mean - mean;
  mean += delta * share;
  m2 += other_m2 + delta * (delta * (count * share));  // in this order an empty side adds 0 however large delta is
  count = total;
}

// (mean, m2) from sums about a shift. Rounding may leave a negative m2 where it is zero; NaN stays.
HOOKSTATS_HD inline void finish_moments(double count, double shift, double sum, double square_sum, double& mean,
                                        double& m2) {
  const double mean_deviation = sum / count;
  mean = shift + mean_deviation;
  m2 = square_sum - sum * mean_deviation;
  m2 = m2 < 0 ? 0 : m2;
}

// The statistics of one set of values. Counts are doubles: exact to 2^53.
struct Sample {
#define HOOKSTATS_MEMBER(name) double name;
  HOOKSTATS_FIELDS(HOOKSTATS_MEMBER)
#undef HOOKSTATS_MEMBER

  HOOKSTATS_HD static Sample neutral() {
    Sample sample{};
    sample.min = std::numeric_limits<double>::infinity();
    sample.max = -std::numeric_limits<double>::infinity();
    return sample;
  }

  HOOKSTATS_HD void merge(const Sample& other) {
    merge_moments(count, mean, m2, other.count, other.mean, other.m2);
    min = other.min < min ? other.min : min;
    max = other.max > max ? other.max : max;
    abs_sum += other.abs_sum;
    zeros += other.zeros;
    nans += other.nans;
    posinfs += other.posinfs;
    neginfs += other.neginfs;
  }

  // Fields live `stride` doubles apart.
  HOOKSTATS_HD static Sample load(const double* at, int64_t stride) {
    Sample sample;
    int field = 0;
#define HOOKSTATS_LOAD(name) sample.name = at[field++ * stride];
    HOOKSTATS_FIELDS(HOOKSTATS_LOAD)
#undef HOOKSTATS_LOAD
    return sample;
  }

  HOOKSTATS_HD void store(double* at, int64_t stride) const {
    int field = 0;
#define HOOKSTATS_STORE(name) at[field++ * stride] = name;
    HOOKSTATS_FIELDS(HOOKSTATS_STORE)
#undef HOOKSTATS_STORE
  }

  // In state, count == 0 means that there are no extremes, so clearing a state is one memset.
  HOOKSTATS_HD static Sample load_state(const double* at, int64_t stride) {
    Sample sample = load(at, stride);
    if (sample.count == 0) {
      sample.min = std::numeric_limits<double>::infinity();
      sample.max = -std::numeric_limits<double>::infinity();
    }
    return sample;
  }

  HOOKSTATS_HD void merge_into_state(double* at, int64_t stride) const {
    Sample sum = load_state(at, stride);
    sum.merge(*this);
    sum.store_state(at, stride);
  }

  HOOKSTATS_HD void store_state(double* at, int64_t stride) const {
    Sample sample = *this;
    if (count == 0) sample.min = sample.max = 0;
    sample.store(at, stride);
  }
};

// Whether the sums of a tile stand for its statistics. They do not when a value was NaN or infinite, when a square
// overflowed or underflowed, or when the shift (one value of the tile) lies so far from the mean that the subtraction
// below costs more than 4 bits; then the tile is read again by ExactTile.
template <class acc_t>
HOOKSTATS_HD inline bool sums_hold(double count, double sum, double square_sum, double abs_sum, double min,
                                   double max) {
  constexpr double kLargest = std::numeric_limits<acc_t>::max();
  constexpr double kSmallest = std::numeric_limits<acc_t>::min();
  const bool finite = (square_sum <= kLargest) & (abs_sum <= kLargest);
  const bool constant = min == max;
  const bool in_range = square_sum >= count * kSmallest;
  const bool shift_is_near = 16 * (square_sum - sum * sum / count) >= square_sum;
  return finite & (constant | (in_range & shift_is_near));  // no branches: it runs in vector lanes
}

// Values that are summed in the arithmetic of the data before a carry into float64. Equal values round the same way
// each time: 16 float32 additions lose at most 16 * 2^-25 of the sum, and sums_hold allows 16 times that in m2.
constexpr int kCarryValues = 16;

// The fast way through a tile: sums about a shift. The caller carries after every kCarryValues values.
template <class acc_t>
struct FastTile {
  acc_t shift, min, max;
  acc_t part_sum = 0, part_square_sum = 0, part_abs_sum = 0;
  double sum = 0, square_sum = 0, abs_sum = 0;
  int32_t count = 0, zeros = 0;

  HOOKSTATS_HD explicit FastTile(acc_t first) : shift(first), min(first), max(first) {}

  HOOKSTATS_HD void update(acc_t x) {
    const acc_t deviation = x - shift;
    part_sum += deviation;
    part_square_sum += deviation * deviation;
    part_abs_sum += x < 0 ? -x : x;
    min = x < min ? x : min;
    max = x > max ? x : max;
    zeros += x == 0;
    ++count;
  }

  HOOKSTATS_HD void carry() {
    sum += part_sum;
    square_sum += part_square_sum;
    abs_sum += part_abs_sum;
    part_sum = part_square_sum = part_abs_sum = 0;
  }

  HOOKSTATS_HD bool holds() const { return sums_hold<acc_t>(count, sum, square_sum, abs_sum, min, max); }

  HOOKSTATS_HD Sample finish() const {
    Sample sample = Sample::neutral();
    sample.count = count;
    finish_moments(count, shift, sum, square_sum, sample.mean, sample.m2);
    sample.min = min;
    sample.max = max;
    sample.abs_sum = abs_sum;
    sample.zeros = zeros;
    return sample;
  }
};

// The slow way through a tile: float64 sums about the first finite value, everything else counted apart.
struct ExactTile {
  double shift = 0, sum = 0, square_sum = 0;
  Sample sample = Sample::neutral();

  HOOKSTATS_HD void update(double x) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (x != x) {
      sample.nans += 1;
    } else if (x == kInfinity) {
      sample.posinfs += 1;
    } else if (x == -kInfinity) {
      sample.neginfs += 1;
    } else {
      if (sample.count == 0) shift = x;
      const double deviation = x - shift;
      sum += deviation;
      square_sum += deviation * deviation;
      sample.count += 1;
      sample.abs_sum += x < 0 ? -x : x;
      sample.min = x < sample.min ? x : sample.min;
      sample.max = x > sample.max ? x : sample.max;
      sample.zeros += x == 0;
    }
  }

  HOOKSTATS_HD Sample finish() {
    if (sample.count > 0) finish_moments(sample.count, shift, sum, square_sum, sample.mean, sample.m2);
    return sample;
  }
};

}  // namespace hookstats
