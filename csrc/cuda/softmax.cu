// The softmax of rows, in one read: a team of threads has a row, each thread folds what it reads as it comes, and the
// team merges that in a tree. Nothing is kept but the numbers of a row; a row's numbers depend on its length alone.

#include "feed.h"
#include "plan.h"

namespace hookstats::cuda {
namespace {

constexpr int kPackBytes = 16;

// Of a multiprocessor: registers hold what is kept, and doubles take two.
template <class acc_t, int kKept>
constexpr int kBlocksAtOnce = kKept > 3 && sizeof(acc_t) == 8   ? 1
                              : kKept > 3 || sizeof(acc_t) == 8 ? 2
                                                                : 4;

// The largest logits, in descending order, in registers; -Inf behind the last one.
template <class acc_t, int kSize>
struct Largest {
  acc_t value[kSize];

  __device__ Largest() {
#pragma unroll
    for (int i = 0; i < kSize; ++i) value[i] = -std::numeric_limits<acc_t>::infinity();
  }

  // A NaN is not kept.
  __device__ void add(acc_t x) {
    if (!(x > value[kSize - 1])) return;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const acc_t here = value[i];
      value[i] = x > here ? x : here;
      x = x > here ? here : x;
    }
  }
};

// Of a part of a row. kKept: of the largest logits; 0: none.
template <class acc_t, int kKept>
struct Part {
  SoftmaxSums<acc_t> sums;
  Largest<acc_t, kKept> largest;

  __device__ void merge(const Part& other) {
    sums.merge(other.sums, [](acc_t x) { return exp_fast(x); });
#pragma unroll
    for (int i = 0; i < kKept; ++i) largest.add(other.largest.value[i]);
  }
};
template <class acc_t>
struct Part<acc_t, 0> {
  SoftmaxSums<acc_t> sums;

  __device__ void merge(const Part& other) {
    sums.merge(other.sums, [](acc_t x) { return exp_fast(x); });
  }
};

// Adds neighbouring logits.
template <int n, class acc_t, int kKept>
__device__ inline void add(const acc_t (&x)[n], Part<acc_t, kKept>& part) {
  acc_t largest = x[0];
#pragma unroll
  for (int i = 1; i < n; ++i) largest = x[i] > largest || largest != largest ? x[i] : largest;
  part.sums.raise(largest, [](acc_t exponent) { return exp_fast(exponent); });
  const acc_t base = part.sums.base();
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const acc_t exponent = bounded(x[i] - base), p = exp_fast(exponent);
    part.sums.sum += p;
    part.sums.weighted += exponent * p;
  }
  if constexpr (kKept > 0) {
#pragma unroll
    for (int i = 0; i < n; ++i) part.largest.add(x[i]);
  }
}

// `team` threads, a power of two, have a row: at most all of the block.
template <class scalar_t, int kKept>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<acc_of<scalar_t>, kKept>)
    softmax_kernel(const SoftmaxRows rows, acc_of<scalar_t>* out, int team) {
  using acc_t = acc_of<scalar_t>;
  constexpr int kPack = kPackBytes / sizeof(scalar_t);
  // As doubles, which lie at whole 8 bytes, since shared memory runs no constructor.
  HOOKSTATS_SHARED(double, memory, kThreads * sizeof(Part<acc_t, kKept>) / sizeof(double));
  static_assert(alignof(Part<acc_t, kKept>) <= alignof(double));
  auto* parts = reinterpret_cast<Part<acc_t, kKept>*>(memory);
  const int thread = threadIdx.x, member = thread % team;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / team) + thread / team;
  const bool is_row = row < rows.rows();
  const auto* data = static_cast<const scalar_t*>(rows.data) + (is_row ? rows.at.offset(row) : 0);
  Part<acc_t, kKept> part;
  if (is_row) {
    // Packs lie at whole ones; the logits before the first and behind the last are read one by one.
    const bool packed = rows.stride == 1;
    const int64_t to_whole = packed ? (-(reinterpret_cast<uintptr_t>(data) / sizeof(scalar_t))) % kPack : rows.n;
    const int64_t before = to_whole < rows.n ? to_whole : rows.n, packs = (rows.n - before) / kPack;
    const auto* pack = reinterpret_cast<const Pack<scalar_t, kPack>*>(data + before);
#pragma unroll 2
    for (int64_t i = member; i < packs; i += team) {
      const Pack<scalar_t, kPack> here = pack[i];
      acc_t x[kPack];
      widen_pack(here, x);
      add(x, part);
    }
    const int64_t alone = rows.n - packs * kPack;
    for (int64_t i = member; i < alone; i += team) {
      const acc_t x[1] = {widen(data[(i < before ? i : i + packs * kPack) * rows.stride])};
      add(x, part);
    }
  }
  for (int half = team / 2; half > 0; half /= 2) {
    if (member >= half && member < 2 * half) parts[thread] = part;
    __syncthreads();
    if (member < half) part.merge(parts[thread + half]);
    __syncthreads();
  }
  if (!is_row || member > 0) return;
  const acc_t first = rows.n > 0 ? widen(data[0]) : acc_t(0);
  out += row;
  part.sums.write(first, out, rows.rows(), [](acc_t x) { return exp_fast(x); }, [](acc_t x) { return std::log(x); });
  if constexpr (kKept > 0) {
    parts[thread] = part;  // registers have no index that is known only when the kernel runs
    const bool is_number = *out == *out;
    out[kSoftmaxFields * rows.rows()] =
        is_number ? margin_of(parts[thread].largest.value, rows.top_k) : part.sums.nothing(false);
  }
}

// A thread has two packs of a row, so that short rows share a block.
template <class scalar_t>
int team_of(int64_t n) {
  int team = 1;
  while (team < kThreads && team * (2 * kPackBytes / int64_t(sizeof(scalar_t))) < n) team *= 2;
  return team;
}

template <class scalar_t, int kKept>
void launch_rows(const SoftmaxRows& rows, void* out, void* stream) {
  const int team = team_of<scalar_t>(rows.n);
  launch<softmax_kernel<scalar_t, kKept>>(dim3(unsigned(divide_up(rows.rows(), kThreads / team))), kThreads, 0, stream,
                                          rows, static_cast<acc_of<scalar_t>*>(out), team);
}

}  // namespace

void softmax_rows(const SoftmaxRows& rows, Dtype dtype, void* out, const Stream& stream) {
  check(cudaSetDevice(stream.device));
  with_dtype(dtype, [&](auto value) {
    using scalar_t = decltype(value);
    if (rows.top_k == 0) return launch_rows<scalar_t, 0>(rows, out, stream.handle);
    if (rows.top_k <= 2) return launch_rows<scalar_t, 3>(rows, out, stream.handle);
    launch_rows<scalar_t, kMostKept>(rows, out, stream.handle);
  });
}

}  // namespace hookstats::cuda
