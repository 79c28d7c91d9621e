// One launch merges a state into another, or its channels into a state of one channel; or it takes the totals of many
// states.

#include "fold.h"

namespace hookstats::cuda {
namespace {

// One thread per channel and histogram bin. Into a state of one channel: one block, channels folded in a fixed order.
__global__ void __launch_bounds__(kThreads) merge_kernel(const State into, const State from) {
  HOOKSTATS_DYNAMIC_SHARED(shared);
  const bool fold = into.channels != from.channels;
  const int thread = threadIdx.x;
  const int64_t first = int64_t(blockIdx.x) * kThreads + thread;
  const int64_t step = int64_t(gridDim.x) * kThreads;

  WideSums sums = WideSums::neutral();
  for (int64_t c = first; c < from.channels; c += step) {
    const double* at = from.moments + c;
    const int64_t channel = fold ? 0 : c;
    if (fold) {
      sums.merge(load_state(at, from.row_stride));
    } else {
      WideSums state = load_state(into.moments + c, into.row_stride);
      state.merge(load_state(at, from.row_stride));
      store_state(state, into.moments + c, into.row_stride);
    }
    for (const int kind : {k_nans, k_posinfs, k_neginfs}) {
      const double count = at[kind * from.row_stride];
      if (count != 0) atomicAdd(&into.moments[kind * into.row_stride + channel], count);
    }
  }
  if (fold) {
    sums.store(shared, kThreads, thread);
    __syncthreads();
    fold_block<WideSums, 1>(shared, Geometry{1, kThreads, false}, thread);
    if (thread == 0) {
      WideSums state = load_state(into.moments, into.row_stride);
      state.merge(WideSums::load(shared, kThreads, 0));
      store_state(state, into.moments, into.row_stride);
    }
  }
  if (into.kind != HistogramKind::none) {
    for (int64_t i = first; i < from.all_bins(); i += step) {
      const int64_t bin = fold ? i % into.bins : i;
      atomicAdd(reinterpret_cast<unsigned long long*>(&into.histogram[bin]), (unsigned long long)from.histogram[i]);
    }
  }
  if (first == 0) {
    into.counters[k_calls] += from.counters[k_calls];
    const int64_t theirs = from.counters[k_first], ours = into.counters[k_first];
    if (theirs && (!ours || theirs < ours)) into.counters[k_first] = theirs;
  }
}

// As fold_block wants it: in shared memory an array of each field. All fields, those of what is not finite too.
struct Part : Sample {
  __device__ static Part neutral() { return {Sample::neutral()}; }
  __device__ static Part load(const double* shared, int slots, int slot) {
    return {Sample::load(shared + slot, slots)};
  }
  __device__ void store(double* shared, int slots, int slot) const { Sample::store(shared + slot, slots); }
};

// One block per state: its channels folded in a fixed order.
__global__ void __launch_bounds__(kThreads) totals_kernel(const State* states, int64_t* out) {
  HOOKSTATS_DYNAMIC_SHARED(shared);
  const int thread = threadIdx.x;
  const State& state = states[blockIdx.x];
  const int64_t channels = state.channels, stride = state.row_stride;
  const double* moments = state.moments;
  Part part = Part::neutral();
  for (int64_t c = thread; c < channels; c += kThreads) part.merge(Sample::load_state(moments + c, stride));
  part.store(shared, kThreads, thread);
  __syncthreads();
  fold_block<Part, 1>(shared, Geometry{1, kThreads, false}, thread);
  int64_t* words = out + int64_t(blockIdx.x) * kTotalsWords;
  if (thread == 0) Part::load(shared, kThreads, 0).store_state(reinterpret_cast<double*>(words), 1);
  if (thread < kCounters) words[kFields + thread] = state.counters[thread];
}

}  // namespace

const char* merge(const State& into, const State& from, const Launch& to) {
  const int64_t bins = from.kind == HistogramKind::none ? 0 : from.all_bins();
  const bool fold = into.channels != from.channels;
  const int64_t items = from.channels > bins ? from.channels : bins;
  const int64_t blocks = fold ? 1 : (items + kThreads - 1) / kThreads;
  const dim3 grid(unsigned(blocks < kBlocks ? blocks : kBlocks));
  if (const auto error = cudaSetDevice(to.device)) return message(error);
  return message(launch(merge_kernel, grid, dim3(kThreads), fold ? kThreads * WideSums::kBytes : 0,
                        static_cast<cudaStream_t>(to.stream), into, from));
}

const char* totals(const State* states, int64_t count, int64_t* out, const Launch& to) {
  if (const auto error = cudaSetDevice(to.device)) return message(error);
  return message(launch(totals_kernel, dim3(unsigned(count)), dim3(kThreads), kThreads * sizeof(Part),
                        static_cast<cudaStream_t>(to.stream), states, out));
}

}  // namespace hookstats::cuda
