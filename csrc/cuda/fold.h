// Merging what threads and blocks have summed, always in the same order. Blocks meet without waiting for each other:
// whoever arrives last merges.
#pragma once

#include "device.h"

namespace hookstats::cuda {

constexpr int kThreads = 256;
constexpr int kBlockChannels = 64;  // at most

// Which channels and elements a thread reads. A block has `lanes` x `groups` threads at work: a lane is one channel, or
// several neighbouring ones, its places; the groups share its elements. Neighbouring threads are neighbouring lanes
// where channels lie side by side, else neighbouring groups.
struct Geometry {
  int lanes, groups;
  bool lanes_first;

  HOOKSTATS_HD int lane(int thread) const { return lanes_first ? thread % lanes : thread / groups; }
  HOOKSTATS_HD int group(int thread) const { return lanes_first ? thread / lanes : thread % groups; }
  HOOKSTATS_HD int thread(int lane, int group) const {
    return lanes_first ? group * lanes + lane : lane * groups + group;
  }
};

// Whether a thread of four places has the halves of its packs exchanged (histogram.h says what for).
template <int kPlaces>
HOOKSTATS_HD inline bool exchanges(const Geometry& geometry, int thread) {
  return kPlaces == 4 && geometry.group(thread) % 2 == 1;
}

// The statistics of some finite values as sums about a pivot that lies among them: these merge without a division.
// With the pivot a mean of n of the N values, rounding in square_sum costs at most about N / n * 2^-53 of m2.
template <class acc_t, class count_t>
struct Sums {
  double sum, square_sum, abs_sum;
  acc_t pivot, min, max;
  count_t count, zeros;

  HOOKSTATS_HD static Sums neutral() {
    constexpr acc_t kInfinity = std::numeric_limits<acc_t>::infinity();
    return {0, 0, 0, 0, kInfinity, -kInfinity, 0, 0};
  }

  HOOKSTATS_HD void merge(const Sums& other) {
    if (count == 0) pivot = other.pivot;
    const double shift = double(other.pivot) - double(pivot);
    square_sum += other.square_sum + shift * (2 * other.sum + other.count * shift);
    sum += other.sum + other.count * shift;
    abs_sum += other.abs_sum;
    min = std::fmin(min, other.min);
    max = std::fmax(max, other.max);
    count += other.count;
    zeros += other.zeros;
  }

  // In shared memory: an array of each field, `slots` long.
  static constexpr int kBytes = 3 * sizeof(double) + 3 * sizeof(acc_t) + 2 * sizeof(count_t);
  __device__ static Sums load(const double* shared, int slots, int slot) {
    const double* sums = shared + slot;
    const acc_t* values = reinterpret_cast<const acc_t*>(shared + 3 * slots) + slot;
    const count_t* counts = reinterpret_cast<const count_t*>(values - slot + 3 * slots) + slot;
    return {sums[0],       sums[slots],       sums[2 * slots], values[0],
            values[slots], values[2 * slots], counts[0],       counts[slots]};
  }
  __device__ void store(double* shared, int slots, int slot) const {
    double* sums = shared + slot;
    acc_t* values = reinterpret_cast<acc_t*>(shared + 3 * slots) + slot;
    count_t* counts = reinterpret_cast<count_t*>(values - slot + 3 * slots) + slot;
    sums[0] = sum;
    sums[slots] = square_sum;
    sums[2 * slots] = abs_sum;
    values[0] = pivot;
    values[slots] = min;
    values[2 * slots] = max;
    counts[0] = count;
    counts[slots] = zeros;
  }
};

// Of a block's share, of which a channel has less than 2^32 elements.
template <class acc_t>
using BlockSums = Sums<acc_t, unsigned>;

// Of whole tensors and states.
using WideSums = Sums<double, double>;

template <class acc_t>
HOOKSTATS_HD inline WideSums widen_sums(const BlockSums<acc_t>& s) {
  return {s.sum, s.square_sum, s.abs_sum, s.pivot, s.min, s.max, double(s.count), double(s.zeros)};
}

// The same about the mean, where square_sum is m2.
HOOKSTATS_HD inline WideSums centred(WideSums s) {
  if (s.count > 0) {
    finish_moments(s.count, s.pivot, s.sum, s.square_sum, s.pivot, s.square_sum);
    s.sum = 0;
  }
  return s;
}

// A block's part of a channel in scratch, centred: kPartFields doubles, `stride` apart.
constexpr int kPartFields = 7;
static_assert(kScratchDoubles >= kBlocks * kBlockChannels * kPartFields);

__device__ inline void store_part(const WideSums& s, double* at, int64_t stride) {
  const WideSums part = centred(s);
  const double fields[] = {part.count, part.pivot, part.square_sum, part.abs_sum, part.min, part.max, part.zeros};
  for (int i = 0; i < kPartFields; ++i) at[i * stride] = fields[i];
}
__device__ inline WideSums load_part(const double* at, int64_t stride) {
  double fields[kPartFields];
  for (int i = 0; i < kPartFields; ++i) fields[i] = load_fresh(&at[i * stride]);
  return {0, fields[2], fields[3], fields[1], fields[4], fields[5], fields[0], fields[6]};
}

// The rows of a state that Sums has, `stride` doubles apart. Of the others, the kinds of values that are not finite,
// whole numbers are added where they are found.
HOOKSTATS_HD inline WideSums load_state(const double* at, int64_t stride) {
  const Sample s = Sample::load_state(at, stride);
  return {0, s.m2, s.abs_sum, s.mean, s.min, s.max, s.count, s.zeros};
}
HOOKSTATS_HD inline void store_state(const WideSums& s, double* at, int64_t stride) {
  const WideSums state = centred(s);
  at[k_count * stride] = state.count;
  at[k_mean * stride] = state.pivot;
  at[k_m2 * stride] = state.square_sum;
  at[k_min * stride] = state.count == 0 ? 0 : state.min;
  at[k_max * stride] = state.count == 0 ? 0 : state.max;
  at[k_abs_sum * stride] = state.abs_sum;
  at[k_zeros * stride] = state.zeros;
}

// Merges the sums of each lane's groups into those of group 0. Slots: threads, then places. Every thread of the block
// calls it, after a barrier; it ends with one.
template <class sums_t, int kPlaces>
__device__ void fold_block(double* shared, const Geometry& geometry, int thread) {
  constexpr int kSlots = kThreads * kPlaces;
  // A thread stays with a channel: first it merges every `rows`-th group, then the rows meet in a tree.
  const int columns = geometry.lanes * kPlaces, rows = kThreads / columns;
  const int column = geometry.lanes_first ? thread % columns : thread / rows;
  const int row = geometry.lanes_first ? thread / columns : thread % rows;
  const int lane = column % geometry.lanes, place = column / geometry.lanes;
  const auto slot = [&](int group) { return geometry.thread(lane, group) + place * kThreads; };
  const bool works = row < rows && column < columns && row < geometry.groups;
  sums_t sums = sums_t::neutral();
  if (works) {
    sums = sums_t::load(shared, kSlots, slot(row));
    for (int group = row + rows; group < geometry.groups; group += rows) {
      sums.merge(sums_t::load(shared, kSlots, slot(group)));
    }
    sums.store(shared, kSlots, slot(row));
  }
  __syncthreads();
  for (int size = rows < geometry.groups ? rows : geometry.groups; size > 1;) {
    const int half = (size + 1) / 2;  // half .. size - 1 are merged into 0 .. size - half - 1
    if (works && row < size - half) {
      sums.merge(sums_t::load(shared, kSlots, slot(row + half)));
      sums.store(shared, kSlots, slot(row));
    }
    __syncthreads();
    size = half;
  }
}

// Blocks that arrive are counted in the low half of a word, those among them that were switched off in the high half.
constexpr unsigned kOn = 1, kOff = 1 << 16 | 1;
enum class Arrival : int { early, last, last_but_torn };

// By one thread of a block, after a barrier: what the block has written before is seen by the block that comes last.
// `last` for the last of `expected` arrivals, if all were on. It leaves the word as it was found.
__device__ inline Arrival arrive(unsigned* word, unsigned expected, bool on) {
  const unsigned as = on ? kOn : kOff;
  __threadfence();
  const unsigned arrived = atomicAdd(word, as) + as;
  if ((arrived & 0xffff) != expected) return Arrival::early;
  __threadfence();
  *word = 0;
  return arrived >> 16 ? Arrival::last_but_torn : Arrival::last;
}

}  // namespace hookstats::cuda
