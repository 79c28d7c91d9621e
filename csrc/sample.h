// Which elements of a tensor are its sample: 64 runs of 64 neighbours in memory, evenly spread; all of a smaller one. A
// stride of single elements would touch a cache line for each.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace hookstats {

constexpr int64_t kRun = 64;                // neighbouring elements
constexpr int64_t kSampleSize = 64 * kRun;  // of a tensor, at most

HOOKSTATS_HD inline int64_t sample_size(int64_t count) { return count < kSampleSize ? count : kSampleSize; }

// Where element i of the sample lies. Runs do not overlap; the first and the last element of the tensor are in them.
HOOKSTATS_HD inline int64_t sample_place(int64_t count, int64_t i) {
  if (count <= kSampleSize) return i;
  return i / kRun * (count - kRun) / (kSampleSize / kRun - 1) + i % kRun;
}

// Takes the value that element i of a sample has now, and by how much it has changed, where that is asked for.
template <class scalar_t, class acc_t>
HOOKSTATS_HD inline void take_sample(scalar_t value, int64_t i, acc_t* values, acc_t* differences) {
  const acc_t now = widen(value);
  if (differences) differences[i] = now - values[i];
  values[i] = now;
}

}  // namespace hookstats
