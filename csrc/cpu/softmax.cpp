// The softmax of rows on the CPU, in one read: tiles that stay in the nearest cache are read twice there, once for
// their largest logit and once for the sums. A row's numbers depend on that row alone, not on the number of threads.

#include <algorithm>
#include <cmath>

#include "../kernels.h"
#include "tile.h"
#include "versions.h"

namespace hookstats::cpu {
namespace {

constexpr int kTile = 512;                  // logits
constexpr int64_t kSerialLogits = 1 << 14;  // below, waking threads costs more than it saves
constexpr int64_t kTaskLogits = 1 << 15;

// exp(x) for kLeastExponent <= x <= 0, to 2 ulp; after Cephes' expf: 2^k exp(r) with |r| <= log(2) / 2. The
// polynomial's value is in [0.7, 1.5], so that adding k to the exponent is the multiplication by 2^k.
template <class V>
HOOKSTATS_INLINE typename V::type exp_of(typename V::type x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: what is added to it becomes an integer in its last bits
  const auto rounded = x * 1.44269504088896341f + kRound;
  const auto k = rounded - kRound;
  const auto r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
  auto p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.f;
  return bit_copy<typename V::type>(bit_copy<typename V::bits>(p) + (bit_copy<typename V::bits>(rounded) << 23));
}

template <class V>
HOOKSTATS_INLINE auto sum_of(typename V::type lanes) {
  double sum = 0;
  for (int i = 0; i < V::kSize; ++i) sum += lanes[i];
  return sum;
}

// Adds logits that lie side by side, in whole vectors. `sums` are those of the logits before.
template <int kBytes>
HOOKSTATS_INLINE void add_logits(const float* at, int count, SoftmaxSums<float, double>& sums) {
  using V = Vector<kBytes, float>;
  using vector_t = typename V::type;
  vector_t max = vector_t{} - std::numeric_limits<float>::infinity();
  for (int i = 0; i < count; i += V::kSize) {
    const auto x = load<V>(at + i);
    max = x > max ? x : max;
  }
  float largest = max[0];
  for (int i = 1; i < V::kSize; ++i) largest = max[i] > largest ? max[i] : largest;
  sums.raise(largest, [](double x) { return std::exp(x); });

  const float base = sums.base();
  const vector_t least = vector_t{} + kLeastExponent<float>;
  vector_t sum{}, weighted{};
  for (int i = 0; i < count; i += V::kSize) {
    const auto exponent = load<V>(at + i) - base;
    const vector_t kept = exponent < least ? least : exponent;  // a NaN stays, and comes into `weighted`
    const auto p = exp_of<V>(kept);
    sum += p;
    weighted += kept * p;
  }
  sums.sum += sum_of<V>(sum);
  sums.weighted += sum_of<V>(weighted);
}

template <int kBytes>
HOOKSTATS_INLINE void add_logits(const double* at, int count, SoftmaxSums<double, double>& sums) {
  double largest = sums.max;
  for (int i = 0; i < count; ++i) largest = at[i] > largest ? at[i] : largest;
  sums.raise(largest, [](double x) { return std::exp(x); });
  for (int i = 0; i < count; ++i) {
    const double exponent = bounded(at[i] - sums.base()), p = std::exp(exponent);
    sums.sum += p;
    sums.weighted += exponent * p;
  }
}

// The `kept` largest of a row, in descending order; a NaN is not among them. In groups, most of which hold none of
// them.
template <class acc_t>
HOOKSTATS_INLINE void keep_largest(const acc_t* at, int count, acc_t* largest, int kept) {
  constexpr int kGroup = 16;
  for (int i = 0; i < count; i += kGroup) {
    bool any = false;
    const int end = std::min(count, i + kGroup);
    for (int j = i; j < end; ++j) any |= at[j] > largest[kept - 1];
    if (!any) continue;
    for (int j = i; j < end; ++j) {
      if (!(at[j] > largest[kept - 1])) continue;
      int place = kept - 1;
      for (; place > 0 && at[j] > largest[place - 1]; --place) largest[place] = largest[place - 1];
      largest[place] = at[j];
    }
  }
}

// Widens logits into whole vectors, of which the last is filled up with masked ones. Returns how many that makes.
template <int kBytes, class scalar_t, class acc_t>
HOOKSTATS_INLINE int gather(const scalar_t* data, int64_t stride, int count, acc_t* into) {
  using V = Vector<kBytes, acc_t>;
  int i = 0;
  if (stride == 1) {
    for (; i + V::kSize <= count; i += V::kSize) store_vector(into + i, load<V>(data + i));
  }
  for (; i < count; ++i) into[i] = widen(data[i * stride]);
  for (; i % V::kSize; ++i) into[i] = -std::numeric_limits<acc_t>::infinity();
  return i;
}

template <int kBytes, class scalar_t>
HOOKSTATS_INLINE void row_in(const scalar_t* data, const SoftmaxRows& rows, acc_of<scalar_t>* out, int64_t stride) {
  using acc_t = acc_of<scalar_t>;
  alignas(64) acc_t buffer[kTile];
  SoftmaxSums<acc_t, double> sums;
  acc_t largest[kMostKept];
  const int kept = rows.top_k ? rows.top_k + 1 : 0;
  std::fill_n(largest, kept, -std::numeric_limits<acc_t>::infinity());
  for (int64_t first = 0; first < rows.n; first += kTile) {
    const scalar_t* from = data + first * rows.stride;
    int count = int(std::min<int64_t>(kTile, rows.n - first));
    const acc_t* at = buffer;
    if constexpr (std::is_same_v<scalar_t, acc_t>) {
      if (rows.stride == 1 && count % Vector<kBytes, acc_t>::kSize == 0) at = from;
    }
    if (at == buffer) count = gather<kBytes>(from, rows.stride, count, buffer);
    add_logits<kBytes>(at, count, sums);
    if (kept) keep_largest(at, count, largest, kept);
  }
  const acc_t start = rows.n ? widen(data[0]) : acc_t(0);
  sums.write(start, out, stride, [](double x) { return std::exp(x); }, [](double x) { return std::log(x); });
  if (kept) {
    const bool is_number = *out == *out;
    out[kSoftmaxFields * stride] = is_number ? margin_of(largest, rows.top_k) : sums.nothing(false);
  }
}

#define HOOKSTATS_VERSION(target, bytes, type)                                                    \
  target void row(const type* data, const SoftmaxRows& rows, acc_of<type>* out, int64_t stride) { \
    row_in<bytes>(data, rows, out, stride);                                                       \
  }
#define HOOKSTATS_VERSIONS_OF(name, type, aten) HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, type)
HOOKSTATS_DTYPES(HOOKSTATS_VERSIONS_OF)
#undef HOOKSTATS_VERSIONS_OF
#undef HOOKSTATS_VERSION

template <class scalar_t>
void all_rows(const SoftmaxRows& rows, void* out, ParallelFor parallel_for) {
  const int64_t count = rows.rows(), chunk = std::max<int64_t>(1, kTaskLogits / std::max<int64_t>(1, rows.n));
  const auto some = [&](int64_t begin, int64_t end) {
    KeepSubnormals keep;
    for (int64_t r = begin * chunk; r < std::min(count, end * chunk); ++r) {
      const auto* data = static_cast<const scalar_t*>(rows.data) + rows.at.offset(r);
      row(data, rows, static_cast<acc_of<scalar_t>*>(out) + r, count);
    }
  };
  const int64_t tasks = (count + chunk - 1) / chunk;
  count* rows.n < kSerialLogits ? some(0, tasks) : parallel_for(tasks, some);
}

}  // namespace

void softmax_rows(const SoftmaxRows& rows, Dtype dtype, void* out, ParallelFor parallel_for) {
  with_dtype(dtype, [&](auto value) { all_rows<decltype(value)>(rows, out, parallel_for); });
}

}  // namespace hookstats::cpu
