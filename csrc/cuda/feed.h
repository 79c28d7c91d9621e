// How a thread reads its share of a tensor: packs of neighbouring elements, several loads on their way.
#pragma once

#include "fold.h"
#include "walk.h"

namespace hookstats::cuda {

// The elements that one load brings.
template <class scalar_t, int n>
struct alignas(n * sizeof(scalar_t)) Pack {
  scalar_t value[n];
};

template <class scalar_t, int n>
HOOKSTATS_HD inline void widen_pack(const Pack<scalar_t, n>& pack, acc_of<scalar_t> (&x)[n]) {
  if constexpr (sizeof(scalar_t) == 2 && n % 2 == 0) {
    uint32_t words[n / 2];
    memcpy(words, &pack, sizeof words);
    for (int i = 0; i < n / 2; ++i) widen2<scalar_t>(words[i], x[2 * i], x[2 * i + 1]);
  } else {
    for (int i = 0; i < n; ++i) x[i] = widen(pack.value[i]);
  }
}

// How a pack is copied: at once where all packs are aligned, else in the words that cover it, of which the n-th of all
// threads lie side by side. Where elements are smaller than a word, a pack is shifted out of the words: all packs of a
// thread begin at the same byte of a word (plan.h sees to it). A word that holds a byte of the pack is copied whole;
// memory is allotted in larger pieces. Elements from `valid` on are made NaN: of all bits set, in each dtype.
template <class scalar_t, int kPack, bool kAligned>
struct Cover {
  using Load = Pack<scalar_t, kPack>;
  static constexpr int kWord = sizeof(scalar_t) == 8 ? 8 : 4, kShifts = sizeof(scalar_t) < 4;
  static constexpr int kWords = int(sizeof(Load)) / kWord + kShifts, kBits = sizeof(Load) / sizeof(uint32_t);
  int words;
  unsigned shift;
  uint32_t nan[kBits];

  template <class Walker>
  __device__ Cover(const Walker& walker, int valid, int exchange) {
    const int before = bytes_before(walker), bytes = valid * int(sizeof(scalar_t));
    words = (before + bytes + kWord - 1) / kWord;
    shift = before * 8;
    for (int i = 0; i < kBits; ++i) {
      const int missing = (i ^ exchange * (kBits / 2)) * 4 + 4 - bytes;  // bytes, of this word
      nan[i] = missing <= 0 ? 0 : missing >= 4 ? ~0u : ~0u << (32 - 8 * missing);
    }
  }
  // Of the word in which packs begin.
  template <class Walker>
  __device__ static int bytes_before(const Walker& walker) {
    return kShifts ? int(reinterpret_cast<uintptr_t>(walker.at) % kWord) : 0;
  }
  // From packs on to these words.
  template <class Walker>
  __device__ static void align(Walker& walker) {
    walker.at -= bytes_before(walker) / int(sizeof(scalar_t));
  }
  __device__ bool copies(int word) const { return word < words; }

  template <bool kExchanges>
  __device__ Load take(const char* at, int exchange) const {
    using word_t = std::conditional_t<kWord == 8, uint64_t, uint32_t>;
    word_t copied[kWords];
    for (int i = 0; i < kWords; ++i) copied[i] = *reinterpret_cast<const word_t*>(at + i * kThreads * kWord);
    uint32_t bits[kBits + kShifts], taken[kBits];
    memcpy(bits, copied, sizeof bits);
    for (int i = 0; i < kBits; ++i) taken[i] = kShifts ? shift_out(bits[i], bits[i + kShifts], shift) : bits[i];
    if (kExchanges && exchange) {
      for (int i = 0; i < kBits / 2; ++i) {
        const uint32_t lower = taken[i];
        taken[i] = taken[i + kBits / 2];
        taken[i + kBits / 2] = lower;
      }
    }
    for (int i = 0; i < kBits; ++i) taken[i] |= nan[i];
    Load pack;
    memcpy(&pack, taken, sizeof pack);
    return pack;
  }
};

template <class scalar_t, int kPack>
struct Cover<scalar_t, kPack, true> {
  using Load = Pack<scalar_t, kPack>;
  static constexpr int kWord = sizeof(Load), kWords = 1;

  template <class Walker>
  __device__ Cover(const Walker&, int, int) {}
  template <class Walker>
  __device__ static void align(Walker&) {}

  template <bool kExchanges>
  __device__ Load take(const char* at, int exchange) const {
    if (!kExchanges) return *reinterpret_cast<const Load*>(at);
    using Half = Pack<scalar_t, kPack / 2>;
    const Half* halves = reinterpret_cast<const Half*>(at);
    const Half both[2] = {halves[exchange], halves[1 - exchange]};
    Load pack;
    memcpy(&pack, both, sizeof pack);
    return pack;
  }
};

// A thread's packs on their way, kFlight bytes, in a ring in shared memory: some are used while the next ones come.
//
// Invariant: whenever `take` is called, exactly kGroups groups of copies were ended and not used yet, the oldest of
// them at `here`. The constructor ends kGroups; then each `go_on`, after one was used, ends one more in its place,
// empty ones too where nothing is left to ask for. Groups come in their order: when all but kGroups - 1 have come, the
// oldest has.
template <class scalar_t, int kPack, class Walker, bool kExchanges, int kFlight>
struct Ring {
  using Load = Pack<scalar_t, kPack>;
  using Words = Cover<scalar_t, kPack, Walker::kAligned>;
  static constexpr int kGroup = 4;  // packs taken at a time
  static constexpr int kWord = Words::kWord, kStride = kThreads * kWord;
  static constexpr int kGroups = kFlight / (kGroup * Words::kWords * kWord),
                       kGroupBytes = kGroup * Words::kWords * kStride;
  static constexpr int kBytes = kGroups * kGroupBytes;
  static_assert(kGroups > 0);
  char* const begin;
  char* here;
  Walker walker;
  int to_ask;
  const int exchange;  // 1: the halves of packs change places
  const Words words;

  // Asks for the first of `count` packs.
  __device__ Ring(void* shared, int thread, const Walker& first, int count, bool exchange, int valid)
      : begin(static_cast<char*>(shared) + thread * kWord),
        here(begin),
        walker(first),
        to_ask(count),
        exchange(exchange),
        words(first, valid, kExchanges && exchange) {
    Words::align(walker);
#pragma unroll 1
    for (int g = 0; g < kGroups; ++g) go_on();
  }

  __device__ void take(Load (&packs)[kGroup], int) const {
    wait_for_all_but<kGroups - 1>();
    for (int i = 0; i < kGroup; ++i) {
      packs[i] = words.template take<kExchanges>(here + i * Words::kWords * kStride, exchange);
    }
  }

  __device__ void copy(int i) {
    const char* from = reinterpret_cast<const char*>(walker.next());
    char* to = here + i * Words::kWords * kStride;
    if constexpr (Walker::kAligned) {
      copy_async<kWord>(to, from);
    } else {
      copy_words<0>(to, from);
    }
  }
  template <int word>
  __device__ void copy_words(char* to, const char* from) {
    copy_async_if<kWord, word * kStride, word * kWord>(words.copies(word), to, from);
    if constexpr (word + 1 < Words::kWords) copy_words<word + 1>(to, from);
  }

  // After the packs were used, asks for others in their place.
  __device__ void go_on() {
    if (to_ask >= kGroup) {
      for (int i = 0; i < kGroup; ++i) copy(i);
    } else {
      for (int i = 0; i < kGroup - 1; ++i) {
        if (i < to_ask) copy(i);
      }
    }
    to_ask -= kGroup;
    end_group();
    here += kGroupBytes;
    if (here == begin + kBytes) here = begin;
  }

  // Nothing is on its way then, to write into what others use.
  __device__ static void stop() { wait_for_all_but<0>(); }
};

// The same for elements that cannot be copied so: all are asked for before the first is used.
template <class scalar_t, int kPack, class Walker>
struct Burst {
  using Load = Pack<scalar_t, kPack>;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1000)
  static constexpr int kGroup = 8;  // there 16 would not fit into the registers
#else
  static constexpr int kGroup = sizeof(Load) == 8 ? 8 : 16;
#endif
  static constexpr int kBytes = 0;
  Walker walker;

  __device__ Burst(void*, int, const Walker& walker, int, bool, int) : walker(walker) {}

  __device__ void take(Load (&packs)[kGroup], int count) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < count) packs[i] = *reinterpret_cast<const Load*>(walker.next());
    }
  }
  __device__ void go_on() {}
  __device__ static void stop() {}
};

}  // namespace hookstats::cuda
