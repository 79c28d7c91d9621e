// The CPU kernels. A tensor is cut into tasks and tiles by its shape alone, each tile is reduced by vector code and
// merged in tile order, each task in task order: the result does not depend on the number of threads.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <vector>

#include "histogram.h"
#include "linear.h"
#include "reduce.h"
#include "tile.h"
#include "versions.h"

namespace hookstats::cpu {
namespace {

constexpr int64_t kTasks = 64;                // tasks to aim for, whatever the number of threads
constexpr int64_t kSerialElements = 1 << 15;  // below, waking threads costs more than it saves

#define HOOKSTATS_VERSION(target, bytes, type)                                                            \
  target void add_tile(const Tile<type>& tile, LaneSamples& samples, Counting& counting) {                \
    add_tile_in<bytes>(tile, samples, counting);                                                          \
  }                                                                                                       \
  target bool flat_tile(const FlatTile<type>& tile, Counting& counting, WideSums& total, Sample& exact) { \
    return flat_tile_in<bytes>(tile, counting, total, exact);                                             \
  }
#define HOOKSTATS_VERSIONS_OF(name, type, aten) HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, type)
HOOKSTATS_DTYPES(HOOKSTATS_VERSIONS_OF)
#undef HOOKSTATS_VERSIONS_OF
#undef HOOKSTATS_VERSION

#define HOOKSTATS_VERSION(target, bytes, type)                                                                \
  target int vector_bytes() { return bytes; }                                                                 \
  target void count_keys(Counting& counting) { cpu::count_keys<bytes>(counting); }                            \
  target void merge(LaneSamples& into, const LaneSamples& from) { into.merge(from); }                         \
  target void fold(LaneSamples& samples, int width) { samples.fold(width); }                                  \
  target void merge_into_state(const LaneSamples& samples, const State& state, int64_t channel) {             \
    const int width = int(std::min<int64_t>(kLanes, state.channels - channel));                               \
    samples.merge_into_state(state.moments + channel, state.row_stride, width);                               \
  }                                                                                                           \
  target void merge_into_state(const Lanes<WideSums>& sums, const State& state, int64_t channel, int width) { \
    sums.merge_into_state(state.moments + channel, state.row_stride, width);                                  \
  }                                                                                                           \
  target void merge_state(LaneSamples& into, const State& state, int64_t channel) {                           \
    const int width = int(std::min<int64_t>(kLanes, state.channels - channel));                               \
    into.merge_state(state.moments + channel, state.row_stride, width);                                       \
  }
HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, )
#undef HOOKSTATS_VERSION

// How the tiles of a group (a block of channels, or one channel) are shared among tasks.
struct Split {
  int64_t groups, tiles, parts;
  Split(int64_t groups, int64_t tiles)
      : groups(groups), tiles(tiles), parts(std::clamp<int64_t>(kTasks / groups, 1, tiles)) {}
  int64_t begin(int64_t part) const { return tiles * part / parts; }
};

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void serial(int64_t tasks, const std::function<void(int64_t, int64_t)>& body) { body(0, tasks); }

// Samples of the tasks where a group has several; kept between calls, at most 2 * kTasks * sizeof(LaneSamples).
LaneSamples* partials(int64_t count) {
  thread_local std::vector<LaneSamples> buffer;
  if (int64_t(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

// The runs of channel 0 along the innermost dimension, from an element on. Those of planes are short, and the divisions
// of offset() would take as long as the sums of 64 values, so there is none from one image to the next.
class Runs {
 public:
  Runs(const Layout& layout, int64_t element)
      : layout_(layout),
        evenly_(layout.ndim == 2 && layout.row_dims == 0),
        element_(element),
        within_(element % layout.inner_size()),
        at_(layout.offset(element)) {}
  int64_t at() const { return at_; }
  int64_t size() const { return layout_.inner_size() - within_; }
  // To the next one, which there must be.
  void move_on() {
    element_ += size();
    at_ = evenly_ ? at_ - within_ * layout_.inner_stride() + layout_.stride[0] : layout_.offset(element_);
    within_ = 0;
  }

 private:
  const Layout& layout_;
  bool evenly_;
  int64_t element_, within_, at_;
};

// Of the elements first .. first + n - 1 of channel 0.
void offsets(const Layout& layout, int64_t first, int n, int64_t* at) {
  if (layout.row_dims == 1 && layout.ndim == 1) {  // as below, without its divisions
    for (int i = 0; i < n; ++i) at[i] = layout.row_index[first + i] * layout.stride[0];
    return;
  }
  Runs runs(layout, first);
  for (int i = 0;; runs.move_on()) {
    const int run = int(std::min<int64_t>(n - i, runs.size()));
    for (int j = 0; j < run; ++j) at[i + j] = runs.at() + j * layout.inner_stride();
    if ((i += run) == n) return;
  }
}

// `plane` neighbouring lanes are a channel, in order, and the channels perhaps there several times: see
// accumulate_rows.
template <class scalar_t>
void accumulate_lanes(const Input& input, int plane, const State& state, ParallelFor parallel_for) {
  const Layout& layout = input.layout;
  const auto* data = static_cast<const scalar_t*>(input.data);
  const Split split(divide_up(layout.channels, kLanes), divide_up(layout.count, kMostRows));
  LaneSamples* parts = split.parts > 1 ? partials(split.groups * split.parts) : nullptr;
  const bool shared = split.parts > 1 || (state.kind == HistogramKind::per_tensor && parallel_for != serial);
  const auto add_to_state = [&](LaneSamples& samples, int64_t group) {
    const int64_t first = group * kLanes;
    if (layout.channels == state.channels) return merge_into_state(samples, state, first);
    fold(samples, plane);
    for (int64_t lane = first; lane < std::min(first + kLanes, layout.channels); lane += plane) {
      double* const column = state.moments + lane / plane % state.channels;
      hookstats::merge_into_state(samples.get(int(lane - first)), column, state.row_stride);
    }
  };

  parallel_for(split.groups * split.parts, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    int64_t at[kMostRows + kMostAheadRows];
    LaneSamples own;
    ThreadHistogram histogram(state, plane, vector_bytes(), count_keys, sizeof(acc_of<scalar_t>), shared);
    LinearHistogram linear(state, plane);
    for (int64_t task = begin; task < end; ++task) {
      // In this order threads share rows, not columns, and read whole pages.
      const int64_t group = task % split.groups, part = task / split.groups, lane = group * kLanes;
      const int64_t end_of_part = std::min(layout.count, split.begin(part + 1) * kMostRows);
      LaneSamples& samples = parts ? parts[task] : own;
      samples.clear();
      histogram.move_to(lane / plane);
      linear.move_to(lane / plane);
      Tile<scalar_t> tile{data + lane, at, 0, int(std::min<int64_t>(kLanes, layout.channels - lane))};
      for (int64_t first = split.begin(part) * kMostRows; first < end_of_part; first += kMostRows) {
        tile.rows = int(std::min<int64_t>(kMostRows, end_of_part - first));
        tile.known = int(std::min<int64_t>(kMostRows + kMostAheadRows, end_of_part - first));
        offsets(layout, first, tile.known, at);
        add_tile(tile, samples, histogram.counting(tile.rows));
        linear.add(tile);
      }
      if (!parts) add_to_state(samples, group);
    }
  });
  if (!parts) return;
  KeepSubnormals keep;
  for (int64_t group = 0; group < split.groups; ++group) {
    for (int64_t part = 1; part < split.parts; ++part) merge(parts[group], parts[part * split.groups + group]);
    add_to_state(parts[group], group);
  }
}

// Where rows lie one behind the other and are short, several of them are one row of the lanes.
template <class scalar_t>
void accumulate_rows(const Input& input, const State& state, ParallelFor parallel_for) {
  const Layout& layout = input.layout;
  const bool dense = layout.ndim == 1 && layout.row_dims == 0 && layout.stride[0] == layout.channels;
  const int64_t fold = dense ? std::clamp<int64_t>(kLanes / layout.channels, 1, layout.count) : 1;
  Input folded = input, rest = input;
  folded.layout.channels *= fold;
  folded.layout.stride[0] *= fold;
  folded.layout.count = folded.layout.size[0] = layout.count / fold;
  rest.layout.count = rest.layout.size[0] = layout.count % fold;
  rest.data = static_cast<const scalar_t*>(input.data) + (layout.count - rest.layout.count) * layout.channels;
  if (fold == 1) return accumulate_lanes<scalar_t>(input, 1, state, parallel_for);
  accumulate_lanes<scalar_t>(folded, 1, state, parallel_for);
  if (rest.layout.count) accumulate_lanes<scalar_t>(rest, 1, state, parallel_for);
}

// The elements of one channel in an order of their own, as tiles of rows of kLanes neighbours: in place where there are
// that many side by side, the rest gathered in a buffer.
template <class scalar_t>
class FlatTiles {
 public:
  FlatTiles(ThreadHistogram& histogram, LinearHistogram& linear) : histogram_(histogram), linear_(linear) {
    for (int r = 0; r < kMostRows; ++r) gathered_at_[r] = r * kLanes;
  }

  // Reads the elements first .. last - 1. Returns whether they were one tile whose sums() hold; else sample() is
  // theirs.
  bool read(const scalar_t* channel, const Layout& layout, int64_t first, int64_t last) {
    const int64_t stride = layout.inner_stride();
    // Then what is read next are other channels, of which a tile knows too little.
    const bool is_short = layout.ndim == 1 && layout.count == layout.channel_stride &&
                          layout.count * int64_t(sizeof(scalar_t)) <= kAheadBytes;
    sample_ = Sample::neutral();
    tiles_ = 0;
    holds_ = false;
    channel_ = channel;
    first_rows_ = 0;
    const scalar_t* rest = buffer_;
    for (Runs runs(layout, first); first < last;) {
      int64_t from = runs.at(), left = std::min(last - first, runs.size());
      first += left;
      if (stride == 1) {
        if (is_short) prefetch_later(channel + from, int(left));
        for (; left >= kLanes; left -= kLanes, from += kLanes) {
          if (first_rows_ < kMostAheadRows) first_at_[first_rows_++] = from;
          at_[rows_++] = from;
          if (rows_ == kMostRows + kMostAheadRows) add_rows(rows_);
        }
        if (first == last && left > 0 && gathered_ == 0) {  // in place, too
          rest = channel + from;
          gathered_ = int(left);
          left = 0;
        }
      }
      while (left > 0) {
        const int n = int(std::min<int64_t>(left, kMostRows * kLanes - gathered_));
        if (stride == 1) {
          std::memcpy(buffer_ + gathered_, channel + from, n * sizeof(scalar_t));
        } else {
          for (int i = 0; i < n; ++i) buffer_[gathered_ + i] = channel[from + i * stride];
        }
        gathered_ += n;
        left -= n;
        from += n * stride;
        if (gathered_ == kMostRows * kLanes) add_gathered();
      }
      if (first < last) runs.move_on();
    }
    int known = rows_;  // and then, most likely, the same rows of the next channel
    for (int r = 0; r < first_rows_ && known < kMostRows + kMostAheadRows; ++r) {
      at_[known++] = first_at_[r] + layout.channel_stride;
    }
    for (; rows_ >= kMostRows || (rows_ > 0 && gathered_ >= kLanes); known -= kMostRows) add_rows(known);
    if (rest == buffer_ && rows_ == 0) {
      add_gathered();
    } else if (rows_ + gathered_ > 0) {
      add({{channel_, at_, rows_, kLanes, known}, rest, gathered_});
      rows_ = gathered_ = 0;
    }
    return is_plain();
  }
  const WideSums& sums() const { return sums_; }
  Sample sample() const { return is_plain() ? finished() : sample_; }

 private:
  static void prefetch_later(const scalar_t* run, int count) {
    const char* later = reinterpret_cast<const char*>(run) + kAheadBytes;
    for (int byte = 0; byte < count * int(sizeof(scalar_t)); byte += 64) __builtin_prefetch(later + byte, 0, 2);
  }
  void add_rows(int known) {
    const int rows = std::min(rows_, kMostRows);
    add({{channel_, at_, rows, kLanes, known}, nullptr, 0});
    rows_ -= rows;
    std::copy_n(at_ + rows, known - rows, at_);
  }
  void add_gathered() {
    const int rows = gathered_ / kLanes;
    if (gathered_) add({{buffer_, gathered_at_, rows, kLanes}, buffer_ + rows * kLanes, gathered_ % kLanes});
    gathered_ = 0;
  }
  void add(const FlatTile<scalar_t>& tile) {
    if (is_plain()) sample_ = finished();  // of the first tile, which is not the only one
    Sample exact;
    holds_ = flat_tile(tile, histogram_.counting(tile.rows.rows + (tile.left > 0)), sums_, exact);
    if (++tiles_ > 1 || !holds_) sample_.merge(holds_ ? finished() : exact);
    linear_.add(tile.rows);
    linear_.add(tile.last_row());
  }

  bool is_plain() const { return tiles_ == 1 && holds_; }  // then sample_ is without it
  Sample finished() const { return sample_of(sums_); }

  ThreadHistogram& histogram_;
  LinearHistogram& linear_;
  Sample sample_;
  WideSums sums_;  // of the last tile
  bool holds_ = false;
  int tiles_ = 0;
  const scalar_t* channel_ = nullptr;
  int rows_ = 0, first_rows_ = 0, gathered_ = 0;
  int64_t at_[kMostRows + kMostAheadRows], first_at_[kMostAheadRows], gathered_at_[kMostRows];
  alignas(64) scalar_t buffer_[kMostRows * kLanes];
};

// Whether planes of less than a row of lanes lie side by side in each of many images, which then are read as rows.
bool planes_are_rows(const Layout& layout) {
  constexpr int64_t kLeastImages = 16;
  const int64_t plane = layout.inner_size();
  return layout.ndim == 2 && layout.row_dims == 0 && layout.size[0] >= kLeastImages && layout.inner_stride() == 1 &&
         layout.channel_stride == plane && plane < kLanes && kLanes % plane == 0;
}

template <class scalar_t>
void accumulate_planes(const Input& input, const State& state, ParallelFor parallel_for) {
  constexpr int64_t kTile = kMostRows * kLanes;
  const Layout& layout = input.layout;
  if (planes_are_rows(layout)) {
    Input rows = input;
    rows.layout.channels *= layout.inner_size();
    rows.layout.channel_stride = rows.layout.ndim = 1;
    rows.layout.count = layout.size[0];
    return accumulate_lanes<scalar_t>(rows, int(layout.inner_size()), state, parallel_for);
  }
  const Split split(layout.channels, divide_up(layout.count, kTile));
  Sample* parts =
      split.parts > 1 ? reinterpret_cast<Sample*>(partials(divide_up(split.groups * split.parts, kLanes))) : nullptr;
  const bool shared = split.parts > 1 || (state.kind == HistogramKind::per_tensor && parallel_for != serial);

  parallel_for(split.groups * split.parts, [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    ThreadHistogram histogram(state, kLanes, vector_bytes(), count_keys, sizeof(acc_of<scalar_t>), shared);
    LinearHistogram linear(state, kLanes);
    FlatTiles<scalar_t> tiles(histogram, linear);
    Lanes<WideSums> finished;
    int64_t first = begin;  // of the channels whose sums wait in `finished`
    const auto finish = [&](int64_t next) {
      if (next > first) merge_into_state(finished, state, first, int(next - first));
      first = next;
    };
    for (int64_t task = begin; task < end; ++task) {
      const int64_t c = task / split.parts, part = task % split.parts;
      const auto* channel = static_cast<const scalar_t*>(input.data) + c * layout.channel_stride;
      histogram.move_to(c);
      linear.move_to(c);
      const bool holds =
          tiles.read(channel, layout, split.begin(part) * kTile, std::min(layout.count, split.begin(part + 1) * kTile));
      if (parts) {
        parts[task] = tiles.sample();
      } else if (holds) {
        finished.set(int(c - first), tiles.sums());
        if (c + 1 - first == kLanes) finish(c + 1);
      } else {
        finish(c);
        hookstats::merge_into_state(tiles.sample(), state.moments + c, state.row_stride);
        first = c + 1;
      }
    }
    if (!parts) finish(end);
  });
  if (!parts) return;
  KeepSubnormals keep;
  for (int64_t c = 0; c < layout.channels; ++c) {
    Sample sum = Sample::neutral();
    for (int64_t part = 0; part < split.parts; ++part) sum.merge(parts[c * split.parts + part]);
    hookstats::merge_into_state(sum, state.moments + c, state.row_stride);
  }
}

std::atomic<int64_t> execution_clock{0};

}  // namespace

void accumulate(const Input& input, const State& state, ParallelFor parallel_for) {
  const Layout& layout = input.layout;
  if (layout.channels * layout.count < kSerialElements) parallel_for = serial;
  const bool rows = layout.channels_are_inner() && layout.channel_stride == 1;
  with_dtype(input.dtype, [&](auto value) {
    using scalar_t = decltype(value);
    rows ? accumulate_rows<scalar_t>(input, state, parallel_for)
         : accumulate_planes<scalar_t>(input, state, parallel_for);
  });
  state.counters[k_calls] += 1;
  if (state.counters[k_first] == 0) state.counters[k_first] = ++execution_clock;
}

// `into` has as many channels as `from`, or one, which then takes all.
void merge(const State& into, const State& from) {
  KeepSubnormals keep;
  const bool fold = into.channels != from.channels;
  for (int64_t c = 0; c < from.channels; ++c) {
    const auto sample = load_state<Sample>(from.moments + c, from.row_stride);
    hookstats::merge_into_state(sample, into.moments + (fold ? 0 : c), into.row_stride);
  }
  into.counters[k_calls] += from.counters[k_calls];
  const int64_t first = from.counters[k_first];
  if (first && (!into.counters[k_first] || first < into.counters[k_first])) into.counters[k_first] = first;
  if (into.kind == HistogramKind::none) return;
  for (int64_t i = 0; i < from.all_bins(); ++i) into.histogram[fold ? i % into.bins : i] += from.histogram[i];
}

void totals(const State* states, int64_t count, int64_t* out, ParallelFor parallel_for) {
  int64_t channels = 0;
  for (int64_t i = 0; i < count; ++i) channels += states[i].channels;
  if (channels < kSerialElements) parallel_for = serial;
  parallel_for(count, [=](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    for (int64_t i = begin; i < end; ++i) {
      const State& state = states[i];
      LaneSamples lanes;
      lanes.clear();
      for (int64_t channel = 0; channel < state.channels; channel += kLanes) merge_state(lanes, state, channel);
      Sample total = Sample::neutral();
      for (int lane = 0; lane < kLanes; ++lane) total.merge(lanes.get(lane));
      int64_t* words = out + i * kTotalsWords;
      store_state(total, reinterpret_cast<double*>(words), 1);
      std::copy_n(state.counters, int(kCounters), words + kFields);
    }
  });
}

}  // namespace hookstats::cpu
