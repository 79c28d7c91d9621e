// What a statistic is: its neutral element, its update by one value, its merge with another part, its finished form.
// Both backends fold these structs. Where they sum in vector lanes or in pairs of 16 bits, their own loops do what
// add() does here, and everything after that is written here alone. Host and device code; knows nothing of torch,
// layouts or threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

// Host and device code; and the same where it must be inlined: on the CPU into loops that are compiled for several
// instruction sets, whose vectors it becomes.
#if defined(__CUDACC__)
#define HOOKSTATS_HD __host__ __device__
#define HOOKSTATS_HD_INLINE __host__ __device__ __forceinline__
#else
#define HOOKSTATS_HD
#define HOOKSTATS_HD_INLINE inline __attribute__((always_inline))
#endif

namespace hookstats {

// The rows of a site's state, in order. Python reads this list from the extension. First those of the finite values:
//   count    finite values                         mean, m2   mean and sum of squared deviations of them
//   min, max extremes of the finite values         abs_sum    sum of |x| over them
//   zeros    exact zeros of either sign            nans, posinfs, neginfs   what count leaves out
// All in float64: squares of float64 data beyond 1e154 overflow there, and show as an infinite or NaN m2.
#define HOOKSTATS_MOMENTS(X) \
  X(count, double) X(mean, double) X(m2, double) X(min, double) X(max, double) X(abs_sum, double) X(zeros, double)
#define HOOKSTATS_NONFINITE(X) X(nans, double) X(posinfs, double) X(neginfs, double)
#define HOOKSTATS_FIELDS(X) HOOKSTATS_MOMENTS(X) HOOKSTATS_NONFINITE(X)

enum Field : int {
#define HOOKSTATS_ENUM(name, type) k_##name,
  HOOKSTATS_FIELDS(HOOKSTATS_ENUM)
#undef HOOKSTATS_ENUM
      kFields
};
constexpr int kMoments = k_nans;

// The members of a list, and each(all, f), which calls f on every member of `all`, in order, after `before`.
#define HOOKSTATS_MEMBERS(LIST, before)                      \
  LIST(HOOKSTATS_MEMBER)                                     \
  template <class T, class F>                                \
  HOOKSTATS_HD_INLINE static void each(T& all, const F& f) { \
    before;                                                  \
    LIST(HOOKSTATS_CALL)                                     \
  }
#define HOOKSTATS_MEMBER(name, type) type name;
#define HOOKSTATS_CALL(name, type) f(all.name);

template <class T>
HOOKSTATS_HD_INLINE T least(T a, T b) {
#if defined(__CUDA_ARCH__)
  return std::fmin(a, b);  // one instruction
#else
  return b < a ? b : a;
#endif
}
template <class T>
HOOKSTATS_HD_INLINE T largest(T a, T b) {
#if defined(__CUDA_ARCH__)
  return std::fmax(a, b);
#else
  return b > a ? b : a;
#endif
}

// The statistics that need no mean, as members of Moments and of Sums alike: cleared, with one value more if it counts,
// merged with another part, and copied to other types. No branches: these run in vector lanes.
template <class T>
HOOKSTATS_HD_INLINE void clear_plain(T& all) {
  constexpr auto kInfinity = std::numeric_limits<decltype(all.min)>::infinity();
  all.count = all.zeros = 0;
  all.abs_sum = 0;
  all.min = kInfinity;
  all.max = -kInfinity;
}
template <class T, class acc_t>
HOOKSTATS_HD_INLINE void add_plain(T& all, acc_t x, bool counts) {
  all.count += counts ? 1 : 0;
  all.zeros += counts & (x == 0) ? 1 : 0;
  all.abs_sum += counts ? std::fabs(double(x)) : 0;
  all.min = counts ? least(all.min, x) : all.min;
  all.max = counts ? largest(all.max, x) : all.max;
}
template <class T>
HOOKSTATS_HD_INLINE void merge_plain(T& all, const T& other) {
  all.count += other.count;
  all.zeros += other.zeros;
  all.abs_sum += other.abs_sum;
  all.min = least(all.min, other.min);
  all.max = largest(all.max, other.max);
}
template <class To, class From>
HOOKSTATS_HD_INLINE void copy_plain(To& to, const From& from) {
  to.count = from.count;
  to.zeros = from.zeros;
  to.abs_sum = from.abs_sum;
  to.min = from.min;
  to.max = from.max;
}

// The finished statistics of finite values. Counts are doubles: exact to 2^53.
struct Moments {
  HOOKSTATS_MEMBERS(HOOKSTATS_MOMENTS, )

  HOOKSTATS_HD_INLINE static Moments neutral() {
    Moments all{};
    clear_plain(all);
    return all;
  }

  // Itself if it counts, else neutral.
  HOOKSTATS_HD_INLINE Moments where(bool counts) const {
    Moments all = neutral();
#define HOOKSTATS_KEEP(name, type) all.name = counts ? name : all.name;
    HOOKSTATS_MOMENTS(HOOKSTATS_KEEP)
#undef HOOKSTATS_KEEP
    return all;
  }

  // Mean and m2 as Chan, Golub & LeVeque 1979, eq. 2.1, have them.
  HOOKSTATS_HD_INLINE void merge(const Moments& other) {
    const double total = count + other.count;
    const double share = total > 0 ? other.count / total : 0.0;
    const double delta = other.mean - mean;
    mean += delta * share;
    m2 += other.m2 + delta * (delta * (count * share));  // in this order an empty side adds 0 however large delta is
    merge_plain(*this, other);
  }
};

// A column of a state: all fields.
struct Sample : Moments {
  HOOKSTATS_MEMBERS(HOOKSTATS_NONFINITE, Moments::each(all, f))

  HOOKSTATS_HD_INLINE static Sample neutral() { return {Moments::neutral(), 0, 0, 0}; }

  using Moments::merge;
  HOOKSTATS_HD_INLINE void merge(const Sample& other) {
    Moments::merge(other);
    nans += other.nans;
    posinfs += other.posinfs;
    neginfs += other.neginfs;
  }
};

// The statistics of some finite values as sums about a pivot that lies among them: these merge without a division.
// With the pivot a mean of n of the N values, rounding in square_sum costs at most about N / n * 2^-53 of m2.
template <class acc_t, class count_t>
struct Sums {
#define HOOKSTATS_SUMS(X) \
  X(sum, double)          \
  X(square_sum, double)   \
  X(abs_sum, double)      \
  X(pivot, acc_t)         \
  X(min, acc_t)           \
  X(max, acc_t)           \
  X(count, count_t)       \
  X(zeros, count_t)
  HOOKSTATS_MEMBERS(HOOKSTATS_SUMS, )

#define HOOKSTATS_SIZE(name, type) +int(sizeof(type))
  static constexpr int kBytes = HOOKSTATS_SUMS(HOOKSTATS_SIZE);
#undef HOOKSTATS_SIZE

  HOOKSTATS_HD_INLINE static Sums neutral() {
    Sums all{};
    clear_plain(all);
    return all;
  }

  // One value more, if it counts; the first is the pivot.
  HOOKSTATS_HD_INLINE void add(acc_t x, bool counts = true) {
    pivot = (count == 0) & counts ? x : pivot;
    const double deviation = counts ? double(x) - double(pivot) : 0;
    sum += deviation;
    square_sum += deviation * deviation;
    add_plain(*this, x, counts);
  }

  HOOKSTATS_HD_INLINE void merge(const Sums& other) {
    if (count == 0) pivot = other.pivot;
    merge_about_pivot(other.about(pivot));
  }
  HOOKSTATS_HD_INLINE void merge_about_pivot(const Sums& other) {
    square_sum += other.square_sum;
    sum += other.sum;
    merge_plain(*this, other);
  }
  // The same about another pivot.
  HOOKSTATS_HD_INLINE Sums about(acc_t other) const {
    Sums all = *this;
    const double shift = double(pivot) - double(other);
    all.square_sum += shift * (2 * sum + count * shift);
    all.sum += count * shift;
    all.pivot = other;
    return all;
  }

  HOOKSTATS_HD_INLINE Sums<double, double> widened() const {
    Sums<double, double> all{};
    all.sum = sum;
    all.square_sum = square_sum;
    all.pivot = pivot;
    copy_plain(all, *this);
    return all;
  }

  // Rounding may leave a negative m2 where it is zero; NaN stays.
  HOOKSTATS_HD_INLINE Moments finish() const {
    Moments all;
    copy_plain(all, *this);
    const double mean_deviation = count > 0 ? sum / count : 0.0;
    all.mean = double(pivot) + mean_deviation;
    all.m2 = square_sum - sum * mean_deviation;
    all.m2 = all.m2 < 0 ? 0 : all.m2;
    return all;
  }
  HOOKSTATS_HD_INLINE static Sums of(const Moments& finished) {
    Sums all{};
    all.pivot = finished.mean;
    all.square_sum = finished.m2;
    copy_plain(all, finished);
    return all;
  }
};

// Of whole tensors and states.
using WideSums = Sums<double, double>;

// Any values, one after the other: what is not finite is counted apart.
struct ExactSums : WideSums {
  HOOKSTATS_MEMBERS(HOOKSTATS_NONFINITE, WideSums::each(all, f))

  HOOKSTATS_HD_INLINE static ExactSums neutral() { return {WideSums::neutral(), 0, 0, 0}; }

  HOOKSTATS_HD_INLINE void add(double x) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    WideSums::add(x, std::fabs(x) < kInfinity);
    nans += x != x ? 1 : 0;
    posinfs += x == kInfinity ? 1 : 0;
    neginfs += x == -kInfinity ? 1 : 0;
  }
  HOOKSTATS_HD_INLINE Sample finish() const { return {WideSums::finish(), nans, posinfs, neginfs}; }
};

// In memory: an array of each member, `slots` long, one behind the other.
template <class T, class index_t>
HOOKSTATS_HD_INLINE T load_slot(const void* arrays, index_t slots, index_t slot) {
  T all;
  const char* array = static_cast<const char*>(arrays);
  T::each(all, [&](auto& member) {
    using member_t = std::remove_reference_t<decltype(member)>;
    member = reinterpret_cast<const member_t*>(array)[slot];
    array += slots * index_t(sizeof(member_t));
  });
  return all;
}
template <class T, class index_t>
HOOKSTATS_HD_INLINE void store_slot(const T& all, void* arrays, index_t slots, index_t slot) {
  char* array = static_cast<char*>(arrays);
  T::each(all, [&](const auto& member) {
    using member_t = std::remove_const_t<std::remove_reference_t<decltype(member)>>;
    reinterpret_cast<member_t*>(array)[slot] = member;
    array += slots * index_t(sizeof(member_t));
  });
}

// Moments, or a Sample, out of a state and into it: fields lie `stride` doubles apart. There, count == 0 means that
// there are no extremes, so clearing a state is one memset.
template <class T>
HOOKSTATS_HD_INLINE T load_state(const double* at, int64_t stride) {
  T all = load_slot<T, int64_t>(at, stride, 0);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  all.min = all.count == 0 ? kInfinity : all.min;
  all.max = all.count == 0 ? -kInfinity : all.max;
  return all;
}
template <class T>
HOOKSTATS_HD_INLINE void store_state(T all, double* at, int64_t stride) {
  all.min = all.count == 0 ? 0 : all.min;
  all.max = all.count == 0 ? 0 : all.max;
  store_slot<T, int64_t>(all, at, stride, 0);
}
template <class T>
HOOKSTATS_HD_INLINE void merge_into_state(const T& all, double* at, int64_t stride) {
  T sum = load_state<T>(at, stride);
  sum.merge(all);
  store_state(sum, at, stride);
}

// Whether the sums of a tile, made in the arithmetic of the data, stand for its statistics. They do not when a value
// was NaN or infinite, when a square overflowed or underflowed, or when the pivot lies so far from the mean that the
// subtraction in finish() costs more than 4 bits; then the tile is read again by ExactSums.
template <class acc_t>
HOOKSTATS_HD_INLINE bool sums_hold(const WideSums& tile) {
  constexpr double kLargest = std::numeric_limits<acc_t>::max();
  constexpr double kSmallest = std::numeric_limits<acc_t>::min();
  const bool finite = (tile.square_sum <= kLargest) & (tile.abs_sum <= kLargest);
  const bool constant = tile.min == tile.max;
  const bool in_range = tile.square_sum >= tile.count * kSmallest;
  const bool pivot_is_near = 16 * (tile.square_sum - tile.sum * tile.sum / tile.count) >= tile.square_sum;
  return finite & (constant | (in_range & pivot_is_near));  // no branches: it runs in vector lanes
}

// Values that are summed in the arithmetic of the data before a carry into float64. Equal values round the same way
// each time: 16 float32 additions lose at most 16 * 2^-25 of the sum, and sums_hold allows 16 times that in m2.
constexpr int kCarryValues = 16;

}  // namespace hookstats
