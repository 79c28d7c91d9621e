// One launch folds a tensor into a state.

#include <algorithm>

#include "block.h"

namespace hookstats::cuda {
namespace {

// What to cut the work into. Two blocks run on a multiprocessor: on 132 of them, the number that this was measured on,
// one wave is 264 blocks. A block costs as much as reading 100 KB or so.
constexpr int64_t kWave = 264, kMostWaves = kBlocks / kWave;
constexpr int64_t kBlockBytes = 128 << 10, kFinerBlockBytes = 32 << 10;

struct GridPlace {
  static constexpr bool kMayBeInCluster = true;
  __device__ unsigned group() const { return blockIdx.x; }
  __device__ unsigned part() const { return blockIdx.y; }
};

// gridDim.x: groups of channels; gridDim.y: parts of their elements.
template <class scalar_t, int kPack, int kPlaces, template <class> class Walker, HistogramKind kind, int kFlight>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<scalar_t, kind, (kPack > kPlaces)>)
    accumulate_kernel(const scalar_t* data, const Job job, const Launch launch) {
  run_block<scalar_t, kPack, kPlaces, Walker, kind, kFlight>(data, job, launch, GridPlace{});
}

template <class scalar_t, int kPack, int kPlaces, template <class> class Walker>
cudaError_t launch_accumulate(const void* data, const Job& job, const Launch& to, int shared_memory) {
  return with_kind(job.state.kind, [&](auto kind) {
    constexpr HistogramKind k = decltype(kind)::value;
    return with_flight<scalar_t, kPack, kPlaces, Walker, k>(shared_memory, [&](auto flight) {
      constexpr int kFlight = decltype(flight)::value;
      const auto kernel = accumulate_kernel<scalar_t, kPack, kPlaces, Walker, k, kFlight>;
      const dim3 grid(job.groups, job.parts), block(kThreads);
      constexpr int kBytes = Shared<scalar_t, kPack, kPlaces, Walker, k, kFlight>::kBytes;
      const auto stream = static_cast<cudaStream_t>(to.stream);
      const auto* values = static_cast<const scalar_t*>(data);
      const bool are_few = job.parts > 1 && job.parts <= kMostInCluster;
      if ((small_variant() & k_clusters) && are_few && has_clusters(kernel, to.device)) {
        Job in_cluster = job;
        in_cluster.in_cluster = true;
        return launch_clusters(kernel, grid, block, kBytes, stream, values, in_cluster, to);
      }
      return launch(kernel, grid, block, kBytes, stream, values, job, to);
    });
  });
}

// As few waves of blocks as fill a GPU to nine tenths; but every part has something to read.
int64_t parts_of(const Job& job, int64_t bytes) {
  const int64_t groups = job.groups, useful = divide_up(divide_up(bytes, kBlockBytes), groups);
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
  if ((small_variant() & k_finer) && parts <= int64_t(kMostInCluster)) {
    const int64_t finer = divide_up(divide_up(bytes, kFinerBlockBytes), groups), fit = kWave / groups;
    parts = std::max(parts, std::min({finer, fit, int64_t(kMostInCluster)}));
  }
  return parts;
}

template <class scalar_t>
cudaError_t accumulate_as(const Input& input, const State& state, const Launch& to) {
  constexpr int kPack = kPackOf<scalar_t>;
  Layout layout = input.layout;
  const int most = shared_memory(to.device);
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
  cut(job, parts_of(job, layout.count * layout.channels * (packed && !rows ? kPack : 1) * int64_t(sizeof(scalar_t))));

  const bool listed = layout.row_dims > 0;
  if (packed && rows && listed) {
    return launch_accumulate<scalar_t, kPack, kPack, ListedWalker>(input.data, job, to, most);
  }
  if (packed && rows && !aligned) {
    return launch_accumulate<scalar_t, kPack, kPack, UnalignedLineWalker>(input.data, job, to, most);
  }
  if (packed && !aligned) {
    return launch_accumulate<scalar_t, kPack, 1, UnalignedNearWalker>(input.data, job, to, most);
  }
  if (packed && listed) return launch_accumulate<scalar_t, kPack, 1, ListedWalker>(input.data, job, to, most);
  if (packed && rows) return launch_accumulate<scalar_t, kPack, kPack, LineWalker>(input.data, job, to, most);
  if (packed && layout.ndim <= 1) return launch_accumulate<scalar_t, kPack, 1, LineWalker>(input.data, job, to, most);
  if (packed) return launch_accumulate<scalar_t, kPack, 1, NearWalker>(input.data, job, to, most);
  if (near && !listed) return launch_accumulate<scalar_t, 1, 1, NearWalker>(input.data, job, to, most);
  return launch_accumulate<scalar_t, 1, 1, FarWalker>(input.data, job, to, most);
}

}  // namespace

unsigned long long capture_on(void* stream) {
  if (!stream) return 0;  // the default stream cannot be captured
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  if (message(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &number))) return 0;
  return status == cudaStreamCaptureStatusNone ? 0 : number + 1;
}

bool is_capturing(void* stream) { return capture_on(stream) != 0; }

const char* ask(Versions& versions, int device) {
  int major = 0, minor = 0;
  for (const cudaError_t error : {cudaRuntimeGetVersion(&versions.runtime), cudaDriverGetVersion(&versions.driver),
                                  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                                  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)}) {
    if (const char* problem = message(error)) return problem;
  }
  versions.capability = 10 * major + minor;
  return nullptr;
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
