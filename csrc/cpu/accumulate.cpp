// The CPU kernels. A tensor is cut into tasks and tiles by its shape alone, each tile is reduced by vector code and
// merged in tile order, each task in task order: the result does not depend on the number of threads.
//
// Everything runs on tiles of `rows` x kLanes values. Where channels lie side by side a lane is a channel; otherwise
// the lanes are neighbouring elements of one channel and are folded at the end of the tile.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One body, compiled for AVX-512, AVX2 and the baseline, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define HOOKSTATS_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HOOKSTATS_MULTIVERSION
#endif
#define HOOKSTATS_INLINE inline __attribute__((always_inline))

namespace hookstats::cpu {
namespace {

constexpr int kLanes = 64;
constexpr int kTileRows = 128;                // FastTile's limit
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

// Samples of kLanes lanes, field by field so that lanes are vectors.
struct LaneSamples {
  double field[kFields][kLanes];

  void clear() {
    const Sample neutral = Sample::neutral();
    for (int lane = 0; lane < kLanes; ++lane) neutral.store(&field[0][lane], kLanes);
  }
  Sample get(int lane) const { return Sample::load(&field[0][lane], kLanes); }
  void merge(int lane, const Sample& sample) {
    Sample sum = get(lane);
    sum.merge(sample);
    sum.store(&field[0][lane], kLanes);
  }
};

template <class acc_t>
struct LaneSums {
  alignas(64) acc_t shift[kLanes], sum[kLanes], square_sum[kLanes], abs_sum[kLanes], min[kLanes], max[kLanes];
  alignas(64) std::conditional_t<sizeof(acc_t) == 4, int32_t, int64_t> zeros[kLanes];
};

// A tile in memory: row r begins at `data + at[r]`.
template <class scalar_t>
struct Tile {
  const scalar_t* data;
  const int64_t* at;
  int rows;
  int width;  // lanes in use

  const scalar_t* row(int r) const { return data + at[r]; }
};

// FastTile::update in kLanes lanes. `width` is a constant where the tile is full.
template <class scalar_t, class acc_t>
HOOKSTATS_INLINE void add_rows(const Tile<scalar_t>& tile, const int width, LaneSums<acc_t>& sums) {
  for (int r = 0; r < tile.rows; ++r) {
    const scalar_t* row = tile.row(r);
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) {
      const acc_t x = widen(row[lane]);
      const acc_t deviation = x - sums.shift[lane];
      sums.sum[lane] += deviation;
      sums.square_sum[lane] += deviation * deviation;
      sums.abs_sum[lane] += x < 0 ? -x : x;
      sums.min[lane] = x < sums.min[lane] ? x : sums.min[lane];
      sums.max[lane] = x > sums.max[lane] ? x : sums.max[lane];
      sums.zeros[lane] += x == 0;
    }
  }
}

template <class scalar_t, class acc_t>
HOOKSTATS_INLINE void sum_rows(const Tile<scalar_t>& tile, bool one_channel, LaneSums<acc_t>& sums) {
  const scalar_t* first = tile.row(0);
  for (int lane = 0; lane < kLanes; ++lane) {
    const acc_t x = lane < tile.width ? widen(first[one_channel ? 0 : lane]) : 0;
    sums.shift[lane] = sums.min[lane] = sums.max[lane] = x;
    sums.sum[lane] = sums.square_sum[lane] = sums.abs_sum[lane] = 0;
    sums.zeros[lane] = 0;
  }
  if (tile.width == kLanes) {
    add_rows(tile, kLanes, sums);
  } else {
    add_rows(tile, tile.width, sums);
  }
}

// FastTile::finish and Sample::merge in kLanes lanes. Returns which lanes do not hold; those are left out.
template <class acc_t>
HOOKSTATS_INLINE uint64_t merge_lanes(const LaneSums<acc_t>& sums, int rows, int width, LaneSamples& samples) {
  alignas(64) double holds[kLanes];
  const double count = rows;
  auto& field = samples.field;
  double failed = 0;
#pragma omp simd reduction(+ : failed)
  for (int lane = 0; lane < kLanes; ++lane) {
    const double sum = sums.sum[lane], square_sum = sums.square_sum[lane];
    const bool good = sums_hold<acc_t>(count, sum, square_sum, sums.abs_sum[lane], sums.min[lane], sums.max[lane]);
    holds[lane] = good;
    failed += good ? 0 : 1;
  }
  if (failed == 0 && width == kLanes) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const double mean_deviation = sums.sum[lane] / count;
      const double m2 = sums.square_sum[lane] - sums.sum[lane] * mean_deviation;
      merge_moments(field[k_count][lane], field[k_mean][lane], field[k_m2][lane], count,
                    sums.shift[lane] + mean_deviation, m2 > 0 ? m2 : 0);
      const double min = sums.min[lane], max = sums.max[lane];
      field[k_min][lane] = min < field[k_min][lane] ? min : field[k_min][lane];
      field[k_max][lane] = max > field[k_max][lane] ? max : field[k_max][lane];
      field[k_abs_sum][lane] += sums.abs_sum[lane];
      field[k_zeros][lane] += sums.zeros[lane];
    }
    return 0;
  }
  uint64_t again = 0;
  for (int lane = 0; lane < width; ++lane) {
    if (holds[lane] == 0) {
      again |= uint64_t(1) << lane;
      continue;
    }
    FastTile<acc_t> tile(sums.shift[lane]);
    tile.sum = sums.sum[lane];
    tile.square_sum = sums.square_sum[lane];
    tile.abs_sum = sums.abs_sum[lane];
    tile.min = sums.min[lane];
    tile.max = sums.max[lane];
    tile.count = rows;
    tile.zeros = int32_t(sums.zeros[lane]);
    samples.merge(lane, tile.finish());
  }
  return again;
}

// Lanes are channels.
template <class scalar_t>
HOOKSTATS_INLINE void add_tile(const Tile<scalar_t>& tile, LaneSamples& samples) {
  LaneSums<acc_of<scalar_t>> sums;
  sum_rows(tile, false, sums);
  const uint64_t again = merge_lanes(sums, tile.rows, tile.width, samples);
  if (!again) return;
  for (int lane = 0; lane < tile.width; ++lane) {
    if (!(again >> lane & 1)) continue;
    ExactTile exact;
    for (int r = 0; r < tile.rows; ++r) exact.update(widen(tile.row(r)[lane]));
    samples.merge(lane, exact.finish());
  }
}

// Lanes are elements of one channel: their sums share the shift and are added.
template <class scalar_t>
HOOKSTATS_INLINE Sample flat_tile(const Tile<scalar_t>& tile) {
  using acc_t = acc_of<scalar_t>;
  LaneSums<acc_t> sums;
  sum_rows(tile, true, sums);
  FastTile<double> total(sums.shift[0]);
  for (int lane = 0; lane < tile.width; ++lane) {
    total.sum += sums.sum[lane];
    total.square_sum += sums.square_sum[lane];
    total.abs_sum += sums.abs_sum[lane];
    total.min = std::min<double>(total.min, sums.min[lane]);
    total.max = std::max<double>(total.max, sums.max[lane]);
    total.zeros += int32_t(sums.zeros[lane]);
  }
  total.count = tile.rows * tile.width;
  if (sums_hold<acc_t>(total.count, total.sum, total.square_sum, total.abs_sum, total.min, total.max)) {
    return total.finish();
  }
  ExactTile exact;
  for (int r = 0; r < tile.rows; ++r) {
    for (int lane = 0; lane < tile.width; ++lane) exact.update(widen(tile.row(r)[lane]));
  }
  return exact.finish();
}

// target_clones wants plain functions: one pair per dtype.
#define HOOKSTATS_TILES(name, type, aten)                                                     \
  HOOKSTATS_MULTIVERSION void add_tile_clones(const Tile<type>& tile, LaneSamples& samples) { \
    add_tile(tile, samples);                                                                  \
  }                                                                                           \
  HOOKSTATS_MULTIVERSION Sample flat_tile_clones(const Tile<type>& tile) { return flat_tile(tile); }
HOOKSTATS_DTYPES(HOOKSTATS_TILES)
#undef HOOKSTATS_TILES

// A thread's own 32-bit histogram, added to the state's when it moves on. Integers: the order does not matter.
class ThreadHistogram {
 public:
  // `lanes_are_channels`: else the lanes of a tile are elements of one channel.
  ThreadHistogram(const State& state, bool lanes_are_channels)
      : kind_(state.kind), state_(state.histogram), per_lane_(lanes_are_channels ? kOctaveBins : 0) {
    if (kind_ == HistogramKind::per_tensor) used_ = kCopies * kExponentBins;
    if (kind_ == HistogramKind::per_channel) used_ = lanes_are_channels ? kLanes * kOctaveBins : kOctaveBins;
    std::fill_n(counts_, used_, 0u);
  }
  ~ThreadHistogram() { flush(); }

  // The channel of lane 0 from here on.
  void move_to(int64_t channel) {
    if (kind_ != HistogramKind::per_channel) return;
    flush();
    offset_ = channel * kOctaveBins;
  }

  template <class scalar_t>
  void add(const Tile<scalar_t>& tile) {
    if (kind_ == HistogramKind::none) return;
    if (pending_ > kFlushElements) flush();
    pending_ += int64_t(tile.rows) * tile.width;
    for (int r = 0; r < tile.rows; ++r) {
      const scalar_t* row = tile.row(r);
      for (int lane = 0; lane < tile.width; ++lane) {
        const int bin = exponent_bin(widen(row[lane]));
        if (bin == kNoBin) continue;
        if (kind_ == HistogramKind::per_tensor) {
          ++counts_[(lane % kCopies) * kExponentBins + bin];  // copies: a run of equal values does not wait for itself
        } else {
          ++counts_[lane * per_lane_ + octave_bin(bin)];
        }
      }
    }
  }

 private:
  static constexpr int kCopies = kLanes * kOctaveBins / kExponentBins;

  void flush() {
    pending_ = 0;
    const int bins = kind_ == HistogramKind::per_tensor ? kExponentBins : used_;
    for (int i = 0; i < used_; ++i) {
      if (counts_[i]) __atomic_fetch_add(&state_[offset_ + i % bins], int64_t(counts_[i]), __ATOMIC_RELAXED);
      counts_[i] = 0;
    }
  }

  HistogramKind kind_;
  int64_t* state_;
  int per_lane_;
  int used_ = 0;
  int64_t offset_ = 0;
  int64_t pending_ = 0;
  uint32_t counts_[kLanes * kOctaveBins];
};

// How the tiles of a group (a block of channels, or one channel) are shared among tasks.
struct Split {
  int64_t groups, tiles, parts;
  Split(int64_t groups, int64_t tiles)
      : groups(groups), tiles(tiles), parts(std::clamp<int64_t>(kTasks / groups, 1, tiles)) {}
  int64_t begin(int64_t part) const { return tiles * part / parts; }
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Partial samples of the parts, [parts, fields, width of the group] each; kept between calls.
double* partials(int64_t doubles) {
  thread_local std::vector<double> buffer;
  if (int64_t(buffer.size()) < doubles) buffer.resize(doubles);
  return buffer.data();
}

template <class scalar_t>
void accumulate_rows(const Input& input, const State& state, ParallelFor parallel_for) {
  const Layout& layout = input.layout;
  const auto* data = static_cast<const scalar_t*>(input.data);
  const Split split(divide_up(layout.channels, kLanes), divide_up(layout.count, kTileRows));
  double* parts = partials(split.groups * split.parts * kFields * kLanes);

  parallel_for(split.groups * split.parts, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    int64_t at[kTileRows];
    ThreadHistogram histogram(state, true);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / split.parts, part = task % split.parts;
      const int64_t channel = group * kLanes;
      LaneSamples& samples = *reinterpret_cast<LaneSamples*>(parts + task * kFields * kLanes);
      samples.clear();
      histogram.move_to(channel);
      Tile<scalar_t> tile{data, at, 0, int(std::min<int64_t>(kLanes, layout.channels - channel))};
      for (int64_t t = split.begin(part); t < split.begin(part + 1); ++t) {
        const int64_t first = t * kTileRows;
        tile.rows = int(std::min<int64_t>(kTileRows, layout.count - first));
        for (int r = 0; r < tile.rows; ++r) at[r] = channel * layout.channel_stride + layout.offset(first + r);
        add_tile_clones(tile, samples);
        histogram.add(tile);
      }
    }
  });

  for (int64_t c = 0; c < layout.channels; ++c) {
    Sample sum = Sample::neutral();
    for (int64_t part = 0; part < split.parts; ++part) {
      const double* from = parts + ((c / kLanes) * split.parts + part) * kFields * kLanes + c % kLanes;
      sum.merge(Sample::load(from, kLanes));
    }
    sum.merge_into_state(state.moments + c, state.row_stride);
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
  double* parts = partials(split.groups * split.parts * kFields);

  parallel_for(split.groups * split.parts, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    alignas(64) scalar_t buffer[kFlatTile];
    ThreadHistogram histogram(state, false);
    int64_t at[kFlatTile / kLanes];
    for (int r = 0; r < kFlatTile / kLanes; ++r) at[r] = r * kLanes;
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
          sum.merge(flat_tile_clones(tile));
          histogram.add(tile);
        }
      }
      sum.store(parts + task * kFields, 1);
    }
  });

  for (int64_t c = 0; c < layout.channels; ++c) {
    Sample sum = Sample::neutral();
    for (int64_t part = 0; part < split.parts; ++part) {
      sum.merge(Sample::load(parts + (c * split.parts + part) * kFields, 1));
    }
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
  const bool per_channel = into.kind == HistogramKind::per_channel;
  const int64_t bins = per_channel ? from.channels * kOctaveBins : kExponentBins;
  for (int64_t i = 0; i < bins; ++i) {
    into.histogram[per_channel && fold ? i % kOctaveBins : i] += from.histogram[i];
  }
}

}  // namespace hookstats::cpu
