// One launch folds a tensor into a state. Deterministic: the shape alone decides how the work is split (never the
// number of multiprocessors), every merge has a fixed order, and only whole numbers are added atomically.
//
// The work is a grid of blocks: groups of channels x parts of their elements. Each thread reads its share once
// (read.h), the block folds its threads (fold.h), and of the blocks of a channel group the last to arrive folds the
// parts, in their order, into the state.

#include "histogram.h"
#include "read.h"

namespace hookstats::cuda {
namespace {

constexpr unsigned kFan = 64;  // parts that one block merges at most; more are merged in two rounds

// What to cut the work into. Two blocks run on a multiprocessor: on 132 of them, the number that this was measured on,
// one wave is 264 blocks. A block costs as much as reading 100 KB or so.
constexpr int64_t kWave = 264, kMostWaves = kBlocks / kWave;
constexpr int64_t kBlockBytes = 128 << 10;

struct Job {
  Layout layout;  // its elements are packs
  State state;
  Geometry geometry;
  double* partials;    // [parts, kPartFields, channels]
  unsigned* arrivals;  // [gridDim.x, words]
  unsigned words;
  const int32_t* active;
  int64_t share;  // packs of a channel in one part
};

// Sequence numbers for the first tensor of each site.
__device__ unsigned long long execution_clock;

constexpr int larger(int a, int b) { return a > b ? a : b; }
HOOKSTATS_HD inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Shared memory: the histogram, then the thread's sums, then the ring.
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker, HistogramKind kind>
struct Shared {
  static constexpr int kHistogram = BlockHistogram<kind, kPlaces, (kPack > kPlaces)>::kWords * int(sizeof(unsigned));
  static constexpr int kSums = kThreads * larger(kPlaces * BlockSums<acc_of<scalar_t>>::kBytes, WideSums::kBytes);
  using Reads = Reader<scalar_t, kPack, kPlaces, Walker, kPlaces == 4 && kind == HistogramKind::per_channel>;
  static constexpr int kRing = Reads::Feed::kBytes;
  static constexpr int kBytes = kHistogram + kSums + kRing;
};

// gridDim.x: groups of channels; gridDim.y: parts of their elements.
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker, HistogramKind kind>
__global__ void __launch_bounds__(kThreads, 2) accumulate_kernel(const scalar_t* data, const Job job) {
  using Histogram = BlockHistogram<kind, kPlaces, (kPack > kPlaces)>;
  using Sizes = Shared<scalar_t, kPack, kPlaces, Walker, kind>;
  using Whole = BlockSums<acc_of<scalar_t>>;
  HOOKSTATS_DYNAMIC_SHARED(dynamic);
  HOOKSTATS_SHARED(unsigned, odd_counts, Odd::kWords);
  HOOKSTATS_SHARED(Arrival, says, 1);  // thread 0 to its block
  double* const shared = dynamic + Sizes::kHistogram / sizeof(double);
  void* const ring = shared + Sizes::kSums / sizeof(double);

  const int thread = threadIdx.x;
  const Geometry geometry = job.geometry;
  const int64_t channels = job.layout.channels;
  const int64_t first_channel = int64_t(blockIdx.x) * geometry.lanes * kPlaces;

  // While values are read, a thread is a lane and a group.
  const int lane = geometry.lane(thread), group = geometry.group(thread);
  const int64_t lane_channel = first_channel + lane * kPlaces;
  const int64_t first = blockIdx.y * job.share + group, stop = (blockIdx.y + 1) * job.share;
  const int64_t end = stop < job.layout.count ? stop : job.layout.count;
  const bool reads = group < geometry.groups && lane_channel < channels && first < end;
  typename Sizes::Reads reader(shared, ring, thread, data + (reads ? lane_channel * job.layout.channel_stride : 0),
                               job.layout, first, geometry.groups,
                               reads ? int((end - first + geometry.groups - 1) / geometry.groups) : 0,
                               exchanges<kPlaces>(geometry, thread));

  const Histogram histogram(reinterpret_cast<unsigned*>(dynamic), geometry, thread);
  const Odd odd(odd_counts, thread);
  // The flag may change while the kernel runs, from another stream: each block reads it once, and blocks that see it
  // off still arrive, so that the moments of such a launch are dropped and the next one finds its scratch clean.
  if (thread == 0) {
    const bool off = job.active && *static_cast<const volatile int32_t*>(job.active) == 0;
    says[0] = off ? Arrival::last_but_torn : Arrival::last;
  }
  __syncthreads();
  bool on = says[0] == Arrival::last;
  if (!on && gridDim.y == 1) return;

  // After that, it is one channel, and, where parts are merged, a share of the parts.
  const int block_channels = geometry.lanes * kPlaces;
  const Geometry merging{block_channels, kThreads / block_channels, true};
  const int column = thread % block_channels, row = thread / block_channels;
  const int64_t channel = first_channel + column;
  const bool owns = row == 0 && channel < channels;
  WideSums sums = WideSums::neutral(), before = WideSums::neutral();

  if (on) {
    const int at_once = Histogram::kMostRows / geometry.groups / Sizes::Reads::kTilePacks * Sizes::Reads::kTilePacks;
    const int64_t most = geometry.lanes_first ? divide_up(job.share, geometry.groups) : 0;
    for (int64_t until = at_once;; until += at_once) {
      reader.read(geometry.lanes_first ? int(until) : INT32_MAX, histogram, odd, lane * kPlaces);
      __syncthreads();
      if (until >= most) break;
      histogram.add_to_state(job.state, geometry, first_channel, channels, thread);
      __syncthreads();
      histogram.clear(geometry, thread);
      __syncthreads();
    }
    if (owns) before = load_state(job.state.moments + channel, job.state.row_stride);  // while the block is folded
    odd.add_to_state(job.state, first_channel, thread);
    histogram.add_to_state(job.state, geometry, first_channel, channels, thread);
    fold_block<Whole, kPlaces>(shared, geometry, thread);
    if (owns) {
      const int slot = geometry.thread(column / kPlaces, 0) + column % kPlaces * kThreads;
      sums = widen_sums(Whole::load(shared, kThreads * kPlaces, slot));
    }
  }

  unsigned* word = job.arrivals + blockIdx.x * job.words;
  unsigned step = 1;  // between the parts of this round
  for (unsigned count = gridDim.y, mine = blockIdx.y; count > 1;) {
    const auto part = [&](unsigned i) { return job.partials + i * step * kPartFields * channels + channel; };
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
      sums.store(shared, kThreads, thread);
      __syncthreads();
      fold_block<WideSums, 1>(shared, merging, thread);
      if (owns) sums = WideSums::load(shared, kThreads, thread);
    }
    word += (count + kFan - 1) / kFan;
    mine /= kFan;
    count = (count + kFan - 1) / kFan;
    step *= kFan;
  }
  if (!on) return;

  if (owns) {
    before.merge(sums);
    store_state(before, job.state.moments + channel, job.state.row_stride);
  }
  if (blockIdx.x == 0 && thread == 0) {
    job.state.counters[k_calls] += 1;
    if (job.state.counters[k_first] == 0) {
      job.state.counters[k_first] = int64_t(atomicAdd(&execution_clock, 1ull)) + 1;
    }
  }
}

template <class scalar_t, int kPack, int kPlaces, template <class> class Walker>
cudaError_t launch_accumulate(const void* data, Job job, HistogramKind kind, dim3 grid, cudaStream_t stream) {
  constexpr auto none = HistogramKind::none, tensor = HistogramKind::per_tensor, channel = HistogramKind::per_channel;
  const auto start = [&](auto kernel, int shared_bytes) {
    return launch(kernel, grid, dim3(kThreads), shared_bytes, stream, static_cast<const scalar_t*>(data), job);
  };
  switch (kind) {
    case none:
      return start(accumulate_kernel<scalar_t, kPack, kPlaces, Walker, none>,
                   Shared<scalar_t, kPack, kPlaces, Walker, none>::kBytes);
    case tensor:
      return start(accumulate_kernel<scalar_t, kPack, kPlaces, Walker, tensor>,
                   Shared<scalar_t, kPack, kPlaces, Walker, tensor>::kBytes);
    default:
      return start(accumulate_kernel<scalar_t, kPack, kPlaces, Walker, channel>,
                   Shared<scalar_t, kPack, kPlaces, Walker, channel>::kBytes);
  }
}

template <class scalar_t>
cudaError_t accumulate_as(const Input& input, const State& state, const Launch& to) {
  constexpr int kPack = sizeof(scalar_t) == 8 ? 2 : sizeof(scalar_t) == 1 ? 1 : 4;
  Layout layout = input.layout;
  const bool rows = layout.channels_are_inner();

  // Packs need their elements side by side and every step between packs to be whole packs.
  const auto whole_packs = [](int64_t x) { return x % kPack == 0; };
  const bool near = layout.ndim <= 1 || (layout.ndim == 2 && layout.inner_size() < INT32_MAX);
  bool packed = kPack > 1 && near && layout.ndim <= (rows ? 1 : 2) &&
                reinterpret_cast<uintptr_t>(input.data) % (kPack * sizeof(scalar_t)) == 0;
  for (int d = 0; d < layout.ndim; ++d) packed &= whole_packs(layout.stride[d]) || (!rows && d == layout.ndim - 1);
  if (rows) {
    packed &= layout.channel_stride == 1 && whole_packs(layout.channels);
  } else {
    packed &= layout.inner_stride() == 1 && whole_packs(layout.inner_size());
    packed &= layout.channels == 1 || whole_packs(layout.channel_stride);
    if (packed) {
      layout.count /= kPack;
      if (layout.ndim) {
        layout.size[layout.ndim - 1] /= kPack;
        layout.stride[layout.ndim - 1] = kPack;
      }
    }
  }
  const int places = packed && rows ? kPack : 1;

  Job job{layout, state, {}, to.partials, to.arrivals, 0, to.active, 0};
  Geometry& geometry = job.geometry;
  geometry.lanes_first = rows;
  int64_t groups;  // of channels
  if (rows) {
    const int64_t lanes = layout.channels / places;
    groups = divide_up(lanes, kBlockChannels / places);
    geometry.lanes = int(divide_up(lanes, groups));
    geometry.groups = kThreads / geometry.lanes;
  } else {
    // A warp to each channel where channels are short, else the whole block.
    geometry.groups = layout.channels > 1 && layout.count < kThreads * 8 ? 32 : kThreads;
    geometry.lanes = kThreads / geometry.groups;
    groups = divide_up(layout.channels, geometry.lanes);
  }

  // As few waves of blocks as fill a GPU to nine tenths; but every part has something to read.
  const int64_t pack_bytes = (packed ? kPack : 1) * int64_t(sizeof(scalar_t));
  const int64_t bytes = layout.count * (layout.channels / places) * pack_bytes;
  const int64_t useful = divide_up(divide_up(bytes, kBlockBytes), groups);
  int64_t parts = 1;
  double filled = 0;
  for (int64_t waves = 1; waves <= kMostWaves && filled < 0.9; ++waves) {
    const int64_t most = waves * kWave / groups, candidate = most < useful ? most : useful;
    const double fills = double(groups * candidate) / double(waves * kWave);
    if (candidate >= 1 && fills > filled) {
      parts = candidate;
      filled = fills;
    }
  }
  const int64_t step = geometry.groups * 4;  // whole groups of packs
  job.share = divide_up(divide_up(layout.count, parts), step) * step;
  const int64_t count = divide_up(layout.count, job.share);
  job.words = unsigned(divide_up(count, kFan)) + 1;
  const dim3 grid{unsigned(groups), unsigned(count), 1};

  const auto stream = static_cast<cudaStream_t>(to.stream);
  if constexpr (kPack > 1) {
    if (packed && rows)
      return launch_accumulate<scalar_t, kPack, kPack, LineWalker>(input.data, job, state.kind, grid, stream);
    if (packed && layout.ndim <= 1)
      return launch_accumulate<scalar_t, kPack, 1, LineWalker>(input.data, job, state.kind, grid, stream);
    if (packed) return launch_accumulate<scalar_t, kPack, 1, NearWalker>(input.data, job, state.kind, grid, stream);
  }
  if (near) return launch_accumulate<scalar_t, 1, 1, NearWalker>(input.data, job, state.kind, grid, stream);
  return launch_accumulate<scalar_t, 1, 1, FarWalker>(input.data, job, state.kind, grid, stream);
}

}  // namespace

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

const char* accumulate(const Input& input, const State& state, const Launch& to) {
  if (const auto error = cudaSetDevice(to.device)) return message(error);
  switch (input.dtype) {
#define HOOKSTATS_CASE(name, type, aten) \
  case Dtype::name:                      \
    return message(accumulate_as<type>(input, state, to));
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
  }
  return "unknown dtype";
}

}  // namespace hookstats::cuda
