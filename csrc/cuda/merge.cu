// One launch merges a state into another, or its channels into a state of one channel; or it takes the totals of many
// states.

#include "fold.h"

namespace hookstats::cuda {
namespace {

// All channels of a state together, folded in a fixed order by one block: known to thread 0.
__device__ Sample fold_channels(const State& state, double* shared, int thread) {
  Sample part = Sample::neutral();
  for (int64_t c = thread; c < state.channels; c += kThreads) {
    part.merge(load_state<Sample>(state.moments + c, state.row_stride));
  }
  store_slot(part, shared, kThreads, thread);
  __syncthreads();
  fold_block<Sample, 1>(shared, Geometry{1, kThreads, false}, thread);
  return load_slot<Sample>(shared, kThreads, 0);
}

// One thread per channel and histogram bin. Into a state of one channel: one block.
__global__ void __launch_bounds__(kThreads) merge_kernel(const State into, const State from) {
  HOOKSTATS_DYNAMIC_SHARED(shared);
  const bool fold = into.channels != from.channels;
  const int thread = threadIdx.x;
  const int64_t first = int64_t(blockIdx.x) * kThreads + thread;
  const int64_t step = int64_t(gridDim.x) * kThreads;

  if (fold) {
    const Sample total = fold_channels(from, shared, thread);
    if (thread == 0) merge_into_state(total, into.moments, into.row_stride);
  } else {
    for (int64_t c = first; c < from.channels; c += step) {
      merge_into_state(load_state<Sample>(from.moments + c, from.row_stride), into.moments + c, into.row_stride);
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

// One block per state.
__global__ void __launch_bounds__(kThreads) totals_kernel(const State* states, int64_t* out) {
  HOOKSTATS_DYNAMIC_SHARED(shared);
  const int thread = threadIdx.x;
  const State& state = states[blockIdx.x];
  const Sample total = fold_channels(state, shared, thread);
  int64_t* words = out + int64_t(blockIdx.x) * kTotalsWords;
  if (thread == 0) store_state(total, reinterpret_cast<double*>(words), 1);
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
  return message(launch(merge_kernel, grid, dim3(kThreads), fold ? kThreads * sizeof(Sample) : 0,
                        static_cast<cudaStream_t>(to.stream), into, from));
}

const char* totals(const State* states, int64_t count, int64_t* out, const Launch& to) {
  if (const auto error = cudaSetDevice(to.device)) return message(error);
  return message(launch(totals_kernel, dim3(unsigned(count)), dim3(kThreads), kThreads * sizeof(Sample),
                        static_cast<cudaStream_t>(to.stream), states, out));
}

}  // namespace hookstats::cuda
