// One tile on the CPU: `rows` x up to 64 values, reduced in vector lanes. Where channels lie side by side a lane is a
// channel; otherwise the lanes are neighbouring elements of one channel. Included by accumulate.cpp alone, whose
// functions are compiled once per instruction set: everything here is inlined into them.
#pragma once

#include <algorithm>
#include <cstring>

#include "../kernels.h"

#define HOOKSTATS_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define HOOKSTATS_F16C
#endif

namespace hookstats::cpu {

constexpr int kLanes = 64;
constexpr int kMostRows = 128;
// How far ahead to prefetch: far, because each line read is followed by a dozen instructions, so that by itself the
// processor has too few reads under way; and into the second level, because rows that lie a power of two apart fall
// into the same few lines of the first.
constexpr int kAheadBytes = 12 << 10, kMostAheadRows = 96;

// A tile in memory: row r begins at `data + at[r]`.
template <class scalar_t>
struct Tile {
  const scalar_t* data;
  const int64_t* at;
  int rows;
  int width;      // lanes in use
  int known = 0;  // rows in `at`: those from `rows` on are read later, and may be prefetched

  const scalar_t* row(int r) const { return data + at[r]; }
};

// kMany lanes of a row that is read later.
template <int kMany, class scalar_t>
HOOKSTATS_INLINE void prefetch(const Tile<scalar_t>& tile, int r, int lane) {
  constexpr int kAhead = std::min(kMostAheadRows, kAheadBytes / int(kLanes * sizeof(scalar_t)));
  if (r + kAhead >= tile.known) return;
  const char* ahead = reinterpret_cast<const char*>(tile.row(r + kAhead) + lane);
  for (int line = 0; line < kMany * int(sizeof(scalar_t)); line += 64) __builtin_prefetch(ahead + line, 0, 2);
}

// kBytes of acc_t: one register of the instruction set that the code is compiled for. A vector that is wider than that
// would be taken apart into scalars by g++ wherever values are compared.
template <int kBytes, class acc_t>
struct Vector {
  using bits_t = std::conditional_t<sizeof(acc_t) == 4, uint32_t, uint64_t>;
  using int_t = std::make_signed_t<bits_t>;
  static constexpr int kSize = kBytes / sizeof(acc_t);
  typedef acc_t type __attribute__((vector_size(kBytes)));
  typedef bits_t bits __attribute__((vector_size(kBytes)));
  typedef int_t ints __attribute__((vector_size(kBytes)));
  typedef double wide __attribute__((vector_size(kBytes)));
};

template <class To, class From>
HOOKSTATS_INLINE To bit_copy(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
template <class V>
HOOKSTATS_INLINE V load_vector(const void* at) {
  V x;
  memcpy(&x, at, sizeof x);
  return x;
}
template <class V>
HOOKSTATS_INLINE void store_vector(void* at, const V& x) {
  memcpy(at, &x, sizeof x);
}

// load<V>(at): the values from `at` on, by the same steps as widen() in kernels.h, in lanes.
template <class V>
HOOKSTATS_INLINE typename V::type load(const float* at) {
  return load_vector<typename V::type>(at);
}
template <class V>
HOOKSTATS_INLINE typename V::type load(const double* at) {
  return load_vector<typename V::type>(at);
}
// g++ makes a dozen instructions of __builtin_convertvector where a loop becomes one, but the other way round on SSE2.
template <class V, class narrow_t>
HOOKSTATS_INLINE typename V::bits load_bits(const narrow_t* at) {
  if constexpr (sizeof(typename V::bits) == 16) {
    typedef narrow_t Narrow __attribute__((vector_size(V::kSize * sizeof(narrow_t))));
    return __builtin_convertvector(load_vector<Narrow>(at), typename V::bits);
  } else {
    typename V::bits_t wide[V::kSize];
    for (int i = 0; i < V::kSize; ++i) wide[i] = at[i];
    return load_vector<typename V::bits>(wide);
  }
}
template <class V>
HOOKSTATS_INLINE typename V::type load(const BFloat16* at) {
  return bit_copy<typename V::type>(load_bits<V>(&at->bits) << 16);
}
template <class V>
HOOKSTATS_INLINE typename V::type widen_float16(typename V::bits wide) {
  const auto scaled = bit_copy<typename V::type>((wide & 0x7fff) << 13) * 5.192296858534828e33f;
  auto bits = bit_copy<typename V::bits>(scaled) | (wide & 0x8000) << 16;
  bits |= ((wide & 0x7c00) == 0x7c00) & 0x7f800000;
  return bit_copy<typename V::type>(bits);
}
// The versions for AVX2 and AVX-512 have an instruction for it (F16C), with the same result.
template <class V>
HOOKSTATS_INLINE typename V::type load(const Float16* at) {
#if defined(HOOKSTATS_F16C)
  if constexpr (sizeof(typename V::type) > 16) {
    typedef uint16_t Narrow __attribute__((vector_size(V::kSize * sizeof(uint16_t))));
    const auto narrow = load_vector<Narrow>(at);
    typename V::type x;
    asm("vcvtph2ps %1, %0" : "=v"(x) : "vm"(narrow));
    return x;
  }
#endif
  return widen_float16<V>(load_bits<V>(&at->bits));
}
template <class V>
HOOKSTATS_INLINE typename V::type load(const Float8e5m2* at) {
  return widen_float16<V>(load_bits<V>(&at->bits) << 8);
}
template <class V>
HOOKSTATS_INLINE typename V::type load(const Float8e4m3fn* at) {
  const auto wide = load_bits<V>(&at->bits);
  const auto scaled = bit_copy<typename V::type>((wide & 0x7f) << 20) * 1.329227995784916e36f;
  auto bits = bit_copy<typename V::bits>(scaled) | (wide & 0x80) << 24;
  bits |= ((wide & 0x7f) == 0x7f) & 0x7fc00000;
  return bit_copy<typename V::type>(bits);
}

template <class V>
HOOKSTATS_INLINE typename V::type magnitude_of(const typename V::type& x) {
  return bit_copy<typename V::type>(bit_copy<typename V::bits>(x) << 1 >> 1);
}

// V::kSize values as float64.
template <class V, class scalar_t>
HOOKSTATS_INLINE typename V::type load_wide(const scalar_t* at) {
  if constexpr (sizeof(acc_of<scalar_t>) == sizeof(double)) {
    return load<V>(at);
  } else {
    const auto narrow = load<Vector<sizeof(typename V::type) / 2, float>>(at);
    if constexpr (sizeof(narrow) == 8) return __builtin_convertvector(narrow, typename V::type);
    double wide[V::kSize];
    for (int i = 0; i < V::kSize; ++i) wide[i] = narrow[i];
    return load_vector<typename V::type>(wide);
  }
}

// Sums in kLanes lanes. Lanes are channels, or elements of one channel, which then share the pivot.
template <class acc_t>
struct LaneSums {
  using count_t = std::make_signed_t<typename Vector<16, acc_t>::bits_t>;
  using Lane = Sums<acc_t, count_t>;
#define HOOKSTATS_LANES(name, type) alignas(64) type name[kLanes];
  HOOKSTATS_SUMS(HOOKSTATS_LANES)
#undef HOOKSTATS_LANES

  HOOKSTATS_INLINE Lane get(int lane) const {
    Lane one;
#define HOOKSTATS_GET(member, type) one.member = member[lane];
    HOOKSTATS_SUMS(HOOKSTATS_GET)
#undef HOOKSTATS_GET
    return one;
  }
  HOOKSTATS_INLINE void set(int lane, const Lane& one) {
#define HOOKSTATS_SET(member, type) member[lane] = one.member;
    HOOKSTATS_SUMS(HOOKSTATS_SET)
#undef HOOKSTATS_SET
  }

  template <class scalar_t>
  HOOKSTATS_INLINE void start(const Tile<scalar_t>& tile, bool one_channel) {
    Lane none = Lane::neutral();
    none.count = tile.rows;
    for (int lane = 0; lane < kLanes; ++lane) set(lane, none);
    const scalar_t* row = tile.row(0);
    for (int lane = 0; lane < tile.width; ++lane) pivot[lane] = widen(row[one_channel ? 0 : lane]);
  }
};

// total += part, in float64.
template <class V>
HOOKSTATS_INLINE void carry(const typename V::type& part, double* total) {
  using acc_t = std::remove_reference_t<decltype(part[0])>;
  constexpr int kPieces = sizeof(double) / sizeof(acc_t);
  typedef std::remove_const_t<acc_t> Piece __attribute__((vector_size(sizeof(part) / kPieces)));
  Piece piece[kPieces];
  memcpy(piece, &part, sizeof part);
  for (int i = 0; i < kPieces; ++i) {
    double* at = total + i * (sizeof(part) / sizeof(double));
    const auto wide = __builtin_convertvector(piece[i], typename V::wide);
    store_vector(at, load_vector<typename V::wide>(at) + wide);
  }
}

// Sums::add in lanes, in the arithmetic of the data.
template <class V>
HOOKSTATS_INLINE void add_vector(const typename V::type& x, const typename V::type& pivot, typename V::type& sum,
                                 typename V::type& square_sum, typename V::type& abs_sum, typename V::type& min,
                                 typename V::type& max, typename V::ints& zeros) {
  const auto deviation = x - pivot;
  sum += deviation;
  square_sum += deviation * deviation;
  abs_sum += magnitude_of<V>(x);
  min = x < min ? x : min;
  max = x > max ? x : max;
  zeros -= x == 0;
}

// kVectors vectors of each row, then a carry.
template <class V, int kVectors, class scalar_t, class acc_t>
HOOKSTATS_INLINE void add_rows(const Tile<scalar_t>& tile, int lane, LaneSums<acc_t>& sums) {
  typename V::type pivot[kVectors], min[kVectors], max[kVectors];
  typename V::type sum[kVectors], square_sum[kVectors], abs_sum[kVectors];
  typename V::ints zeros[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int at = lane + v * V::kSize;
    pivot[v] = load_vector<typename V::type>(&sums.pivot[at]);
    min[v] = load_vector<typename V::type>(&sums.min[at]);
    max[v] = load_vector<typename V::type>(&sums.max[at]);
    zeros[v] = load_vector<typename V::ints>(&sums.zeros[at]);
    sum[v] = square_sum[v] = abs_sum[v] = typename V::type{};
  }
  for (int r = 0; r < tile.rows; ++r) {
    const scalar_t* row = tile.row(r) + lane;
    prefetch<kVectors * V::kSize>(tile, r, lane);
    for (int v = 0; v < kVectors; ++v) {
      const auto x = load<V>(row + v * V::kSize);
      add_vector<V>(x, pivot[v], sum[v], square_sum[v], abs_sum[v], min[v], max[v], zeros[v]);
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int at = lane + v * V::kSize;
    store_vector(&sums.min[at], min[v]);
    store_vector(&sums.max[at], max[v]);
    store_vector(&sums.zeros[at], zeros[v]);
    carry<V>(sum[v], &sums.sum[at]);
    carry<V>(square_sum[v], &sums.square_sum[at]);
    carry<V>(abs_sum[v], &sums.abs_sum[at]);
  }
}

// Adds at most kCarryValues rows in all lanes, `width` rounded up to 16: the caller sees to it that they can be read.
template <int kBytes, class scalar_t, class acc_t>
HOOKSTATS_INLINE void add_chunk(const Tile<scalar_t>& tile, LaneSums<acc_t>& sums) {
  using V = Vector<kBytes, acc_t>;
  constexpr int kVectors = kBytes == 64 ? 4 : 2;  // at a time: their sums fill the registers
  int lane = 0;
  for (; lane + kVectors * V::kSize <= tile.width; lane += kVectors * V::kSize) {
    add_rows<V, kVectors>(tile, lane, sums);
  }
  for (; lane < tile.width; lane += V::kSize) add_rows<V, 1>(tile, lane, sums);
}

// Rows whose width is not whole vectors, copied to where it is, with NaN behind: no bin counts it.
template <class scalar_t>
struct PaddedRows {
  alignas(64) scalar_t values[kCarryValues * kLanes];
  int64_t at[kCarryValues];

  HOOKSTATS_INLINE Tile<scalar_t> of(const Tile<scalar_t>& tile) {
    const int padded = (tile.width + 15) / 16 * 16;
    for (int r = 0; r < tile.rows; ++r) {
      at[r] = r * padded;
      std::memcpy(values + at[r], tile.row(r), tile.width * sizeof(scalar_t));
      std::memset(static_cast<void*>(values + at[r] + tile.width), 255, (padded - tile.width) * sizeof(scalar_t));
    }
    return {values, at, tile.rows, tile.width};
  }
};

}  // namespace hookstats::cpu
