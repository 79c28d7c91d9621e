// What a thread sums of a tile, in the arithmetic of the data.
#pragma once

#include "extremes.h"

namespace hookstats::cuda {

// The sums of a tile's values about a shift, which lies among them. The places of a pack are `kChannels` channels, or
// all of one. kLooks: the shift is chosen before the tile is read; else it is the mean of the first values.
//
// So of a channel's n values at least two (four where they are at four places; of first values, all four together) lie
// no nearer to the mean than the shift does, and n times the shift's distance squared is at most n / 2 (n / 4) times
// the sum of squares about the mean: whatever the data, seven bits of 24 at most are lost there.
template <class scalar_t, int kPack_, int kChannels_, bool kLooks>
struct TileSums {
  static constexpr int kPack = kPack_, kChannels = kChannels_;
  static constexpr int kPlaces = kPack / kChannels;  // of a channel in a pack
  static constexpr int kMostPacks = 128;
  static_assert(kMostPacks <= 256, "zeros are counted in 16-bit floating point");
  using Load = Pack<scalar_t, kPack>;
  using acc_t = acc_of<scalar_t>;

  acc_t shift[kChannels], sum[kChannels], square_sum[kChannels], abs_sum[kChannels];
  Extremes<scalar_t, kPack> extremes;
  bool shifted = false;  // whether the tile has its shift

  // The next tile.
  __device__ void clear() {
    shifted = false;
    for (int c = 0; c < kChannels; ++c) sum[c] = square_sum[c] = abs_sum[c] = 0;
    extremes.clear();
  }

  // Between the middle two of four values of the channel, so that one that lies far from the others does not move it;
  // of four at each place, between the middle two of these. Where one of them is not finite, the tile is read exactly,
  // whatever the shift.
  __device__ void choose_shift(const Load (&packs)[4]) {
    static_assert(kPlaces == 1 || kPlaces == 4);
    acc_t x[4][kPack], middle[kPack];
    for (int d = 0; d < 4; ++d) widen_pack(packs[d], x[d]);
    for (int i = 0; i < kPack; ++i) middle[i] = middle_of(x[0][i], x[1][i], x[2][i], x[3][i]);
    for (int c = 0; c < kChannels; ++c) {
      shift[c] = kPlaces == 1 ? middle[c] : middle_of(middle[0], middle[1], middle[2], middle[3]);
    }
  }
  __device__ static acc_t middle_of(acc_t a, acc_t b, acc_t c, acc_t d) {
    const acc_t low = std::fmax(std::fmin(a, b), std::fmin(c, d)), high = std::fmin(std::fmax(a, b), std::fmax(c, d));
    return low + (high - low) / 2;
  }

  // Rounding: a value passes a chain of four additions, a tree over the places, and one addition per four packs.
  template <int packs, bool may_be_first, class Histogram>
  __device__ void add(const Load* pack, const Histogram& histogram) {
    acc_t x[packs][kPack];
    for (int d = 0; d < packs; ++d) {
      widen_pack(pack[d], x[d]);
      extremes.update(pack[d], x[d]);
    }
    if (!kLooks && may_be_first && !shifted) {  // their mean: the middle would take registers that are not there
      static_assert(packs == 1 || packs == 4);
      for (int c = 0; c < kChannels; ++c) {  // of equal values it is their value
        shift[c] = packs == 1 ? x[0][c] : ((x[0][c] + x[1 % packs][c]) + (x[2 % packs][c] + x[3 % packs][c])) / 4;
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

  __device__ acc_t min(int c) const {
    acc_t low = extremes.min(c);
    for (int i = c + kChannels; i < kPack; i += kChannels) low = std::fmin(low, extremes.min(i));
    return low;
  }
  __device__ acc_t max(int c) const {
    acc_t high = extremes.max(c);
    for (int i = c + kChannels; i < kPack; i += kChannels) high = std::fmax(high, extremes.max(i));
    return high;
  }
  __device__ unsigned zeros(int c) const {
    int zeros = extremes.zeros(c);
    for (int i = c + kChannels; i < kPack; i += kChannels) zeros += extremes.zeros(i);
    return unsigned(zeros);
  }

  // As sums_hold in stats.h, in the arithmetic of the data; the shift is near.
  __device__ bool holds(int c, acc_t inverse_count) const {
    constexpr acc_t kLargest = std::numeric_limits<acc_t>::max(), kSmallest = std::numeric_limits<acc_t>::min();
    const acc_t low = min(c), q = square_sum[c];
    const bool finite = (q <= kLargest / 32) & (abs_sum[c] <= kLargest);
    return finite & (((low == max(c)) & (low == shift[c])) | (q * inverse_count >= kSmallest));
  }

  // Of `values` values, all finite.
  __device__ BlockSums<acc_t> close(int c, unsigned values) const {
    return {double(sum[c]), double(square_sum[c]), double(abs_sum[c]), shift[c], min(c), max(c), values, zeros(c)};
  }
};

}  // namespace hookstats::cuda
