// Blocks of neighbouring values on the CPU: how far each value lies below the largest of its block (bins.h). Read right
// behind the other statistics, from the cache where the tensor fits there. Values become bytes, their exponents, in
// vector lanes; a block's largest is found among those, and the distances are counted as histogram.h counts.

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "histogram.h"
#include "tile.h"
#include "versions.h"

namespace hookstats::cpu {
namespace {

constexpr int64_t kRunRows = 64;              // of kLanes values, whose keys are made at a time
constexpr int64_t kSerialElements = 1 << 15;  // below, waking threads costs more than it saves
constexpr int kMostBlock = 32;
static_assert(kRunRows <= kMostRows && kMostBlock <= kMostRows && kLanes % kMostBlock == 0);

// In what vectors exponents are gathered: byte b of the words of one are kSize neighbouring values, those of the next b
// follow them. Of bfloat16 the words are its own bits: half as many vectors, but none longer than two blocks.
template <int kBytes, class scalar_t>
struct Gathered {
  static constexpr bool kNarrow = std::is_same_v<scalar_t, BFloat16>;
  static constexpr int kVector = kNarrow && kBytes > 32 ? 32 : kBytes;
  using word_t = std::conditional_t<kNarrow, uint16_t, typename Vector<kBytes, acc_of<scalar_t>>::bits_t>;
  static constexpr int kWord = sizeof(word_t), kSize = kVector / kWord;
  typedef word_t words __attribute__((vector_size(kVector)));
};

// kLanes values that are used later: as in tile.h, and of rows that lie apart a few runs.
template <class scalar_t>
HOOKSTATS_INLINE void prefetch(const scalar_t* ahead) {
  for (int line = 0; line < int(kLanes * sizeof(scalar_t)); line += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(ahead) + line, 0, 2);
  }
}

// Of kLanes values, in this order: the exponents of |x| and of the next smaller one.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE void exponents_of(const scalar_t* row, uint8_t* largest, uint8_t* below) {
  using G = Gathered<kBytes, scalar_t>;
  using word_t = typename G::word_t;
  for (int piece = 0; piece < kLanes; piece += G::kVector) {
    typename G::words tops{}, belows{};
    for (int b = 0; b < G::kWord; ++b) {
      const scalar_t* from = row + piece + b * G::kSize;
      if constexpr (G::kNarrow) {
        const auto magnitude = load_vector<typename G::words>(from) & 0x7fff, next = magnitude - 1;
        tops |= b == 0 ? magnitude >> 7 : magnitude << 1 & 0xff00;
        belows |= b == 0 ? next >> 7 & 0xff : next << 1 & 0xff00;
      } else {
        using V = Vector<kBytes, acc_of<scalar_t>>;
        const auto magnitude = bit_copy<typename V::bits>(load<V>(from)) & word_t(word_t(~word_t(0)) >> 1);
        tops |= exponents<V>(bit_copy<typename V::type>(magnitude), b);
        belows |= exponents<V>(bit_copy<typename V::type>(magnitude - 1), b);
      }
    }
    store_vector(largest + piece, tops);
    store_vector(below + piece, belows);
  }
}

// distance_bin() in lanes, of which two neighbouring ones are a pair; no pair in blocks that are not finite.
template <int kBytes>
HOOKSTATS_INLINE void store_distances(const typename Bytes<kBytes>::type& largest, const uint8_t* below, uint8_t* pair,
                                      uint8_t* worth) {
  using B = typename Bytes<kBytes>::type;
  using Words = typename Bytes<kBytes>::words;
  const B next = load_vector<B>(below), distance = largest - next, most = B{} + (kDistanceBins - 2);
  B bin = (distance < most ? distance : most) + 1;
  bin = next == 255 ? B{} : bin;
  const B half = bit_copy<B>(bit_copy<Words>(bin) >> 1 & 0x7f7f);
  store_vector(pair, largest == 255 ? B{} + kNoPair : half);
  store_vector(worth, bit_copy<B>(bit_copy<Words>(bin & 1) * (kSecond - kFirst)) + kFirst);
}

// Lanes out of use are in no pair.
inline void leave_out(uint8_t* pairs, int width, int vector_bytes, int value_bytes) {
  for (int place = 0; place < kLanes; ++place) {
    if (lane_at(place, vector_bytes, value_bytes) >= width) pairs[place] = kNoPair;
  }
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint16_t Halves16 __attribute__((vector_size(16)));
typedef uint32_t Words16 __attribute__((vector_size(16)));
typedef uint64_t Longs16 __attribute__((vector_size(16)));

template <class B>
HOOKSTATS_INLINE B larger(const B& a, const B& b) {
  return a > b ? a : b;
}
// Of the halves of a vector, byte by byte, until 16 bytes are left.
template <int kBytes>
HOOKSTATS_INLINE Bytes16 larger_halves(const typename Bytes<kBytes>::type& x) {
  if constexpr (kBytes == 16) {
    return x;
  } else {
    struct Both {
      typename Bytes<kBytes / 2>::type half[2];
    };
    const auto both = bit_copy<Both>(x);
    return larger_halves<kBytes / 2>(larger(both.half[0], both.half[1]));
  }
}
// Each byte becomes the largest of its `together`, 1, 2, 4 or 8 in a row.
HOOKSTATS_INLINE Bytes16 largest_together(Bytes16 x, int together) {
  if (together >= 2) x = larger(x, bit_copy<Bytes16>(bit_copy<Halves16>(x) << 8 | bit_copy<Halves16>(x) >> 8));
  if (together >= 4) x = larger(x, bit_copy<Bytes16>(bit_copy<Words16>(x) << 16 | bit_copy<Words16>(x) >> 16));
  if (together >= 8) x = larger(x, bit_copy<Bytes16>(bit_copy<Longs16>(x) << 32 | bit_copy<Longs16>(x) >> 32));
  return x;
}

// A row of kLanes values, of which `width` are in use and the others 0: blocks lie side by side. `maxima`: [2][256], of
// neighbouring blocks in turn, which often have the same one.
template <int kBytes, int kBlock, class scalar_t>
HOOKSTATS_INLINE void row_distances(const scalar_t* row, int width, uint8_t* pair, uint8_t* worth, int64_t* maxima) {
  using G = Gathered<kBytes, scalar_t>;
  using B = typename Bytes<G::kVector>::type;
  constexpr int kPieces = kLanes / G::kVector, kPieceBlocks = G::kVector / kBlock;
  alignas(64) uint8_t largest[kLanes], below[kLanes];
  exponents_of<kBytes>(row, largest, below);
  typename G::word_t words[kPieces];  // the largest of all words of a vector, and then of the bytes of a block
  for (int piece = 0; piece < kPieces; ++piece) {
    Bytes16 found = larger_halves<G::kVector>(load_vector<B>(largest + piece * G::kVector));
    const auto longs = bit_copy<Longs16>(found);
    const Longs16 turned = {longs[1], longs[0]};
    found = larger(found, bit_copy<Bytes16>(turned));
    if constexpr (G::kWord <= 4) found = larger(found, bit_copy<Bytes16>(bit_copy<Longs16>(found) >> 32));
    if constexpr (G::kWord <= 2) found = larger(found, bit_copy<Bytes16>(bit_copy<Longs16>(found) >> 16));
    found = largest_together(found, kBlock / G::kSize);
    std::memcpy(&words[piece], &found, sizeof words[piece]);
  }
  if constexpr (kPieceBlocks == 0) {  // a block is two pieces, each of one byte many times
    for (int piece = 0; piece < kPieces; piece += 2) {
      words[piece] = words[piece + 1] = std::max(words[piece], words[piece + 1]);
      if (piece * G::kVector < width) ++maxima[words[piece] & 255];
    }
  } else {
    for (int block = 0; block < kLanes / kBlock; ++block) {
      const int byte = block % kPieceBlocks * (kBlock / G::kSize);
      if (block * kBlock < width) ++maxima[block % 2 * 256 + (words[block / kPieceBlocks] >> 8 * byte & 255)];
    }
  }
  for (int piece = 0; piece < kPieces; ++piece) {
    const int at = piece * G::kVector;
    const auto all = bit_copy<B>(typename G::words{} + words[piece]);
    store_distances<G::kVector>(all, below + at, pair + at, worth + at);
  }
  if (width < kLanes) leave_out(pair, width, G::kVector, G::kWord);
}

// `rows` of one block each lane, of which `width` are in use.
template <int kBytes, class scalar_t>
HOOKSTATS_INLINE void lane_distances(const Tile<scalar_t>& tile, Keys& keys, int first, int64_t* maxima) {
  using G = Gathered<kBytes, scalar_t>;
  using B = typename Bytes<kBytes>::type;
  alignas(64) uint8_t largest[kLanes] = {}, here[kLanes], below[kMostBlock][kLanes];
  for (int r = 0; r < tile.rows; ++r) {
    prefetch(tile.row(r) + 4 * kLanes);
    exponents_of<kBytes>(tile.row(r), here, below[r]);
    for (int lane = 0; lane < kLanes; lane += kBytes) {
      store_vector(largest + lane, larger(load_vector<B>(largest + lane), load_vector<B>(here + lane)));
    }
  }
  for (int r = 0; r < tile.rows; ++r) {
    for (int lane = 0; lane < kLanes; lane += kBytes) {
      uint8_t *pair = keys.pair[first + r] + lane, *worth = keys.worth[first + r] + lane;
      store_distances<kBytes>(load_vector<B>(largest + lane), below[r] + lane, pair, worth);
    }
    if (tile.width < kLanes) leave_out(keys.pair[first + r], tile.width, G::kVector, G::kWord);
  }
  for (int place = 0; place < kLanes; ++place) {
    if (lane_at(place, G::kVector, G::kWord) < tile.width) ++maxima[place % 2 * 256 + largest[place]];
  }
}

template <int kBytes, int kBlock, class scalar_t>
HOOKSTATS_INLINE void rows_distances(const Tile<scalar_t>& tile, Counting& counting, int64_t* maxima) {
  for (int r = 0; r < tile.rows; ++r, ++counting.rows) {
    uint8_t *pair = counting.keys->pair[counting.rows], *worth = counting.keys->worth[counting.rows];
    prefetch(tile.row(r) + kAheadBytes / sizeof(scalar_t));
    row_distances<kBytes, kBlock>(tile.row(r), tile.width, pair, worth, maxima);
  }
}

#define HOOKSTATS_VERSION(target, bytes, type)                                                     \
  target void count_rows(const Tile<type>& tile, int block, Counting& counting, int64_t* maxima) { \
    if (block == 16) return rows_distances<bytes, 16>(tile, counting, maxima);                     \
    rows_distances<bytes, 32>(tile, counting, maxima);                                             \
  }                                                                                                \
  target void count_lanes(const Tile<type>& tile, Counting& counting, int64_t* maxima) {           \
    lane_distances<bytes>(tile, *counting.keys, counting.rows, maxima);                            \
    counting.rows += tile.rows;                                                                    \
  }
#define HOOKSTATS_VERSIONS_OF(name, type, aten) HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, type)
HOOKSTATS_DTYPES(HOOKSTATS_VERSIONS_OF)
#undef HOOKSTATS_VERSIONS_OF
#undef HOOKSTATS_VERSION

#define HOOKSTATS_VERSION(target, bytes, type) \
  target int vector_bytes() { return bytes; }  \
  target void count_keys(Counting& counting) { cpu::count_keys<bytes>(counting); }
HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, )
#undef HOOKSTATS_VERSION

// A thread's counters, added to the state at the end.
template <class scalar_t>
class BlockCounts {
 public:
  BlockCounts(const State& distances, int64_t* maxima, int block)
      : histogram_(distances, false, vector_bytes(), count_keys, sizeof(acc_of<scalar_t>), true),
        shared_maxima_(maxima),
        block_(block) {
    for (int r = 0; r < kRunRows; ++r) at_[r] = r * kLanes;
  }
  ~BlockCounts() {
    for (int i = 0; i < 256; ++i) {
      const int64_t sum = maxima_[i] + maxima_[256 + i];
      if (sum) __atomic_fetch_add(&shared_maxima_[i], sum, __ATOMIC_RELAXED);
    }
  }

  // Values that begin a block, of which each following one lies behind the one before.
  void add_run(const scalar_t* data, int64_t count, int64_t stride) {
    while (count > 0) {
      const int64_t n = std::min(count, kRunRows * kLanes);
      const scalar_t* run = data;
      if (stride != 1) {
        for (int64_t i = 0; i < n; ++i) gathered_[i] = data[i * stride];
        run = gathered_;
      }
      const int rows = int(n / kLanes), rest = int(n % kLanes);
      if (rows) add_rows({run, at_, rows, kLanes});
      if (rest) {
        alignas(64) scalar_t last[kLanes] = {};
        std::copy_n(run + rows * kLanes, rest, last);
        add_rows({last, at_, 1, rest});
      }
      data += n * stride;
      count -= n;
    }
  }

  // One block of each channel, of the elements first .. first + rows - 1.
  void add_lanes(const scalar_t* data, const Layout& layout, int64_t first, int rows) {
    int64_t at[kMostBlock];
    for (int r = 0; r < rows; ++r) at[r] = layout.offset(first + r);
    for (int64_t channel = 0; channel < layout.channels; channel += kLanes) {
      const int width = int(std::min<int64_t>(kLanes, layout.channels - channel));
      const scalar_t* from = data + channel * layout.channel_stride;
      Tile<scalar_t> tile{from, at, rows, width};
      if (layout.channel_stride != 1 || width < kLanes) {
        std::fill_n(gathered_, rows * kLanes, scalar_t{});
        for (int r = 0; r < rows; ++r) {
          for (int i = 0; i < width; ++i) gathered_[r * kLanes + i] = from[at[r] + i * layout.channel_stride];
        }
        tile = {gathered_, at_, rows, width};
      }
      count_lanes(tile, histogram_.counting(rows), maxima_);
    }
  }

 private:
  void add_rows(const Tile<scalar_t>& tile) { count_rows(tile, block_, histogram_.counting(tile.rows), maxima_); }

  ThreadHistogram histogram_;
  int64_t* const shared_maxima_;
  const int block_;
  int64_t maxima_[2 * 256] = {};
  int64_t at_[kRunRows];
  alignas(64) scalar_t gathered_[kRunRows * kLanes];
};

template <class scalar_t>
void count_as(const Input& input, const State& state, ParallelFor parallel_for) {
  const auto* data = static_cast<const scalar_t*>(input.data);
  const Layout& matrix = input.matrix;
  const bool along_rows = state.block < 0;
  const int block = along_rows ? -state.block : state.block;
  // Whole blocks that lie one behind the other are one run.
  const bool dense = !along_rows && matrix.row_dims == 0 && matrix.channel_stride == 1 && matrix.ndim <= 1 &&
                     (matrix.ndim == 0 || (matrix.stride[0] == matrix.channels && matrix.channels % block == 0));
  constexpr int64_t kRun = kRunRows * kLanes;
  const int64_t elements = matrix.channels * matrix.count;
  const int64_t units = dense        ? (elements + kRun - 1) / kRun
                        : along_rows ? (matrix.count + block - 1) / block
                                     : matrix.count;
  State distances{};
  distances.histogram = state.histogram + kExponentBins;
  distances.kind = HistogramKind::per_channel;  // whose neighbouring bins are pairs
  distances.channels = 1;
  const auto body = [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    BlockCounts<scalar_t> counts(distances, distances.histogram + kDistanceBins, block);
    if (dense) return counts.add_run(data + begin * kRun, std::min(elements, end * kRun) - begin * kRun, 1);
    for (int64_t unit = begin; unit < end; ++unit) {
      if (along_rows) {
        const int64_t first = unit * block;
        counts.add_lanes(data, matrix, first, int(std::min<int64_t>(block, matrix.count - first)));
      } else {
        counts.add_run(data + matrix.offset(unit), matrix.channels, matrix.channel_stride);
      }
    }
  };
  elements < kSerialElements ? body(0, units) : parallel_for(units, body);
}

}  // namespace

void count_blocks(const Input& input, const State& state, ParallelFor parallel_for) {
  if (input.matrix.channels * input.matrix.count == 0) return;
  with_dtype(input.dtype, [&](auto value) { count_as<decltype(value)>(input, state, parallel_for); });
}

}  // namespace hookstats::cpu
