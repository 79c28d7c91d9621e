// From a value to its histogram bin: by its exponent (no range to choose, no value lost, exact to merge), or in a range
// that the caller chose.
// Host and device code; knows nothing of torch.
#pragma once

#include <cstdint>
#include <cstring>

#include "stats.h"

namespace hookstats {

// Per tensor: sign and exponent of the value as a float32, `sign << 8 | exponent`. Bin 0 holds zeros and subnormals of
// either sign; bins 255, 256 and 511 stay empty (NaN and Inf are left out, -0 goes to bin 0).
constexpr int kExponentBins = 512;

// Per channel: octaves of |x|. Bin j holds 2^(j-47) <= |x| < 2^(j-46); bin 0 everything below 2^-46, zeros too;
// bin 63 everything from 2^16, which is what float16 cannot hold.
constexpr int kOctaveBins = 64;
constexpr int kFirstOctave = -46;

constexpr int kNoBin = -1;  // NaN and Inf

// Of blocks of neighbouring values (blocks.h), behind the bins per tensor: for formats that scale each block by its
// largest |x|. First the distances, in each of 8 groups of blocks: bin 0 holds zeros, bin 1 + d values that lie d
// octaves below the largest of their block (its exponent minus theirs, where a power of two counts as the end of the
// octave below it: what rounding to nearest even makes 0 is 2^k and less), the last bin what lies further. Then, for
// each exponent as a float32, the blocks with such a largest |x|: 0 where that is zero or subnormal, 255 where a value
// is NaN or Inf, whose block has no distances.
constexpr int kDistanceBins = 40;
constexpr int kBlockGroups = 8;
constexpr int kBlockBins = kBlockGroups * kDistanceBins + 256;

HOOKSTATS_HD inline int exponent_bin(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int exponent = (bits >> 23) & 255;
  if (exponent == 255) return kNoBin;
  return exponent == 0 ? 0 : int(bits >> 23);
}

// A double outside float32's exponents is clamped to the nearest bin. Its own bits decide, so rounding moves nothing.
HOOKSTATS_HD inline int exponent_bin(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int wide = int(bits >> 52) & 2047;
  if (wide == 2047) return kNoBin;
  int exponent = wide - 1023 + 127;
  if (exponent <= 0) return 0;
  if (exponent > 254) exponent = 254;
  return int(bits >> 63) << 8 | exponent;
}

HOOKSTATS_HD inline int octave_bin(int exponent_bin) {
  const int octave = (exponent_bin & 255) - 127 - kFirstOctave + 1;
  return octave < 0 ? 0 : octave >= kOctaveBins ? kOctaveBins - 1 : octave;
}

// |x| as the bits of a float32. Of a double as far as exponents tell: its own, clamped, and whether it is more than a
// power of two.
HOOKSTATS_HD inline uint32_t magnitude_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}
HOOKSTATS_HD inline uint32_t magnitude_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int bin = exponent_bin(x);
  const uint32_t exponent = bin == kNoBin ? 255 : bin & 255;
  return exponent << 23 | ((exponent == 0 ? bits << 1 : bits << 12) != 0);
}

// The bin of a distance from the exponent of the largest magnitude of a block, not 255.
HOOKSTATS_HD inline unsigned distance_bin(uint32_t largest, uint32_t magnitude) {
  const uint32_t distance = largest - ((magnitude - 1) >> 23);
  const unsigned bin = 1 + (distance < kDistanceBins - 2 ? distance : kDistanceBins - 2);
  return magnitude == 0 ? 0 : bin;
}

// `bins` counters for bins - 2 equal bins from low to high, high included: the first counter is for what lies below,
// the last for what lies above. In the arithmetic and the order of operations of torch.histc.
template <class acc_t>
HOOKSTATS_HD inline int linear_bin(acc_t x, acc_t low, acc_t high, int bins) {
  if (x < low) return 0;
  if (x > high) return bins - 1;
  const int bin = int((x - low) * acc_t(bins - 2) / (high - low));
  return bin < bins - 2 ? bin + 1 : bins - 2;
}

}  // namespace hookstats
