// Checksums on the CPU: tensors in pieces, each piece's words in vectors.

#include <algorithm>

#include "../kernels.h"

namespace hookstats::cpu {
namespace {

constexpr int64_t kPieceWords = 1 << 15;  // one task's
constexpr int64_t kGathered = 1 << 9;     // words that are gathered before they are summed

// In versions for AVX-512, AVX2 and the baseline, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#if __GNUC__ >= 12
#define HOOKSTATS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HOOKSTATS_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#else
#define HOOKSTATS_CLONES
#endif

// Of `count` words side by side, on any address, the first of which is the tensor's word `first`.
HOOKSTATS_CLONES uint64_t sum_of(const char* words, int64_t first, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t bits;
    memcpy(&bits, words + 8 * i, sizeof bits);
    sum += mixed(bits + place_of(first + i));
  }
  return sum;
}

template <class T>
void copy_elements(const Layout& layout, const void* data, int64_t first, int64_t count, void* to) {
  const int64_t stride = layout.inner_stride();
  for (int64_t i = 0; i < count;) {
    const T* from = static_cast<const T*>(data) + layout.offset(first + i);
    const int64_t run = std::min(count - i, layout.inner_size() - (first + i) % layout.inner_size());
    for (int64_t j = 0; j < run; ++j) memcpy(static_cast<T*>(to) + i + j, from + j * stride, sizeof(T));
    i += run;
  }
}

void copy_elements(const Words& words, int64_t first, int64_t count, void* to) {
  switch (words.element_bytes) {
    case 1:
      return copy_elements<uint8_t>(words.layout, words.data, first, count, to);
    case 2:
      return copy_elements<uint16_t>(words.layout, words.data, first, count, to);
    case 4:
      return copy_elements<uint32_t>(words.layout, words.data, first, count, to);
    default:
      return copy_elements<uint64_t>(words.layout, words.data, first, count, to);
  }
}

uint64_t sum_piece(const Words& words, int64_t begin, int64_t end) {
  uint64_t sum = 0;
  if (words.are_contiguous()) {
    const int64_t whole = std::min(end, words.bytes() / 8);
    const auto* bytes = static_cast<const char*>(words.data);
    sum += sum_of(bytes + 8 * begin, begin, whole - begin);
    begin = whole;
  }
  const int64_t elements = 8 / words.element_bytes;
  for (; begin < end; begin += kGathered) {
    const int64_t count = std::min(kGathered, end - begin);
    uint64_t buffer[kGathered];
    buffer[count - 1] = 0;  // the tensor's last word may be filled in part
    copy_elements(words, begin * elements, std::min(count * elements, words.layout.count - begin * elements), buffer);
    sum += sum_of(reinterpret_cast<const char*>(buffer), begin, count);
  }
  return sum;
}

}  // namespace

void checksums(const std::vector<Words>& tensors, uint64_t* out, ParallelFor parallel_for) {
  std::vector<int64_t> first_piece{0};
  for (const Words& words : tensors) {
    first_piece.push_back(first_piece.back() + (words.count() + kPieceWords - 1) / kPieceWords);
  }
  std::fill_n(out, tensors.size(), 0);
  parallel_for(first_piece.back(), [&](int64_t begin, int64_t end) {
    size_t i = std::upper_bound(first_piece.begin(), first_piece.end(), begin) - first_piece.begin() - 1;
    for (int64_t piece = begin; piece < end; ++piece) {
      while (piece >= first_piece[i + 1]) ++i;
      const int64_t first = (piece - first_piece[i]) * kPieceWords;
      const uint64_t sum = sum_piece(tensors[i], first, std::min(first + kPieceWords, tensors[i].count()));
      __atomic_fetch_add(&out[i], sum, __ATOMIC_RELAXED);
    }
  });
}

}  // namespace hookstats::cpu
