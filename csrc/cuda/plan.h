// How the work on a tensor is cut into blocks: by its shape, and by how many of them the GPU runs at a time.
//
// The work is a grid: groups of channels x parts of their elements.
#pragma once

#include "fold.h"

namespace hookstats::cuda {

constexpr unsigned kFan = 64;  // parts that one block merges at most; more are merged in two rounds
constexpr int64_t kMostParts = kBlocks;
static_assert(kMostParts <= int64_t(kFan) * kFan);

HOOKSTATS_HD inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One tensor's work, as its blocks see it.
struct Job {
  Layout layout;  // its elements are packs
  State state;
  Geometry geometry;
  unsigned groups, parts;
  int64_t share;          // packs of a channel in one part
  int64_t first_partial;  // in the launch's scratch: [parts, kMoments, channels]
  int64_t first_arrival;  // [groups, words]
  unsigned words;
  int rest = 0;  // as in Access

  int64_t partials() const { return parts > 1 ? parts * kMoments * layout.channels : 0; }
  int64_t arrivals() const { return parts > 1 ? int64_t(groups) * words : 0; }
};

// The kernel that can read a tensor.
struct Access {
  bool rows;     // neighbouring channels lie closer than neighbouring elements of one
  bool packed;   // in packs of kPackOf elements
  bool aligned;  // these lie at whole packs
  bool near;     // in at most two dimensions beside the channels
  int rest;      // of each run of a channel's elements, behind its last pack
};

// Of one byte, values are read one by one.
template <class scalar_t>
constexpr int kPackOf = sizeof(scalar_t) == 8   ? 2
                        : sizeof(scalar_t) == 1 ? 1
                                                : 4;

// Whether an address can be read in packs.
inline bool is_aligned(const void* data, int pack_bytes) { return reinterpret_cast<uintptr_t>(data) % pack_bytes == 0; }

// Whether NearWalker takes it, which counts within a run in 32 bits, and goes on by less than another run.
inline bool is_near(const Layout& layout) {
  return layout.ndim <= 1 || (layout.ndim == 2 && layout.inner_size() <= INT32_MAX / 2);
}

// Whether ListedWalker takes the rows.
inline bool rows_are_near(const Layout& layout) {
  return layout.row_dims == 1 && layout.stride[0] <= INT32_MAX && layout.stride[1] <= INT32_MAX;
}

// Packs need their elements side by side. They are aligned where every step between them is whole packs; elsewhere all
// packs of a thread have to begin at the same byte of a word. Where packs are of one channel, `layout` becomes one of
// packs.
template <class scalar_t>
Access access(Layout& layout, bool aligned) {
  constexpr int kPack = kPackOf<scalar_t>;
  const auto whole_packs = [](int64_t x) { return x % kPack == 0; };
  const bool rows = layout.channels_are_inner();
  const bool near = is_near(layout), listed = layout.row_dims > 0;
  bool packed = kPack > 1 && near && (listed ? rows_are_near(layout) : layout.ndim <= (rows ? 1 : 2));
  aligned &= whole_packs(rows ? layout.channels : layout.inner_size());
  if (!rows && layout.channels > 1) aligned &= whole_packs(layout.channel_stride);
  for (int d = 0; d < layout.ndim; ++d) aligned &= whole_packs(layout.stride[d]) || (!rows && d == layout.ndim - 1);
  packed &= aligned || !listed;
  if (rows) return {rows, packed && layout.channel_stride == 1, aligned, near, 0};

  const int64_t size = layout.inner_size();
  packed &= layout.inner_stride() == 1 && size >= kPack;
  packed &= layout.ndim < 2 || layout.stride[0] * int64_t(sizeof(scalar_t)) % 4 == 0;
  if (!packed) return {rows, packed, aligned, near, 0};
  layout.count = layout.count / size * (size / kPack);
  layout.size[layout.ndim - 1] /= kPack;
  layout.stride[layout.ndim - 1] = kPack;
  return {rows, packed, aligned, near, int(size % kPack)};
}

// A job of one part. `plane_groups`: threads that share a channel where channels do not lie side by side.
inline Job job_of(const Layout& layout, const State& state, bool rows, int places, int plane_groups) {
  Job job{layout, state, {}, 0, 1, 0, 0, 0, 0};
  Geometry& geometry = job.geometry;
  geometry.lanes_first = rows;
  if (rows) {
    const int64_t lanes = divide_up(layout.channels, places);
    job.groups = unsigned(divide_up(lanes, kBlockChannels / places));
    geometry.lanes = int(divide_up(lanes, job.groups));
    geometry.groups = kThreads / geometry.lanes;
  } else {
    geometry.groups = plane_groups;
    geometry.lanes = kThreads / plane_groups;
    job.groups = unsigned(divide_up(layout.channels, geometry.lanes));
  }
  return job;
}

// Of `count` elements: what one of `parts` reads.
HOOKSTATS_HD inline int64_t share_of(int64_t count, int64_t parts, const Geometry& geometry) {
  const int64_t step = geometry.groups * 4;  // whole groups of packs
  return divide_up(divide_up(count, parts), step) * step;
}

// Cuts the elements into about `parts`, each with something to read.
inline void cut(Job& job, int64_t parts) {
  job.share = share_of(job.layout.count, parts, job.geometry);
  job.parts = unsigned(divide_up(job.layout.count, job.share));
  job.words = unsigned(divide_up(job.parts, kFan)) + 1;
}

}  // namespace hookstats::cuda
