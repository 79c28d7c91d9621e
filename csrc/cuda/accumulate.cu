// One launch folds a tensor into a state. Deterministic: the shape alone decides how the work is split (never the
// number of multiprocessors), every merge has a fixed order, and only whole numbers are added atomically.
//
// The work is a grid of blocks: groups of channels x parts of their elements. Each thread reads its share once
// (read.h), the block folds its threads (fold.h), and of the blocks of a channel group the last to arrive folds the
// parts, in their order, into the state.

#include <cstdlib>

#include "histogram.h"
#include "read.h"

namespace hookstats::cuda {
namespace {

constexpr unsigned kFan = 64;  // parts that one block merges at most; more are merged in two rounds

int64_t tune(const char* name, int64_t otherwise) {
  const char* value = getenv(name);
  return value ? atoll(value) : otherwise;
}
#define kBlockBytes tune("HS_BLOCK_BYTES", 128 << 10)
#define kShareStep tune("HS_SHARE_STEP", 16)
#define kWantedBlocks tune("HS_BLOCKS", kBlocks)

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

template <class scalar_t, int kPlaces, HistogramKind kind>
constexpr int kSharedBytes = BlockHistogram<kind, kPlaces>::kWords * int(sizeof(unsigned)) +
                             kThreads * (kPlaces * BlockSums<acc_of<scalar_t>>::kBytes > WideSums::kBytes
                                             ? kPlaces * BlockSums<acc_of<scalar_t>>::kBytes
                                             : WideSums::kBytes);

// gridDim.x: groups of channels; gridDim.y: parts of their elements.
template <class scalar_t, int kPack, int kPlaces, class Walker, HistogramKind kind>
__global__ void __launch_bounds__(kThreads, 2) accumulate_kernel(const scalar_t* data, const Job job) {
  using Histogram = BlockHistogram<kind, kPlaces>;
  using Whole = BlockSums<acc_of<scalar_t>>;
  HOOKSTATS_DYNAMIC_SHARED(dynamic);
  HOOKSTATS_SHARED(unsigned, odd_counts, Odd::kWords);
  HOOKSTATS_SHARED(Arrival, says, 1);  // thread 0 to its block
  double* const shared = dynamic + Histogram::kWords / 2;

  const int thread = threadIdx.x;
  const Geometry geometry = job.geometry;
  const Histogram histogram(reinterpret_cast<unsigned*>(dynamic), geometry, thread);
  const Odd odd(odd_counts, thread);
  Reader<scalar_t, kPack, kPlaces> reader(shared, thread);
  // The flag may change while the kernel runs, from another stream: each block reads it once, and blocks that see it
  // off still arrive, so that the moments of such a launch are dropped and the next one finds its scratch clean.
  if (thread == 0) {
    const bool off = job.active && *static_cast<const volatile int32_t*>(job.active) == 0;
    says[0] = off ? Arrival::last_but_torn : Arrival::last;
  }
  __syncthreads();
  bool on = says[0] == Arrival::last;
  if (!on && gridDim.y == 1) return;

  const int64_t first_channel = int64_t(blockIdx.x) * geometry.lanes * kPlaces;
  if (on) {
    const int lane = geometry.lane(thread), group = geometry.group(thread);
    const int64_t channel = first_channel + lane * kPlaces;
    if (group < geometry.groups && channel < job.layout.channels) {
      const int64_t first = blockIdx.y * job.share + group, stop = (blockIdx.y + 1) * job.share;
      const int64_t end = stop < job.layout.count ? stop : job.layout.count;
      const int64_t packs = first < end ? (end - first + geometry.groups - 1) / geometry.groups : 0;
      reader.read(data + channel * job.layout.channel_stride, Walker(job.layout, first, geometry.groups), packs,
                  histogram, odd, lane * kPlaces);
    }
    __syncthreads();
    odd.add_to_state(job.state, first_channel, thread);
    histogram.add_to_state(job.state, geometry, first_channel, thread);
    fold_block<Whole, kPlaces>(shared, geometry, thread);
  }

  // From here on a thread is one channel, and, where parts are merged, a share of the parts.
  const int block_channels = geometry.lanes * kPlaces;
  const Geometry merging{block_channels, kThreads / block_channels, true};
  const int column = thread % block_channels, row = thread / block_channels;
  const int64_t channel = first_channel + column;
  const bool owns = row == 0 && channel < job.layout.channels;
  WideSums sums = WideSums::neutral();
  if (on && owns) {
    sums = widen_sums(Whole::load(shared, kThreads * kPlaces,
                             geometry.thread(column / kPlaces, 0) + column % kPlaces * kThreads));
  }

  unsigned* word = job.arrivals + blockIdx.x * job.words;
  unsigned step = 1;  // between the parts of this round
  for (unsigned count = gridDim.y, mine = blockIdx.y; count > 1;) {
    const auto part = [&](unsigned i) { return job.partials + i * step * kPartFields * job.layout.channels + channel; };
    const unsigned first = mine / kFan * kFan, expected = count - first < kFan ? count - first : kFan;
    if (on && owns) store_part(sums, part(mine), job.layout.channels);
    __threadfence();
    __syncthreads();
    if (thread == 0) says[0] = arrive(&word[mine / kFan], expected, on);
    __syncthreads();
    if (says[0] == Arrival::early) return;
    on = says[0] == Arrival::last;
    if (on) {
      __threadfence();
      sums = WideSums::neutral();
      if (row < merging.groups && channel < job.layout.channels) {
        for (unsigned i = row; i < expected; i += merging.groups) {
          sums.merge(load_part(part(first + i), job.layout.channels));
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

  if (owns) merge_into_state(sums, job.state.moments + channel, job.state.row_stride);
  if (blockIdx.x == 0 && thread == 0) {
    job.state.counters[k_calls] += 1;
    if (job.state.counters[k_first] == 0) {
      job.state.counters[k_first] = int64_t(atomicAdd(&execution_clock, 1ull)) + 1;
    }
  }
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class scalar_t, int kPack, int kPlaces, class Walker>
cudaError_t launch_accumulate(const void* data, Job job, HistogramKind kind, dim3 grid, cudaStream_t stream) {
  constexpr auto none = HistogramKind::none, tensor = HistogramKind::per_tensor, channel = HistogramKind::per_channel;
  const auto start = [&](auto kernel, int shared_bytes) {
    return launch(kernel, grid, dim3(kThreads), shared_bytes, stream, static_cast<const scalar_t*>(data), job);
  };
  switch (kind) {
    case none:
      return start(accumulate_kernel<scalar_t, kPack, kPlaces, Walker, none>, kSharedBytes<scalar_t, kPlaces, none>);
    case tensor:
      return start(accumulate_kernel<scalar_t, kPack, kPlaces, Walker, tensor>, kSharedBytes<scalar_t, kPlaces, tensor>);
    default:
      return start(accumulate_kernel<scalar_t, kPack, kPlaces, Walker, channel>,
                   kSharedBytes<scalar_t, kPlaces, channel>);
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
  bool packed = kPack > 1 && near && layout.ndim <= (rows ? 1 : 2) && reinterpret_cast<uintptr_t>(input.data) % (kPack * sizeof(scalar_t)) == 0;
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

  // Enough parts to fill any GPU; but each has something to read.
  const int64_t pack_bytes = (packed ? kPack : 1) * int64_t(sizeof(scalar_t));
  const int64_t most_blocks = divide_up(layout.count * (layout.channels / places) * pack_bytes, kBlockBytes);
  const int64_t wanted = (most_blocks < kWantedBlocks ? most_blocks : kWantedBlocks) / groups;
  const int64_t step = geometry.groups * int64_t(kShareStep);
  const int64_t parts = wanted < 1 ? 1 : wanted;
  job.share = divide_up(divide_up(layout.count, parts), step) * step;
  const int64_t count = divide_up(layout.count, job.share);
  job.words = unsigned(divide_up(count, kFan)) + 1;
  const dim3 grid{unsigned(groups), unsigned(count), 1};

  const auto stream = static_cast<cudaStream_t>(to.stream);
  if constexpr (kPack > 1) {
    if (packed && rows) return launch_accumulate<scalar_t, kPack, kPack, LineWalker>(input.data, job, state.kind, grid, stream);
    if (packed && layout.ndim <= 1) return launch_accumulate<scalar_t, kPack, 1, LineWalker>(input.data, job, state.kind, grid, stream);
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
