// The softmax of a row of logits, in numbers: what is summed of a row in one read, how two parts of a row merge, and
// what follows. Host and device code; knows nothing of torch.
//
// With m the largest logit, s = sum exp(x - m) and w = sum (x - m) exp(x - m):
//   logsumexp = m + log s,   entropy = log s - w / s,   p(x) = exp(x - m) / s.
// Both terms of the entropy are positive, so that nothing cancels. A logit of -Inf is masked: it counts nowhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "layout.h"

namespace hookstats {

// Numbers of a row, in their order; `margin` only where it is asked for.
enum SoftmaxField : int { k_softmax_max, k_logsumexp, k_entropy, k_p_max, k_p_first, kSoftmaxFields };
constexpr int kMostKept = 17;  // largest logits of a row: for the margin between the 16th and the 17th

// exp(kLeastExponent) is negligible and a normal number; and it times anything that occurs here is finite.
template <class acc_t>
constexpr acc_t kLeastExponent = sizeof(acc_t) == 4 ? acc_t(-86) : acc_t(-700);

// Logits relative to the largest one; a NaN stays.
template <class acc_t>
HOOKSTATS_HD inline acc_t bounded(acc_t exponent) {
  return exponent < kLeastExponent<acc_t> ? kLeastExponent<acc_t> : exponent;
}

// What is summed of a row, or of a part of one, by sum_t: float32 on a GPU, else float64.
template <class acc_t, class sum_t = acc_t>
struct SoftmaxSums {
  acc_t max = -std::numeric_limits<acc_t>::infinity();  // NaN loses
  sum_t sum = 0, weighted = 0;                          // relative to `base`

  // What logits are subtracted from: finite, unless one of them is Inf.
  HOOKSTATS_HD acc_t base() const {
    return max < -std::numeric_limits<acc_t>::max() ? -std::numeric_limits<acc_t>::max() : max;
  }

  // Makes room for a larger logit.
  template <class Exp>
  HOOKSTATS_HD void raise(acc_t to, Exp exp) {
    if (!(to > max)) return;
    const acc_t before = base();
    max = to;
    const sum_t exponent = sum_t(bounded(acc_t(before - base()))), scale = exp(exponent);
    weighted = scale * (weighted + exponent * sum);
    sum *= scale;
  }

  template <class Exp>
  HOOKSTATS_HD void merge(SoftmaxSums other, Exp exp) {
    raise(other.max, exp);
    other.raise(max, exp);
    sum += other.sum;
    weighted += other.weighted;
  }

  // Writes the numbers of a row, `stride` apart: NaN where it holds NaN or Inf, -Inf where all of it is masked.
  // first: its first logit.
  template <class Exp, class Log>
  HOOKSTATS_HD void write(acc_t first, acc_t* out, int64_t stride, Exp exp, Log log) const {
    constexpr acc_t kInfinity = std::numeric_limits<acc_t>::infinity();
    const bool finite = weighted == weighted && sum == sum && max < kInfinity;
    if (!finite || max == -kInfinity) {
      for (int field = 0; field < kSoftmaxFields; ++field) out[field * stride] = nothing(finite);
      return;
    }
    const sum_t log_sum = log(sum);
    out[k_softmax_max * stride] = max;
    out[k_logsumexp * stride] = acc_t(sum_t(max) + log_sum);
    out[k_entropy * stride] = acc_t(log_sum - weighted / sum);
    out[k_p_max * stride] = acc_t(1 / sum);
    out[k_p_first * stride] = first == -kInfinity ? acc_t(0) : acc_t(exp(sum_t(first) - sum_t(max)) / sum);
  }

  // In the place of numbers.
  HOOKSTATS_HD static acc_t nothing(bool masked) {
    return masked ? -std::numeric_limits<acc_t>::infinity() : std::numeric_limits<acc_t>::quiet_NaN();
  }
};

// Between the k-th largest logit of a row and the next; -Inf where it has no k + 1 of them.
// largest: in descending order, -Inf behind the last one.
template <class acc_t>
HOOKSTATS_HD inline acc_t margin_of(const acc_t* largest, int k) {
  return largest[k] == -std::numeric_limits<acc_t>::infinity() ? largest[k] : largest[k - 1] - largest[k];
}

// Rows of `n` logits, `stride` apart; `at` maps the number of a row to its first one.
struct SoftmaxRows {
  const void* data;
  Layout at;
  int64_t n, stride;
  int top_k;  // 0: no margin

  HOOKSTATS_HD int64_t rows() const { return at.count; }
};

}  // namespace hookstats
