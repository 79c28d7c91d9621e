// One launch folds a tensor into a state. Each dtype is a unit of its own (accumulate_float32.cu, ...), so that they
// are compiled side by side.
#pragma once

#include <algorithm>

#include "block.h"

namespace hookstats::cuda {

// What to cut the work into. A wave is the blocks that run at a time: 264 on the GPU that this was measured on, which
// has 132 multiprocessors. A block costs as much as reading 100 KB or so.
constexpr int kMostAtOnce = 2;  // blocks of a multiprocessor, where more would fit: none was measured
constexpr int64_t kMostWaves = 4;
constexpr int64_t kBlockBytes = 128 << 10;

struct GridPlace {
  __device__ unsigned group() const { return blockIdx.x; }
  __device__ unsigned part() const { return blockIdx.y; }
};

// gridDim.x: groups of channels; gridDim.y: parts of their elements.
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker, HistogramKind kind, int kFlight>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<scalar_t, kind, (kPack > kPlaces)>)
    accumulate_kernel(const scalar_t* data, const Job job, const Launch launch) {
  run_block<scalar_t, kPack, kPlaces, Walker, kind, kFlight>(data, job, launch, GridPlace{});
}

// As few waves of blocks as fill a GPU to nine tenths; but every part has something to read.
inline int64_t parts_of(const Job& job, int64_t bytes, int64_t wave) {
  const int64_t groups = job.groups, useful = divide_up(divide_up(bytes, kBlockBytes), groups);
  int64_t parts = 1;
  double filled = 0;
  for (int64_t waves = 1; waves <= kMostWaves && waves * wave <= kBlocks && filled < 0.9; ++waves) {
    const int64_t most = waves * wave / groups, candidate = most < useful ? most : useful;
    const double fills = double(groups * candidate) / double(waves * wave);
    if (candidate >= 1 && fills > filled) {
      parts = candidate;
      filled = fills;
    }
  }
  return parts;
}

// `job` is yet to be cut; it reads so many bytes.
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker>
void launch_accumulate(const void* data, Job job, int64_t bytes, const Launch& to) {
  const Facts facts = facts_of(to.device);
  with_kind(job.state.kind, [&](auto kind) {
    constexpr HistogramKind k = decltype(kind)::value;
    with_flight<scalar_t, kPack, kPlaces, Walker, k>(facts.shared_memory, [&](auto flight) {
      constexpr int kFlight = decltype(flight)::value;
      constexpr int kBytes = Shared<scalar_t, kPack, kPlaces, Walker, k, kFlight>::kBytes;
      constexpr auto kernel = accumulate_kernel<scalar_t, kPack, kPlaces, Walker, k, kFlight>;
      const int at_once = std::min(blocks_at_once<kernel>(kThreads, kBytes, to.device), kMostAtOnce);
      cut(job, parts_of(job, bytes, int64_t(facts.multiprocessors) * at_once));
      launch<kernel>(dim3(job.groups, job.parts), kThreads, kBytes, to.stream, static_cast<const scalar_t*>(data), job,
                     to);
    });
  });
}

template <class scalar_t>
void accumulate_as(const Input& input, const State& state, const Launch& to) {
  constexpr int kPack = kPackOf<scalar_t>;
  Layout layout = input.layout;
  const int most = facts_of(to.device).shared_memory;
  auto [rows, packed, aligned, near, rest] = access<scalar_t>(layout, is_aligned(input.data, kPack * sizeof(scalar_t)));
  if (packed && !(rows ? packs_fit<scalar_t, kPack>(state.kind, most) : packs_fit<scalar_t, 1>(state.kind, most))) {
    packed = false;
    rest = 0;
    layout = input.layout;
  }
  // A warp to each channel where channels are short, else the whole block. Where they are in short runs, that lie
  // beside those of other channels, the block has several channels, too.
  const bool short_runs = packed && !aligned && layout.ndim == 2 && layout.inner_size() < 32;
  const int plane_groups = layout.channels > 1 && (short_runs || layout.count < kThreads * 8) ? 32 : kThreads;
  const int places = packed && rows ? kPack : 1;
  Job job = job_of(layout, state, rows, places, plane_groups);
  job.rest = rest;
  // Then a thread's packs lie four rows apart, or a multiple, and all begin at the same byte of a word.
  if (packed && rows && !aligned) job.geometry.groups = job.geometry.groups / 4 * 4;
  const int64_t bytes = layout.count * layout.channels * (packed && !rows ? kPack : 1) * int64_t(sizeof(scalar_t));

  const void* data = input.data;
  const bool listed = layout.row_dims > 0;
  if constexpr (kPack > 1) {
    if (packed && rows && listed) return launch_accumulate<scalar_t, kPack, kPack, ListedWalker>(data, job, bytes, to);
    if (packed && rows && !aligned) {
      return launch_accumulate<scalar_t, kPack, kPack, UnalignedLineWalker>(data, job, bytes, to);
    }
    if (packed && !aligned) return launch_accumulate<scalar_t, kPack, 1, UnalignedNearWalker>(data, job, bytes, to);
    if (packed && listed) return launch_accumulate<scalar_t, kPack, 1, ListedWalker>(data, job, bytes, to);
    if (packed && rows) return launch_accumulate<scalar_t, kPack, kPack, LineWalker>(data, job, bytes, to);
    if (packed && layout.ndim <= 1) return launch_accumulate<scalar_t, kPack, 1, LineWalker>(data, job, bytes, to);
    if (packed) return launch_accumulate<scalar_t, kPack, 1, NearWalker>(data, job, bytes, to);
  }
  if (near && !listed) return launch_accumulate<scalar_t, 1, 1, NearWalker>(data, job, bytes, to);
  return launch_accumulate<scalar_t, 1, 1, FarWalker>(data, job, bytes, to);
}

}  // namespace hookstats::cuda
