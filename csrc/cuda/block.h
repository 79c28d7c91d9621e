// What one block of threads does: it reads its share of a tensor once (read.h), folds its threads (fold.h), and if it
// is the last of its channel group to arrive, it folds the parts of all, in their order, into the state. Deterministic:
// every merge has a fixed order, and only whole numbers are added atomically.
#pragma once

#include "histogram.h"
#include "plan.h"
#include "read.h"

namespace hookstats::cuda {

constexpr int larger(int a, int b) { return a > b ? a : b; }

// Shared memory: the histogram, then the thread's sums, then the ring. When these are done with, from the beginning on:
// the sums of parts.
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker, HistogramKind kind, int kFlight>
struct Shared {
  // Value by value, beside linear bins, and for doubles, looking first would not fit into the registers.
  static constexpr bool kLooks = kPack > 1 && kind != HistogramKind::linear && sizeof(scalar_t) < 8;
  using Histogram = BlockHistogram<kind, kPlaces, (kPack > kPlaces)>;
  using Reads =
      Reader<scalar_t, kPack, kPlaces, Walker, kPlaces == 4 && kind == HistogramKind::per_channel, kLooks, kFlight>;
  static constexpr int kHistogram = Histogram::kWords * int(sizeof(unsigned));
  static constexpr int kSums = kThreads * kPlaces * BlockSums<acc_of<scalar_t>>::kBytes;
  static constexpr int kRing = Reads::Feed::kBytes;
  static constexpr int kBytes = larger(kHistogram + kSums + kRing, kThreads* WideSums::kBytes);
};

// Beside it every kernel has arrays of fixed size, of less than this.
constexpr int kFixedShared = 2 << 10;

// Bytes of a thread on their way. Where a GPU (L4) has no room for a block with so much, half of it are.
constexpr int kUsualFlight = 128, kLeanFlight = 64;

// What a block may have at least on a GPU that is built for.
constexpr int kLeastSharedMemory = 99 << 10;
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker, HistogramKind kind>
constexpr bool kHasLean =
    Shared<scalar_t, kPack, kPlaces, Walker, kind, kUsualFlight>::kBytes + kFixedShared > kLeastSharedMemory;

// Calls f(constant: the bytes on their way) of the blocks that a GPU has room for, of which one may have
// `shared_memory` bytes.
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker, HistogramKind kind, class F>
auto with_flight([[maybe_unused]] int shared_memory, const F& f) {
  if constexpr (kHasLean<scalar_t, kPack, kPlaces, Walker, kind>) {
    constexpr int kUsual = Shared<scalar_t, kPack, kPlaces, Walker, kind, kUsualFlight>::kBytes + kFixedShared;
    if (kUsual > shared_memory) return f(std::integral_constant<int, kLeanFlight>{});
  }
  return f(std::integral_constant<int, kUsualFlight>{});
}

// Blocks on a multiprocessor, whose registers they share: of doubles, some kernels need more than half of them.
template <class scalar_t, HistogramKind kind, bool kPlanes>
constexpr int kBlocksAtOnce =
    sizeof(scalar_t) == 8 && (kind == HistogramKind::linear || (kPlanes && kind == HistogramKind::per_channel)) ? 1 : 2;

// Calls f(constant of the kind).
template <class F>
auto with_kind(HistogramKind kind, const F& f) {
  switch (kind) {
#define HOOKSTATS_CASE(name) \
  case HistogramKind::name:  \
    return f(std::integral_constant<HistogramKind, HistogramKind::name>{});
    HOOKSTATS_CASE(none)
    HOOKSTATS_CASE(per_tensor)
    HOOKSTATS_CASE(per_channel)
    default:
      HOOKSTATS_CASE(linear)
#undef HOOKSTATS_CASE
  }
}

// Whether a tensor can be read in packs by blocks of so much shared memory, of which each GPU that is built for has
// enough; else it is read value by value.
template <class scalar_t, int kPlaces>
bool packs_fit(HistogramKind kind, int shared_memory) {
  constexpr int kPack = kPackOf<scalar_t>;
  return with_kind(kind, [&](auto constant) {
    constexpr HistogramKind k = decltype(constant)::value;
    constexpr int kFlight = kHasLean<scalar_t, kPack, kPlaces, LineWalker, k> ? kLeanFlight : kUsualFlight;
    constexpr int kBytes = Shared<scalar_t, kPack, kPlaces, LineWalker, k, kFlight>::kBytes + kFixedShared;
    static_assert(kBytes <= kLeastSharedMemory);
    return kBytes <= shared_memory;
  });
}

// What one block does, in three phases: it loads its share of the tensor, folds its threads, and publishes their sums:
// the last block of a channel group folds the parts of all into the state. `place` says which block: place.group() of
// the groups of channels, place.part() of the parts of their elements. All threads of the block call it, once. They are
// one function: each way to cut it that was tried cost registers, and some of them instructions of the hot loop.
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker, HistogramKind kind, int kFlight,
          class Place>
__device__ __forceinline__ void run_block(const scalar_t* data, const Job& job, const Launch& launch, Place place) {
  using Sizes = Shared<scalar_t, kPack, kPlaces, Walker, kind, kFlight>;
  using Histogram = typename Sizes::Histogram;
  using Whole = BlockSums<acc_of<scalar_t>>;
  HOOKSTATS_DYNAMIC_SHARED(dynamic);
  HOOKSTATS_SHARED(unsigned, nonfinite_counts, NonFinite::kWords);
  HOOKSTATS_SHARED(Arrival, says, 1);  // thread 0 to its block
  static_assert(NonFinite::kWords * sizeof(unsigned) + sizeof(Arrival) + sizeof(Job) + 16 <= kFixedShared);
  double* const shared = dynamic + Sizes::kHistogram / sizeof(double);
  void* const ring = shared + Sizes::kSums / sizeof(double);

  const int thread = threadIdx.x;
  const Geometry geometry = job.geometry;
  const int64_t channels = job.layout.channels;
  const int64_t first_channel = int64_t(place.group()) * geometry.lanes * kPlaces;
  int64_t count = job.layout.count, share = job.share;
  if constexpr (Walker<scalar_t>::kKnowsLists) {
    if (job.layout.kept) {  // the same parts share what there is
      count = *job.layout.kept * job.layout.row_size();
      share = share_of(count, job.parts, geometry);
    }
  }

  // Load. Meanwhile a thread is a lane and a group.
  const int lane = geometry.lane(thread), group = geometry.group(thread);
  const int64_t lane_channel = first_channel + lane * kPlaces;
  const int64_t first = place.part() * share + group, stop = (place.part() + 1) * share;
  const int64_t end = stop < count ? stop : count;
  const bool reads = group < geometry.groups && lane_channel < channels && first < end;
  typename Sizes::Reads reader(
      shared, ring, thread, data + (reads ? lane_channel * job.layout.channel_stride : 0), job.layout, first,
      geometry.groups, reads ? int((end - first + geometry.groups - 1) / geometry.groups) : 0,
      exchanges<kPlaces>(geometry, thread), int(channels - lane_channel < kPlaces ? channels - lane_channel : kPlaces));

  const Histogram histogram(reinterpret_cast<unsigned*>(dynamic), job.state, geometry, first_channel, thread);
  const NonFinite nonfinite(nonfinite_counts, thread);
  // The flag may change while the kernel runs, from another stream: each block reads it once, and blocks that see it
  // off still arrive, so that the moments of such a launch are dropped and the next one finds its scratch clean. So do
  // those of a tensor of which no row counts.
  if (thread == 0) {
    const bool off = launch.active && *static_cast<const volatile int32_t*>(launch.active) == 0;
    const bool nothing = Walker<scalar_t>::kKnowsLists && count == 0;
    says[0] = off || nothing ? Arrival::last_but_torn : Arrival::last;
  }
  __syncthreads();
  bool on = says[0] == Arrival::last;
  if (!on) Sizes::Reads::Feed::stop();
  if (!on && job.parts == 1) return;

  // After that, it is one channel, and, where parts are merged, a share of the parts.
  const int block_channels = geometry.lanes * kPlaces;
  const Geometry merging{block_channels, kThreads / block_channels, true};
  const int column = thread % block_channels, row = thread / block_channels;
  const int64_t channel = first_channel + column;
  const bool owns = row == 0 && channel < channels, counts = place.group() == 0 && thread == 0;
  WideSums sums = WideSums::neutral(), before = WideSums::neutral();
  int64_t calls = 0, first_call = 0;

  if constexpr (!Walker<scalar_t>::kAligned && kPack > kPlaces) {
    if (on && group < geometry.groups && lane_channel < channels) {  // what is no whole pack, of the part's runs
      const Layout& layout = job.layout;
      const int64_t packs = layout.inner_size(), runs = count / packs, part_runs = divide_up(runs, job.parts);
      const int64_t stop = (place.part() + 1) * part_runs;
      for (int64_t run = place.part() * part_runs + group; run < runs && run < stop; run += geometry.groups) {
        const int64_t at = packs * kPack + (layout.ndim > 1 ? run * layout.stride[0] : 0);
        const scalar_t* rest = data + lane_channel * layout.channel_stride + at;
        for (int i = 0; i < job.rest; ++i) reader.add(rest[i], histogram, nonfinite, lane);
      }
    }
  }

  if (on) {
    const int at_once =
        Histogram::kMostRows / geometry.groups / Sizes::Reads::Tile::kMostPacks * Sizes::Reads::Tile::kMostPacks;
    const int64_t most = geometry.lanes_first ? divide_up(share, geometry.groups) : 0;
    for (int64_t until = at_once;; until += at_once) {
      reader.read(geometry.lanes_first ? int(until) : INT32_MAX, histogram, nonfinite, lane * kPlaces);
      __syncthreads();
      if (until >= most) break;
      histogram.add_to_state(job.state, geometry, first_channel, channels, thread);
      __syncthreads();
      histogram.clear(geometry, thread);
      __syncthreads();
    }
    // Fold, while the state is read.
    if (owns) {
      before = WideSums::of(load_state<Moments>(job.state.moments + channel, job.state.row_stride));
    }
    if (counts) {
      calls = job.state.counters[k_calls];
      first_call = job.state.counters[k_first];
    }
    nonfinite.add_to_state(job.state, first_channel, thread);
    histogram.add_to_state(job.state, geometry, first_channel, channels, thread);
    fold_block<Whole, kPlaces>(shared, geometry, thread);
    if (owns) {
      const int slot = geometry.thread(column / kPlaces, 0) + column % kPlaces * kThreads;
      sums = load_slot<Whole>(shared, kThreads * kPlaces, slot).widened();
    }
  }

  // Publish.
  unsigned* word = launch.arrivals + job.first_arrival + place.group() * job.words;
  unsigned step = 1;  // between the parts of this round
  for (unsigned count = job.parts, mine = place.part(); count > 1;) {
    const auto part = [&](unsigned i) {
      return launch.partials + job.first_partial + i * step * kMoments * channels + channel;
    };
    const unsigned from = mine / kFan * kFan, expected = count - from < kFan ? count - from : kFan;
    if (on && owns) store_part(sums, part(mine), channels);
    __syncthreads();
    if (thread == 0) says[0] = arrive(&word[mine / kFan], expected, on);
    __syncthreads();
    if (says[0] == Arrival::early) return;
    on = says[0] == Arrival::last;
    if (on) {
      sums = WideSums::neutral();
      if (row < merging.groups && channel < channels) {
        for (unsigned i = row; i < expected; i += merging.groups) {
          sums.merge(load_part(part(from + i), channels));
        }
      }
      store_slot(sums, dynamic, kThreads, thread);
      __syncthreads();
      fold_block<WideSums, 1>(dynamic, merging, thread);
      if (owns) sums = load_slot<WideSums>(dynamic, kThreads, thread);
    }
    word += (count + kFan - 1) / kFan;
    mine /= kFan;
    count = (count + kFan - 1) / kFan;
    step *= kFan;
  }
  if (!on) return;

  if (owns) {
    before.merge(sums);
    store_state(before.finish(), job.state.moments + channel, job.state.row_stride);
  }
  if (counts) {
    job.state.counters[k_calls] = calls + 1;
    if (first_call == 0) job.state.counters[k_first] = int64_t(atomicAdd(launch.clock, 1ull)) + 1;
  }
}

}  // namespace hookstats::cuda
