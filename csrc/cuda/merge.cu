// One launch merges a state into another, or its channels into a state of one channel; or it takes the totals of many
// states.

#include "fold.h"

namespace hookstats::cuda {
namespace {

// Numbers first .. end - 1 of what `load` gives together, folded in a fixed order by one block: known to thread 0.
template <class Load>
__device__ Sample fold_samples(int64_t first, int64_t end, double* shared, int thread, const Load& load) {
  Sample part = Sample::neutral();
  for (int64_t i = first + thread; i < end; i += kThreads) part.merge(load(i));
  store_slot(part, shared, kThreads, thread);
  __syncthreads();
  fold_block<Sample, 1>(shared, Geometry{1, kThreads, false}, thread);
  return load_slot<Sample>(shared, kThreads, 0);
}
__device__ Sample fold_channels(const State& state, int64_t first, int64_t end, double* shared, int thread) {
  return fold_samples(first, end, shared, thread,
                      [&](int64_t c) { return load_state<Sample>(state.moments + c, state.row_stride); });
}

// What one block of a launch that takes totals reads. A thread merges its channels one after the other, each of which
// waits for the one before and a division: 16 of them at most, unless there are more than kMostShares blocks' worth.
constexpr int64_t kShareChannels = 16 * kThreads, kMostShares = 4096;
struct TotalsShare {
  int64_t channels;  // in each of the state's shares
  int64_t scratch;   // where the state's begins: the word in which blocks arrive, then [fields, shares]
  unsigned state, number, shares;
};

// One thread per channel and histogram bin. Into a state of one channel: one block.
__global__ void __launch_bounds__(kThreads) merge_kernel(const State into, const State from) {
  HOOKSTATS_DYNAMIC_SHARED(shared);
  const bool fold = into.channels != from.channels;
  const int thread = threadIdx.x;
  const int64_t first = int64_t(blockIdx.x) * kThreads + thread;
  const int64_t step = int64_t(gridDim.x) * kThreads;

  if (fold) {
    const Sample total = fold_channels(from, 0, from.channels, shared, thread);
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

// One block per state, or per share of one that is large: the last one of these to arrive folds their parts.
__global__ void __launch_bounds__(kThreads)
    totals_kernel(const State* states, const TotalsShare* all, int64_t* scratch, int64_t* out) {
  HOOKSTATS_DYNAMIC_SHARED(shared);
  HOOKSTATS_SHARED(Arrival, says, 1);
  const int thread = threadIdx.x;
  const TotalsShare& share = all[blockIdx.x];
  const State& state = states[share.state];
  const int64_t first = share.number * share.channels, end = first + share.channels;
  Sample total = fold_channels(state, first, end < state.channels ? end : state.channels, shared, thread);
  if (share.shares > 1) {
    const int64_t shares = share.shares;
    auto* word = reinterpret_cast<unsigned*>(scratch + share.scratch);
    auto* parts = reinterpret_cast<double*>(scratch + share.scratch + 1);
    if (thread == 0) {
      store_slot(total, parts, shares, int64_t(share.number));
      says[0] = arrive(word, share.shares, true);
    }
    __syncthreads();
    if (says[0] == Arrival::early) return;
    total = fold_samples(0, shares, shared, thread, [&](int64_t i) {
      Sample part;
      const double* at = parts + i;
      Sample::each(part, [&](double& member) {
        member = load_fresh(at);
        at += shares;
      });
      return part;
    });
  }
  int64_t* words = out + share.state * kTotalsWords;
  if (thread == 0) store_state(total, reinterpret_cast<double*>(words), 1);
  if (thread < kCounters) words[kFields + thread] = state.counters[thread];
}

}  // namespace

void merge(const State& into, const State& from, const Launch& to) {
  const int64_t bins = from.kind == HistogramKind::none ? 0 : from.all_bins();
  const bool fold = into.channels != from.channels;
  const int64_t items = from.channels > bins ? from.channels : bins;
  const int64_t blocks = fold ? 1 : (items + kThreads - 1) / kThreads;
  const dim3 grid(unsigned(blocks < kBlocks ? blocks : kBlocks));
  const void* const sites[] = {into.counters, from.counters};
  launch_in_turn(to, sites, 2, [&] {
    launch<merge_kernel>(grid, kThreads, fold ? kThreads * sizeof(Sample) : 0, to.stream, into, from);
  });
}

TotalsPlan plan_totals(const std::vector<State>& states) {
  TotalsPlan plan{int64_t(states.size())};
  std::vector<TotalsShare> shares;
  for (size_t i = 0; i < states.size(); ++i) {
    const int64_t channels = states[i].channels, least = (channels + kMostShares - 1) / kMostShares;
    const int64_t each = least < kShareChannels ? kShareChannels : least, count = (channels + each - 1) / each;
    for (int64_t number = 0; number < count; ++number) {
      shares.push_back({each, plan.scratch, unsigned(i), unsigned(number), unsigned(count)});
    }
    if (count > 1) plan.scratch += 1 + count * int64_t(kFields);
  }
  plan.blocks = int64_t(shares.size());
  append(plan.table, states);
  append(plan.table, shares);
  return plan;
}

void totals(const TotalsPlan& plan, const void* table, int64_t* scratch, int64_t* out, const Launch& to) {
  static_assert(sizeof(Sample) == kFields * sizeof(double) && sizeof(State) % alignof(TotalsShare) == 0);
  const auto* states = static_cast<const State*>(table);
  const auto* shares = reinterpret_cast<const TotalsShare*>(states + plan.states);
  launch_in_turn(to, nullptr, 0, [&] {
    launch<totals_kernel>(dim3(unsigned(plan.blocks)), kThreads, kThreads * sizeof(Sample), to.stream, states, shares,
                          scratch, out);
  });
}

}  // namespace hookstats::cuda
