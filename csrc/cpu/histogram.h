// Histograms on the CPU. One counter update per value would take longer than everything else together, so values are
// not counted one by one: those of a few tiles become bytes, and each byte that occurs among them is compared with a
// whole register of them at once. They have a dozen exponents or two, so that is a fraction of an instruction per
// value. Included by accumulate.cpp alone, as tile.h.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "tile.h"

namespace hookstats::cpu {

// A bin is one of a pair of bins, which are counted together: per tensor the two signs of an exponent, per channel
// two neighbouring octaves.
constexpr int kPairs = 256;
constexpr uint8_t kNoPair = 255;  // NaN and Inf, whose exponent it is; lanes out of use

// 16-bit counters of kLanes lanes, in the order of Keys; zero between tensors. What was counted lies in pair 0, or in
// low .. high. Values counted one by one are those of a whole tensor, in copies, so that neighbours rarely meet.
struct LaneCounts {
  uint16_t at[kPairs][2][kLanes] = {};
  int low = kPairs, high = -1;
  static constexpr int kCopies = sizeof(uint64_t) / sizeof(uint16_t);
  uint32_t one_by_one[kCopies][2 * kPairs] = {};
  bool any_one_by_one = false;
};

// Two counters of one byte hold so many rows.
constexpr int kNibbleRows = 15;
constexpr uint8_t kFirst = 1, kSecond = 16;

// The bins of values of one or more tiles: a pair, and what the bin's counter is worth. Words are packed by shifts
// alone, so the lanes of a row are not in order: byte b of word w is lane w of vector b.
struct Keys {
  alignas(64) uint8_t pair[kMostRows + kNibbleRows][kLanes];
  alignas(64) uint8_t worth[kMostRows + kNibbleRows][kLanes];
};

// A thread's counters, and the keys of its last tiles, which are counted together when there is no room for the next:
// tiles of short channels have few rows.
struct Counting {
  HistogramKind kind;
  LaneCounts* counts;  // null: nothing is to be counted
  Keys* keys;
  int rows;  // of keys
};

// float32's exponent in byte `b` of each word, 255 for NaN and Inf: exponent_bin() in lanes.
template <class V>
HOOKSTATS_INLINE typename V::bits exponents(const typename V::type& x, int b) {
  const auto bits = bit_copy<typename V::bits>(x);
  if constexpr (sizeof(bits[0]) == 4) {
    return (b < 3 ? bits >> (23 - 8 * b) : bits << 1) & 255u << 8 * b;
  } else {
    const auto wide = bit_copy<typename V::ints>(bits >> 52 & 2047);
    auto exponent = wide - (1023 - 127);
    exponent = exponent < 0 ? typename V::ints{} : exponent;
    exponent = exponent > 254 ? typename V::ints{} + 254 : exponent;
    return bit_copy<typename V::bits>(wide == 2047 ? typename V::ints{} + 255 : exponent) << 8 * b;
  }
}

// The lane that lies at `place` of a row of keys.
inline int lane_at(int place, int vector_bytes, int value_bytes) {
  const int piece = place / vector_bytes * vector_bytes, within = place % vector_bytes;
  return piece + within % value_bytes * (vector_bytes / value_bytes) + within / value_bytes;
}

// The pairs of a row are its exponents, of which a negative value counts as the second.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE void row_keys(const scalar_t* row, int width, uint8_t* pair, uint8_t* worth) {
  using acc_t = acc_of<scalar_t>;
  using V = Vector<kBytes, acc_t>;
  constexpr int kBits = 8 * sizeof(acc_t);
  for (int piece = 0; piece < kLanes; piece += kBytes) {
    typename V::bits exponent_bytes{}, sign_bytes{};
    for (int b = 0; b < int(sizeof(acc_t)); ++b) {
      const int lane = piece + b * V::kSize;
      if (lane < width) {
        const auto x = load<V>(row + lane);
        exponent_bytes |= exponents<V>(x, b);
        sign_bytes |= bit_copy<typename V::bits>(x) >> (kBits - 1 - 8 * b) & typename V::bits_t(1) << 8 * b;
      } else {
        exponent_bytes |= (typename V::bits{} + kNoPair) << 8 * b;
      }
    }
    store_vector(pair + piece, exponent_bytes);
    store_vector(worth + piece, (sign_bytes << 4) - sign_bytes + typename V::bits_t(0x0101010101010101));
  }
}

template <int kBytes>
struct Bytes {
  typedef uint8_t type __attribute__((vector_size(kBytes)));
  typedef uint16_t words __attribute__((vector_size(kBytes)));
};

// The lowest and highest pair beside 0 and kNoPair.
template <int kBytes>
HOOKSTATS_INLINE void range_of(const Keys& keys, int rows, int& low, int& high) {
  using B = typename Bytes<kBytes>::type;
  B least = B{} + 255, most{};
  for (int r = 0; r < rows; ++r) {
    for (int lane = 0; lane < kLanes; lane += kBytes) {
      const B pair = load_vector<B>(&keys.pair[r][lane]);
      const B below = pair - 1, above = pair + 1;  // in which 0 and kNoPair are no extremes
      least = below < least ? below : least;
      most = above > most ? above : most;
    }
  }
  low = 255;
  high = 0;
  for (int i = 0; i < kBytes; ++i) low = std::min<int>(low, least[i]);
  for (int i = 0; i < kBytes; ++i) high = std::max<int>(high, most[i]);
  low += 1;
  high -= 1;
}

// Counters of the keys that are counted together: a byte holds as many as these have rows.
struct KeyCounts {
  static_assert(kMostRows <= 255);
  static constexpr int kMost = 96;  // pairs beside pair 0, which comes first
  alignas(64) uint8_t at[1 + kMost][2][kLanes];
};

// Adds the pairs 0 and low .. high of kNibbleRows rows, a register of lanes at a time.
template <int kBytes>
HOOKSTATS_INLINE void count_rows(const Keys& keys, int row, int lane, int low, int high, KeyCounts& counts) {
  using B = typename Bytes<kBytes>::type;
  using Words = typename Bytes<kBytes>::words;
  B pairs[kNibbleRows], worth[kNibbleRows];
  for (int r = 0; r < kNibbleRows; ++r) {
    pairs[r] = load_vector<B>(&keys.pair[row + r][lane]);
    worth[r] = load_vector<B>(&keys.worth[row + r][lane]);
  }
  for (int i = 0; i <= high - low + 1; ++i) {
    const uint8_t wanted = i == 0 ? 0 : low + i - 1;
    const B pair = B{} + wanted;
    B sum{};
    for (int r = 0; r < kNibbleRows; ++r) {
      if constexpr (kBytes == 64) {
        sum = pairs[r] == pair ? sum + worth[r] : sum;
      } else {
        sum += bit_copy<B>(pairs[r] == pair) & worth[r];
      }
    }
    uint8_t *first = &counts.at[i][0][lane], *second = &counts.at[i][1][lane];
    store_vector(first, load_vector<B>(first) + (sum & 15));
    store_vector(second, load_vector<B>(second) + bit_copy<B>(bit_copy<Words>(sum) >> 4 & 0x0f0f));
  }
}

// Counts the keys that wait for it.
template <int kBytes>
HOOKSTATS_INLINE void count_keys(Counting& counting) {
  // Beyond, one by one is faster. Octaves are never so many, but for the narrowest vectors.
  constexpr int kMostPairs = kBytes == 64 ? KeyCounts::kMost : kBytes == 32 ? 48 : 10;
  LaneCounts& counts = *counting.counts;
  Keys& keys = *counting.keys;
  const int rows = std::exchange(counting.rows, 0);
  int low, high;
  range_of<kBytes>(keys, rows, low, high);
  if (high - low >= kMostPairs && counting.kind == HistogramKind::per_tensor) {
    counts.any_one_by_one = true;
    for (int r = 0; r < rows; ++r) {
      alignas(64) uint16_t counter[kLanes];
      for (int i = 0; i < kLanes; ++i) counter[i] = 2 * keys.pair[r][i] + keys.worth[r][i] / kSecond;
      for (int i = 0; i < kLanes; i += LaneCounts::kCopies) {
        const auto four = load_vector<uint64_t>(counter + i);  // a load less for each
        for (int copy = 0; copy < LaneCounts::kCopies; ++copy) {
          ++counts.one_by_one[copy][four >> 16 * copy & 0xffff];
        }
      }
    }
    return;
  }
  counts.low = std::min(counts.low, low);
  counts.high = std::max(counts.high, high);
  const int pairs = std::max(high - low + 1, 0);
  KeyCounts tile;
  std::memset(tile.at, 0, (1 + pairs) * sizeof tile.at[0]);
  const int whole = (rows + kNibbleRows - 1) / kNibbleRows * kNibbleRows;
  std::memset(keys.pair[rows], kNoPair, (whole - rows) * kLanes);
  for (int r = 0; r < whole; r += kNibbleRows) {
    for (int lane = 0; lane < kLanes; lane += kBytes) count_rows<kBytes>(keys, r, lane, low, low + pairs - 1, tile);
  }
  for (int i = 0; i <= pairs; ++i) {
    uint16_t (*to)[kLanes] = counts.at[i == 0 ? 0 : low + i - 1];
    for (int second = 0; second < 2; ++second) {
      for (int lane = 0; lane < kLanes; ++lane) to[second][lane] += tile.at[i][second][lane];
    }
  }
}

// From exponents to octaves: octave_bin() in lanes.
template <int kBytes>
HOOKSTATS_INLINE void to_octaves(uint8_t* pair, uint8_t* worth) {
  using B = typename Bytes<kBytes>::type;
  using Words = typename Bytes<kBytes>::words;
  constexpr uint8_t kBelow = 127 + kFirstOctave - 1, kMost = kOctaveBins - 1;
  for (int lane = 0; lane < kLanes; lane += kBytes) {
    const B exponent = load_vector<B>(pair + lane);
    B octave = (exponent > kBelow ? exponent : B{} + kBelow) - kBelow;
    octave = octave < kMost ? octave : B{} + kMost;
    const B half = bit_copy<B>(bit_copy<Words>(octave) >> 1 & 0x7f7f);
    store_vector(pair + lane, half | bit_copy<B>(exponent == kNoPair));
    store_vector(worth + lane, bit_copy<B>(bit_copy<Words>(octave & 1) * (kSecond - kFirst)) + kFirst);
  }
}

// The keys of a chunk of a tile, behind those that are there.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE void add_keys(const Tile<scalar_t>& chunk, Counting& counting) {
  for (int r = 0; r < chunk.rows; ++r, ++counting.rows) {
    uint8_t *pair = counting.keys->pair[counting.rows], *worth = counting.keys->worth[counting.rows];
    row_keys<kBytes>(chunk.row(r), chunk.width, pair, worth);
    if (counting.kind == HistogramKind::per_channel) to_octaves<kBytes>(pair, worth);
  }
}

// A thread's own counts, added to the state's when it moves on. Integers: the order does not matter.
class ThreadHistogram {
 public:
  // `plane`: so many neighbouring lanes of a tile are elements of one channel. `count`: count_keys, in the version for
  // these vectors. `value_bytes`: of acc_t. `shared`: other threads may add to the same bins.
  ThreadHistogram(const State& state, int plane, int vector_bytes, void (*count)(Counting&), int value_bytes,
                  bool shared)
      : state_(state.histogram),
        lanes_are_channels_(plane < kLanes),
        shared_(shared),
        count_(count),
        counting_{state.kind, nullptr, nullptr, 0} {
    if (state.kind == HistogramKind::none || state.kind == HistogramKind::linear) return;
    struct Buffer {
      LaneCounts counts;
      Keys keys;
    };
    thread_local std::vector<Buffer> buffer;
    if (buffer.empty()) buffer.resize(1);
    counting_.counts = &buffer[0].counts;
    counting_.keys = &buffer[0].keys;
    for (int place = 0; place < kLanes; ++place) {
      const int lane = lane_at(place, vector_bytes, value_bytes);
      channel_of_[place] = uint8_t(lane / plane % state.channels);  // several lanes may be one channel
    }
  }
  ~ThreadHistogram() { flush(); }

  // The channel of lane 0 from here on.
  void move_to(int64_t channel) {
    if (counting_.kind == HistogramKind::per_channel && channel != channel_) flush();
    channel_ = channel;
  }

  // Where the next tile of `rows` rows is to be counted.
  Counting& counting(int rows) {
    if (rows_ + rows > kMostCounts) flush();
    if (counting_.rows + rows > kMostRows) count_(counting_);
    rows_ += rows;
    return counting_;
  }

 private:
  static constexpr int kMostCounts = 65535;  // of a counter

  void flush() {
    rows_ = 0;
    if (!counting_.counts) return;
    if (counting_.rows) count_(counting_);
    LaneCounts& counts = *counting_.counts;
    add_pair(0, counts.at[0]);
    for (int pair = counts.low; pair <= counts.high; ++pair) add_pair(pair, counts.at[pair]);
    std::memset(counts.at[kNoPair], 0, sizeof counts.at[kNoPair]);
    counts.low = kPairs;
    counts.high = -1;
    if (!counts.any_one_by_one) return;
    for (int pair = 0; pair < kNoPair; ++pair) {
      for (int second = 0; second < 2; ++second) {
        int64_t sum = 0;
        for (const auto& copy : counts.one_by_one) sum += copy[2 * pair + second];
        if (sum) add_to_state(exponent_bin_of(pair, second), sum);
      }
    }
    std::memset(counts.one_by_one, 0, sizeof counts.one_by_one);
    counts.any_one_by_one = false;
  }

  // Negative zeros and subnormals go to bin 0, too.
  static int64_t exponent_bin_of(int pair, int second) { return pair == 0 ? 0 : second << 8 | pair; }

  void add_pair(int pair, uint16_t (*counts)[kLanes]) {
    for (int second = 0; second < 2; ++second) {
      if (lanes_are_channels_ && counting_.kind == HistogramKind::per_channel) {
        for (int i = 0; i < kLanes; ++i) {
          if (counts[second][i])
            add_to_state((channel_ + channel_of_[i]) * kOctaveBins + 2 * pair + second, counts[second][i]);
        }
      } else {
        int sum = 0;
        for (int i = 0; i < kLanes; ++i) sum += counts[second][i];
        if (sum == 0) continue;
        if (counting_.kind == HistogramKind::per_channel) {
          add_to_state(channel_ * kOctaveBins + 2 * pair + second, sum);
        } else {
          add_to_state(exponent_bin_of(pair, second), sum);
        }
      }
    }
    std::memset(counts, 0, 2 * sizeof counts[0]);
  }

  void add_to_state(int64_t bin, int64_t count) {
    if (shared_) {
      __atomic_fetch_add(&state_[bin], count, __ATOMIC_RELAXED);
    } else {
      state_[bin] += count;
    }
  }

  int64_t* state_;
  bool lanes_are_channels_, shared_;
  void (*count_)(Counting&);
  Counting counting_;
  int64_t channel_ = 0;
  int rows_ = 0;
  uint8_t channel_of_[kLanes];
};

}  // namespace hookstats::cpu
