// The CPU kernels. A tensor is cut into tasks and tiles by its shape alone, each tile is reduced by vector code and
// merged in tile order, each task in task order: the result does not depend on the number of threads.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One body, compiled for AVX-512, AVX2 and the baseline, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#if __GNUC__ >= 12
#define HOOKSTATS_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HOOKSTATS_MULTIVERSION __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define HOOKSTATS_MULTIVERSION
#endif

namespace hookstats::cpu {
namespace {

constexpr int kFlatTile = 64 * kLanes;        // elements of one channel in a tile
constexpr int64_t kTasks = 64;                // tasks to aim for, whatever the number of threads
constexpr int64_t kSerialElements = 1 << 15;  // below, waking threads costs more than it saves
constexpr int64_t kFlushElements = 1 << 30;   // of 32-bit histogram counters

// Flush-to-zero would lose subnormals and count them as zeros; a trainer may have set it on this thread.
class KeepSubnormals {
#if defined(__x86_64__)
 public:
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// target_clones wants plain functions.
#define HOOKSTATS_CLONES(name, type, aten)                                                                   \
  HOOKSTATS_MULTIVERSION void add_tile_clones(const Tile<type>& tile, LaneSamples& samples) {                \
    add_tile(tile, samples);                                                                                 \
  }                                                                                                          \
  HOOKSTATS_MULTIVERSION Sample flat_tile_clones(const Tile<type>& tile) { return flat_tile(tile); }         \
  HOOKSTATS_MULTIVERSION void count_tile_clones(const Tile<type>& tile, bool octaves, const int32_t* offset, \
                                                uint32_t* counts) {                                          \
    count_tile(tile, octaves, offset, counts);                                                               \
  }
HOOKSTATS_DTYPES(HOOKSTATS_CLONES)
#undef HOOKSTATS_CLONES

// A thread's own 32-bit histogram, added to the state's when it moves on. Integers: the order does not matter.
class ThreadHistogram {
 public:
  // `lanes_are_channels`: else the lanes of a tile are elements of one channel.
  ThreadHistogram(const State& state, bool lanes_are_channels)
      : state_(state.histogram),
        kind_(state.kind),
        octaves_(kind_ == HistogramKind::per_channel),
        lane_is_channel_(octaves_ && lanes_are_channels),
        stride_(octaves_ ? kOctaveStride : kExponentBins) {
    const int copies = lane_is_channel_ ? kLanes : kCopies;
    for (int lane = 0; lane < kLanes; ++lane) offset_[lane] = lane % copies * stride_;
    used_ = kind_ == HistogramKind::none ? 0 : copies * stride_;
    std::fill_n(counts_, used_, 0u);
  }
  ~ThreadHistogram() { flush(); }

  // The channel of lane 0 from here on.
  void move_to(int64_t channel) {
    if (!octaves_) return;
    flush();
    channel_ = channel;
  }

  template <class scalar_t>
  void add(const Tile<scalar_t>& tile) {
    if (kind_ == HistogramKind::none) return;
    if (pending_ > kFlushElements) flush();
    pending_ += int64_t(tile.rows) * tile.width;
    count_tile_clones(tile, octaves_, offset_, counts_);
  }

 private:
  // Where lanes share a channel, so that a run of equal values does not wait for its own counter.
  static constexpr int kCopies = 8;
  static_assert(kCopies * kExponentBins <= kLanes * kOctaveStride);

  void flush() {
    pending_ = 0;
    for (int i = 0; i < used_; ++i) {
      if (counts_[i] == 0) continue;
      const int lane = i / stride_, bin = i % stride_;
      if (octaves_) {
        const int64_t channel = channel_ + (lane_is_channel_ ? lane : 0);
        if (bin < kOctaveBins) add_to_state(channel * kOctaveBins + bin, counts_[i]);
      } else if ((bin & 255) != 255) {
        add_to_state(bin == 256 ? 0 : bin, counts_[i]);
      }
      counts_[i] = 0;
    }
  }

  void add_to_state(int64_t bin, uint32_t count) { __atomic_fetch_add(&state_[bin], int64_t(count), __ATOMIC_RELAXED); }

  int64_t* state_;
  HistogramKind kind_;
  bool octaves_, lane_is_channel_;
  int stride_, used_;
  int64_t channel_ = 0;
  int64_t pending_ = 0;
  int32_t offset_[kLanes];
  uint32_t counts_[kLanes * kOctaveStride];
};

// How the tiles of a group (a block of channels, or one channel) are shared among tasks.
struct Split {
  int64_t groups, tiles, parts;
  Split(int64_t groups, int64_t tiles)
      : groups(groups), tiles(tiles), parts(std::clamp<int64_t>(kTasks / groups, 1, tiles)) {}
  int64_t begin(int64_t part) const { return tiles * part / parts; }
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Samples of the tasks where a group has several; kept between calls, at most 2 * kTasks * sizeof(LaneSamples).
LaneSamples* partials(int64_t tasks) {
  thread_local std::vector<LaneSamples> buffer;
  if (int64_t(buffer.size()) < tasks) buffer.resize(tasks);
  return buffer.data();
}

template <class scalar_t>
void accumulate_rows(const Input& input, const State& state, ParallelFor parallel_for) {
  const Layout& layout = input.layout;
  const auto* data = static_cast<const scalar_t*>(input.data);
  const Split split(divide_up(layout.channels, kLanes), divide_up(layout.count, kMostRows));
  const auto width_of = [&](int64_t group) { return int(std::min<int64_t>(kLanes, layout.channels - group * kLanes)); };
  const auto merge_into_state = [&](int64_t group, const LaneSamples& samples) {
    for (int lane = 0; lane < width_of(group); ++lane) {
      samples.get(lane).merge_into_state(state.moments + group * kLanes + lane, state.row_stride);
    }
  };
  LaneSamples* parts = split.parts > 1 ? partials(split.groups * split.parts) : nullptr;

  parallel_for(split.groups * split.parts, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    int64_t at[kMostRows];
    PaddedTile<scalar_t> padded;
    LaneSamples own;
    ThreadHistogram histogram(state, true);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / split.parts, part = task % split.parts;
      LaneSamples& samples = parts ? parts[task] : own;
      samples.clear();
      histogram.move_to(group * kLanes);
      Tile<scalar_t> tile{data, at, 0, width_of(group)};
      for (int64_t t = split.begin(part); t < split.begin(part + 1); ++t) {
        const int64_t first = t * kMostRows;
        tile.rows = int(std::min<int64_t>(kMostRows, layout.count - first));
        for (int r = 0; r < tile.rows; ++r) at[r] = group * kLanes + layout.offset(first + r);
        const Tile<scalar_t> readable = tile.width % 16 ? padded.of(tile) : tile;
        add_tile_clones(readable, samples);
        histogram.add(readable);
      }
      if (!parts) merge_into_state(group, samples);
    }
  });
  if (!parts) return;
  for (int64_t group = 0; group < split.groups; ++group) {
    for (int64_t part = 1; part < split.parts; ++part) {
      for (int lane = 0; lane < width_of(group); ++lane) {
        parts[group * split.parts].merge(lane, parts[group * split.parts + part].get(lane));
      }
    }
    merge_into_state(group, parts[group * split.parts]);
  }
}

// The elements first .. first + n - 1 of a channel side by side: in place if they lie so, else gathered.
template <class scalar_t>
const scalar_t* flat(const scalar_t* channel, const Layout& layout, int64_t first, int n, scalar_t* buffer) {
  const int64_t inner = layout.inner_size();
  const bool dense = layout.inner_stride() == 1;
  if (dense && first % inner + n <= inner) return channel + layout.offset(first);
  for (int filled = 0; filled < n;) {
    const int64_t within = (first + filled) % inner;
    const int run = int(std::min<int64_t>(n - filled, inner - within));
    const scalar_t* from = channel + layout.offset(first + filled);
    if (dense) {
      std::memcpy(buffer + filled, from, run * sizeof(scalar_t));
    } else {
      for (int i = 0; i < run; ++i) buffer[filled + i] = from[i * layout.inner_stride()];
    }
    filled += run;
  }
  return buffer;
}

template <class scalar_t>
void accumulate_planes(const Input& input, const State& state, ParallelFor parallel_for) {
  const Layout& layout = input.layout;
  const Split split(layout.channels, divide_up(layout.count, kFlatTile));
  Sample* parts =
      split.parts > 1 ? reinterpret_cast<Sample*>(partials(divide_up(split.groups * split.parts, kLanes))) : nullptr;

  parallel_for(split.groups * split.parts, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    alignas(64) scalar_t buffer[kFlatTile];
    PaddedTile<scalar_t> padded;
    int64_t at[kFlatTile / kLanes];
    for (int r = 0; r < kFlatTile / kLanes; ++r) at[r] = r * kLanes;
    ThreadHistogram histogram(state, false);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t c = task / split.parts, part = task % split.parts;
      const auto* channel = static_cast<const scalar_t*>(input.data) + c * layout.channel_stride;
      Sample sum = Sample::neutral();
      histogram.move_to(c);
      for (int64_t t = split.begin(part); t < split.begin(part + 1); ++t) {
        const int64_t first = t * kFlatTile;
        const int n = int(std::min<int64_t>(kFlatTile, layout.count - first));
        const scalar_t* values = flat(channel, layout, first, n, buffer);
        const Tile<scalar_t> full{values, at, n / kLanes, kLanes};
        const Tile<scalar_t> rest{values + n / kLanes * kLanes, at, 1, n % kLanes};
        for (const auto& tile : {full, rest}) {
          if (tile.rows == 0 || tile.width == 0) continue;
          const Tile<scalar_t> readable = tile.width % 16 ? padded.of(tile) : tile;
          sum.merge(flat_tile_clones(readable));
          histogram.add(readable);
        }
      }
      if (parts) {
        parts[task] = sum;
      } else {
        sum.merge_into_state(state.moments + c, state.row_stride);
      }
    }
  });
  if (!parts) return;
  for (int64_t c = 0; c < layout.channels; ++c) {
    Sample sum = Sample::neutral();
    for (int64_t part = 0; part < split.parts; ++part) sum.merge(parts[c * split.parts + part]);
    sum.merge_into_state(state.moments + c, state.row_stride);
  }
}

std::atomic<int64_t> execution_clock{0};

void serial(int64_t tasks, const std::function<void(int64_t, int64_t)>& body) { body(0, tasks); }

}  // namespace

void accumulate(const Input& input, const State& state, ParallelFor parallel_for) {
  const Layout& layout = input.layout;
  if (layout.channels * layout.count < kSerialElements) parallel_for = serial;
  const bool rows = layout.channels_are_inner() && layout.channel_stride == 1;
  switch (input.dtype) {
#define HOOKSTATS_CASE(name, type, aten)                                                                            \
  case Dtype::name:                                                                                                 \
    rows ? accumulate_rows<type>(input, state, parallel_for) : accumulate_planes<type>(input, state, parallel_for); \
    break;
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
  }
  state.counters[k_calls] += 1;
  if (state.counters[k_first] == 0) state.counters[k_first] = ++execution_clock;
}

// `into` has as many channels as `from`, or one, which then takes all.
void merge(const State& into, const State& from) {
  const bool fold = into.channels != from.channels;
  for (int64_t c = 0; c < from.channels; ++c) {
    const Sample sample = Sample::load_state(from.moments + c, from.row_stride);
    sample.merge_into_state(into.moments + (fold ? 0 : c), into.row_stride);
  }
  into.counters[k_calls] += from.counters[k_calls];
  const int64_t first = from.counters[k_first];
  if (first && (!into.counters[k_first] || first < into.counters[k_first])) into.counters[k_first] = first;
  if (into.kind == HistogramKind::none) return;
  for (int64_t i = 0; i < from.all_bins(); ++i) into.histogram[fold ? i % into.bins : i] += from.histogram[i];
}

}  // namespace hookstats::cpu
