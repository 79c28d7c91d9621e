// A checksum of a tensor's bits that depends on their order: which values lie where, whatever they mean.
// Host and device code; knows nothing of torch.
#pragma once

#include <cstring>

#include "layout.h"

namespace hookstats {

// The tensor is 8-byte words w_0, w_1, ...: its elements in the order of their indices (row by row, wherever they lie
// in memory), the last word filled up with zeros. Its checksum is the sum of mixed(w_i + place_of(i)) modulo 2^64; of
// no words, 0. Why this one:
//
// - `mixed`, the finalizer of MurmurHash3 (Appleby; shifts by 33 are cheap on 32-bit registers), is one to one, because
//   multiplying by an odd number and folding the upper bits into the lower ones are. So a change inside one word, one
//   flipped bit or two swapped neighbours, always changes the sum.
// - Where several words changed, the sum stays with a chance of 2^-64, as the differences that each of them makes look
//   random: every bit of the input flips every bit of the output with a chance near one half. A linear function, such
//   as a multiply-add of bits and index, lacks that: swapping a and b changes it by (a - b) (i - j) alone, which is 0
//   modulo 2^64 for plain values, whose last bits are zeros, at places that are a power of two apart.
// - Places are apart by an odd number without pattern (2^64 over the golden ratio, as in SplitMix64), so that
//   w_i + place_of(i) = w_j + place_of(j), where the words could change places unseen, is no relation between values of
//   a training, as w_i ^ i = w_j ^ j would be.
// - A sum modulo 2^64 is the same in any order, of threads, blocks and vectors.
//
// It finds what goes wrong by itself; somebody who knows it can make tensors that collide.
constexpr uint64_t kPlaceStep = 0x9e3779b97f4a7c15;

HOOKSTATS_HD_INLINE uint64_t place_of(int64_t word) { return (uint64_t(word) + 1) * kPlaceStep; }

HOOKSTATS_HD_INLINE uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccd;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53;
  return x ^ x >> 33;
}

// A tensor's words.
struct Words {
  const void* data;
  Layout layout;      // all dimensions in the tensor's order, one channel
  int element_bytes;  // 1, 2, 4 or 8: an element of 16 bytes is two of them

  HOOKSTATS_HD int64_t bytes() const { return layout.count * element_bytes; }
  HOOKSTATS_HD int64_t count() const { return (bytes() + 7) / 8; }

  // Whether they lie in memory as they are.
  HOOKSTATS_HD bool are_contiguous() const { return layout.ndim == 0 || (layout.ndim == 1 && layout.stride[0] == 1); }

  HOOKSTATS_HD uint64_t element(int64_t offset) const {
    switch (element_bytes) {
      case 1:
        return static_cast<const uint8_t*>(data)[offset];
      case 2:
        return static_cast<const uint16_t*>(data)[offset];
      case 4:
        return static_cast<const uint32_t*>(data)[offset];
      default:
        return static_cast<const uint64_t*>(data)[offset];
    }
  }

  // Out of its elements, wherever they lie.
  HOOKSTATS_HD uint64_t gathered(int64_t word) const {
    const int elements = 8 / element_bytes;
    uint64_t bits = 0;
    for (int k = 0; k < elements && word * elements + k < layout.count; ++k) {
      bits |= element(layout.offset(word * elements + k)) << 8 * element_bytes * k;
    }
    return bits;
  }
};

}  // namespace hookstats
