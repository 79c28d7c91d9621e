// The CUDA kernels: one launch folds a tensor into a state. Deterministic: the shape alone decides how the work is
// split (never the number of SMs), every merge has a fixed order, and only integers are added atomically.
//
// A block has 32 x 8 threads. Where channels lie side by side ("rows") threadIdx.x is one of 32 channels and
// threadIdx.y one of 8 groups of its elements; otherwise ("planes") all 256 threads share one channel.

#include "../kernels.h"
#include "device.h"

namespace hookstats::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kGroups = 8;
constexpr int kThreads = kLanes * kGroups;
constexpr int kTileValues = 64;     // of one thread
constexpr int kInFlight = 4;        // loads of one thread before the first is used
constexpr int kSmallestShare = 16;  // values of one thread, before a second block helps
constexpr int64_t kBlocks = 1024;   // blocks to aim for, on any GPU
static_assert(kBlocks * kLanes * kFields <= kScratchDoubles && kBlocks <= kScratchCounters);

struct Job {
  Layout layout;
  State state;
  double* partials;    // [parts, kFields, channels]
  unsigned* arrivals;  // [gridDim.x]
  const int32_t* active;
  int64_t share;  // elements of a channel in one part
};

// Sequence numbers for the first tensor of each site.
__device__ unsigned long long execution_clock;

// Offsets of the elements first, first + step, ... of a channel. Up to two dimensions: no division.
struct NearWalker {
  int64_t at, inner, inner_size, step_at, step_inner, wrap;

  __device__ NearWalker(const Layout& layout, int64_t first, int64_t step) {
    inner_size = layout.inner_size();
    const int64_t inner_stride = layout.inner_stride();
    const int64_t outer_stride = layout.ndim == 2 ? layout.stride[0] : 0;
    inner = first % inner_size;
    at = first / inner_size * outer_stride + inner * inner_stride;
    step_inner = step % inner_size;
    step_at = step / inner_size * outer_stride + step_inner * inner_stride;
    wrap = outer_stride - inner_size * inner_stride;
  }
  __device__ int64_t offset() const { return at; }
  __device__ void next() {
    at += step_at;
    inner += step_inner;
    if (inner >= inner_size) {
      inner -= inner_size;
      at += wrap;
    }
  }
};

// The same for any number of dimensions.
struct FarWalker {
  const Layout& layout;
  int64_t i, step;

  __device__ FarWalker(const Layout& layout, int64_t first, int64_t step) : layout(layout), i(first), step(step) {}
  __device__ int64_t offset() const { return layout.offset(i); }
  __device__ void next() { i += step; }
};

// A block's 32-bit histogram. Per channel it is [bin][lane]: the lanes of a warp never meet in a bank, and where they
// share a channel they are summed at the end.
template <HistogramKind kind>
struct BlockHistogram {
  static constexpr int kSize = kind == HistogramKind::none         ? 1
                               : kind == HistogramKind::per_tensor ? kExponentBins
                                                                   : kOctaveBins * kLanes;
  unsigned* counts;

  __device__ BlockHistogram(unsigned* shared, int thread) : counts(shared) {
    if constexpr (kind != HistogramKind::none) {
      for (int i = thread; i < kSize; i += kThreads) counts[i] = 0;
      __syncthreads();
    }
  }

  template <class acc_t>
  __device__ void add(acc_t x) {
    if (kind == HistogramKind::none) return;
    const int bin = exponent_bin(x);
    if (bin == kNoBin) return;
    atomicAdd(&counts[kind == HistogramKind::per_tensor ? bin : octave_bin(bin) * kLanes + threadIdx.x], 1u);
  }

  __device__ void add_to_state(const State& state, int64_t first_channel, bool rows, int thread) const {
    if (kind == HistogramKind::none) return;
    __syncthreads();
    for (int i = thread; i < kSize; i += kThreads) {
      if (counts[i] == 0) continue;
      int64_t bin = i;
      if (kind == HistogramKind::per_channel) {
        bin = (first_channel + (rows ? i % kLanes : 0)) * kOctaveBins + i / kLanes;
      }
      atomicAdd(reinterpret_cast<unsigned long long*>(&state.histogram[bin]), (unsigned long long)counts[i]);
    }
  }
};

// Merges the samples of a block's threads, always in the same order: over threadIdx.y, and over threadIdx.x too unless
// `rows`. The result is in the threads with the lowest index. `shared` is [kFields][kThreads].
__device__ Sample fold_block(Sample sample, double* shared, bool rows, int thread) {
  for (int half = kThreads / 2; half >= (rows ? kLanes : 1); half /= 2) {
    __syncthreads();
    if (half <= thread && thread < 2 * half) sample.store(&shared[thread], kThreads);
    __syncthreads();
    if (thread < half) sample.merge(Sample::load(&shared[thread + half], kThreads));
  }
  return sample;
}

// Arrivals of a group's blocks are counted in the low half of a word, those that were switched off in the high half.
constexpr unsigned kOn = 1, kOff = 1 << 16 | 1;
static_assert(kBlocks < kOff >> 1);

// True for the last block to arrive, if all were on. It leaves the word as it was found.
__device__ bool arrive(unsigned* word, unsigned as) {
  const unsigned arrived = atomicAdd(word, as) + as;
  if ((arrived & 0xffff) != gridDim.y) return false;
  *word = 0;
  return arrived >> 16 == 0;
}

template <class scalar_t, class Walker, HistogramKind kind>
__device__ Sample read_share(const scalar_t* data, const Layout& layout, int64_t first, int64_t end, int64_t step,
                             BlockHistogram<kind>& histogram) {
  using acc_t = acc_of<scalar_t>;
  Sample sample = Sample::neutral();
  Walker walker(layout, first, step);
  int64_t left = first < end ? (end - first + step - 1) / step : 0;
  while (left > 0) {
    const int n = int(left < kTileValues ? left : kTileValues);
    Walker again = walker;
    FastTile<acc_t> tile(widen(data[walker.offset()]));
    for (int done = 0; done < n; done += kCarryValues) {
      const int stop = n - done < kCarryValues ? n - done : kCarryValues;
      int i = 0;
      for (; i + kInFlight <= stop; i += kInFlight) {
        acc_t x[kInFlight];
        for (int j = 0; j < kInFlight; ++j, walker.next()) x[j] = widen(data[walker.offset()]);
        for (int j = 0; j < kInFlight; ++j) {
          tile.update(x[j]);
          histogram.add(x[j]);
        }
      }
      for (; i < stop; ++i, walker.next()) {
        const acc_t x = widen(data[walker.offset()]);
        tile.update(x);
        histogram.add(x);
      }
      tile.carry();
    }
    if (tile.holds()) {
      sample.merge(tile.finish());
    } else {
      ExactTile exact;
      for (int i = 0; i < n; ++i, again.next()) exact.update(widen(data[again.offset()]));
      sample.merge(exact.finish());
    }
    left -= n;
  }
  return sample;
}

// gridDim.x: groups of channels; gridDim.y: parts of their elements.
template <class scalar_t, class Walker, HistogramKind kind>
__global__ void __launch_bounds__(kThreads, 2) accumulate_kernel(const scalar_t* data, const Job job, const bool rows) {
  HOOKSTATS_SHARED(double, shared, kFields* kThreads);
  HOOKSTATS_SHARED(unsigned, shared_counts, BlockHistogram<kind>::kSize);
  HOOKSTATS_SHARED(bool, says, 1);  // thread 0 to its block

  // The flag may change while the kernel runs, from another stream: each block reads it once, and blocks that see it
  // off still arrive, so that the moments of such a launch are dropped and the next one finds its scratch clean.
  const int thread = threadIdx.y * kLanes + threadIdx.x;
  if (thread == 0) {
    says[0] = job.active && *static_cast<const volatile int32_t*>(job.active) == 0;
    if (says[0] && gridDim.y > 1) arrive(&job.arrivals[blockIdx.x], kOff);
  }
  __syncthreads();
  if (says[0]) return;

  const int64_t channels = job.layout.channels;
  const int64_t first_channel = int64_t(blockIdx.x) * (rows ? kLanes : 1);
  const int64_t channel = first_channel + (rows ? threadIdx.x : 0);
  const int64_t begin = blockIdx.y * job.share;
  const int64_t end = begin + job.share < job.layout.count ? begin + job.share : job.layout.count;

  BlockHistogram<kind> histogram(shared_counts, thread);
  Sample sample = Sample::neutral();
  if (channel < channels) {
    sample = read_share<scalar_t, Walker, kind>(data + channel * job.layout.channel_stride, job.layout,
                                                begin + (rows ? threadIdx.y : thread), end, rows ? kGroups : kThreads,
                                                histogram);
  }
  histogram.add_to_state(job.state, first_channel, rows, thread);
  sample = fold_block(sample, shared, rows, thread);

  const bool writes = thread < (rows ? kLanes : 1) && channel < channels;
  if (gridDim.y > 1) {
    // Every part leaves its sample in scratch; the block that arrives last merges them all, in the order of the parts.
    if (writes) sample.store(&job.partials[blockIdx.y * kFields * channels + channel], channels);
    __threadfence();
    __syncthreads();
    if (thread == 0) says[0] = arrive(&job.arrivals[blockIdx.x], kOn);
    __syncthreads();
    if (!says[0]) return;
    __threadfence();
    sample = Sample::neutral();
    if (channel < channels) {
      for (unsigned part = rows ? threadIdx.y : thread; part < gridDim.y; part += rows ? kGroups : kThreads) {
        sample.merge(Sample::load(&job.partials[part * kFields * channels + channel], channels));
      }
    }
    sample = fold_block(sample, shared, rows, thread);
  }
  if (writes) sample.merge_into_state(job.state.moments + channel, job.state.row_stride);
  if (blockIdx.x == 0 && thread == 0) {
    job.state.counters[k_calls] += 1;
    if (job.state.counters[k_first] == 0) {
      job.state.counters[k_first] = int64_t(atomicAdd(&execution_clock, 1ull)) + 1;
    }
  }
}

// One thread per channel and histogram bin. Into a state of one channel: one block, channels folded in a fixed order.
__global__ void __launch_bounds__(kThreads) merge_kernel(const State into, const State from) {
  HOOKSTATS_SHARED(double, shared, kFields* kThreads);
  const bool fold = into.channels != from.channels;
  const int thread = threadIdx.y * kLanes + threadIdx.x;
  const int64_t first = int64_t(blockIdx.x) * kThreads + thread;
  const int64_t step = int64_t(gridDim.x) * kThreads;

  Sample sum = Sample::neutral();
  for (int64_t c = first; c < from.channels; c += step) {
    const Sample sample = Sample::load_state(from.moments + c, from.row_stride);
    if (fold) {
      sum.merge(sample);
    } else {
      sample.merge_into_state(into.moments + c, into.row_stride);
    }
  }
  if (fold) {
    sum = fold_block(sum, shared, false, thread);
    if (thread == 0) sum.merge_into_state(into.moments, into.row_stride);
  }
  if (into.kind != HistogramKind::none) {
    const bool per_channel = into.kind == HistogramKind::per_channel;
    const int64_t bins = per_channel ? from.channels * kOctaveBins : kExponentBins;
    for (int64_t i = first; i < bins; i += step) {
      const int64_t bin = per_channel && fold ? i % kOctaveBins : i;
      atomicAdd(reinterpret_cast<unsigned long long*>(&into.histogram[bin]), (unsigned long long)from.histogram[i]);
    }
  }
  if (first == 0) {
    into.counters[k_calls] += from.counters[k_calls];
    const int64_t theirs = from.counters[k_first], ours = into.counters[k_first];
    if (theirs && (!ours || theirs < ours)) into.counters[k_first] = theirs;
  }
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

const char* message(cudaError_t error) { return error == cudaSuccess ? nullptr : cudaGetErrorString(error); }

template <class scalar_t, class Walker>
cudaError_t launch_accumulate(const void* data, const Job& job, HistogramKind kind, bool rows, dim3 grid,
                              cudaStream_t stream) {
  constexpr auto none = HistogramKind::none, tensor = HistogramKind::per_tensor, channel = HistogramKind::per_channel;
  const auto kernel = kind == none     ? accumulate_kernel<scalar_t, Walker, none>
                      : kind == tensor ? accumulate_kernel<scalar_t, Walker, tensor>
                                       : accumulate_kernel<scalar_t, Walker, channel>;
  return launch(kernel, grid, dim3(kLanes, kGroups), stream, static_cast<const scalar_t*>(data), job, rows);
}

}  // namespace

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

const char* accumulate(const Input& input, const State& state, const Launch& to) {
  const Layout& layout = input.layout;
  const bool rows = layout.channels_are_inner();
  const int64_t groups = rows ? divide_up(layout.channels, kLanes) : layout.channels;
  const int64_t row = rows ? kGroups : kThreads;  // elements of a channel that a block reads at a time
  const int64_t most_parts = divide_up(layout.count, row * kSmallestShare);
  const int64_t wanted = kBlocks / groups;
  const int64_t parts = wanted < 2 ? 1 : wanted < most_parts ? wanted : most_parts;
  // Parts begin at whole tiles of every thread, where there is enough.
  const int64_t share = divide_up(divide_up(layout.count, parts), row) * row;
  const dim3 grid(unsigned(groups), unsigned(divide_up(layout.count, share)));
  const Job job{layout, state, to.partials, to.arrivals, to.active, share};
  const auto stream = static_cast<cudaStream_t>(to.stream);

  if (const auto error = cudaSetDevice(to.device)) return message(error);
  switch (input.dtype) {
#define HOOKSTATS_CASE(name, type, aten)                                                                      \
  case Dtype::name:                                                                                           \
    return message(layout.ndim <= 2                                                                           \
                       ? launch_accumulate<type, NearWalker>(input.data, job, state.kind, rows, grid, stream) \
                       : launch_accumulate<type, FarWalker>(input.data, job, state.kind, rows, grid, stream));
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
  }
  return "unknown dtype";
}

const char* merge(const State& into, const State& from, const Launch& to) {
  const int64_t bins = into.kind == HistogramKind::none         ? 0
                       : into.kind == HistogramKind::per_tensor ? kExponentBins
                                                                : from.channels * kOctaveBins;
  const bool fold = into.channels != from.channels;
  const int64_t items = from.channels > bins ? from.channels : bins;
  const int64_t blocks = fold ? 1 : divide_up(items, kThreads);
  const dim3 grid(unsigned(blocks < kBlocks ? blocks : kBlocks));
  if (const auto error = cudaSetDevice(to.device)) return message(error);
  return message(launch(merge_kernel, grid, dim3(kLanes, kGroups), static_cast<cudaStream_t>(to.stream), into, from));
}

}  // namespace hookstats::cuda
