// Merging what threads and blocks have summed, always in the same order. Blocks meet without waiting for each other:
// whoever arrives last merges.
#pragma once

#include "device.h"

namespace hookstats::cuda {

constexpr int kThreads = 256;       // of a block
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

// Of a block's share, of which a channel has less than 2^32 elements.
template <class acc_t>
using BlockSums = Sums<acc_t, unsigned>;

// A block's part of a channel in scratch, finished: kMoments doubles, `stride` apart.
static_assert(kScratchDoubles >= kBlocks * kBlockChannels * kMoments);

__device__ inline void store_part(const WideSums& sums, double* at, int64_t stride) {
  store_slot<Moments, int64_t>(sums.finish(), at, stride, 0);
}
__device__ inline WideSums load_part(const double* at, int64_t stride) {
  Moments part;
  Moments::each(part, [&](double& member) {
    member = load_fresh(at);
    at += stride;
  });
  return WideSums::of(part);
}

// Merges the sums_t (Sums, or Sample) of each lane's groups into those of group 0. Slots: threads, then places. Every
// thread of the block calls it, after a barrier; it ends with one.
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
    sums = load_slot<sums_t>(shared, kSlots, slot(row));
    for (int group = row + rows; group < geometry.groups; group += rows) {
      sums.merge(load_slot<sums_t>(shared, kSlots, slot(group)));
    }
    store_slot(sums, shared, kSlots, slot(row));
  }
  __syncthreads();
  for (int size = rows < geometry.groups ? rows : geometry.groups; size > 1;) {
    const int half = (size + 1) / 2;  // half .. size - 1 are merged into 0 .. size - half - 1
    if (works && row < size - half) {
      sums.merge(load_slot<sums_t>(shared, kSlots, slot(row + half)));
      store_slot(sums, shared, kSlots, slot(row));
    }
    __syncthreads();
    size = half;
  }
}

// Blocks that arrive are counted in the low half of a word, those among them that were switched off in the high half.
constexpr unsigned kOn = 1, kOff = 1 << 16 | 1;
enum class Arrival : int { early, last, last_but_torn };

// By one thread of a block, after a barrier: what the block has written before is seen by the block that comes last.
// `last` for the last of `expected` arrivals, if all were on.
//
// Invariant: every word is zero between two launches, and nobody clears it but this. So each of the `expected` blocks
// that share a word arrives there exactly once, also one that is off, and the last of them sets it back to zero.
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
