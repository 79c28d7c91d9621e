// Samples of tensors on the CPU.

#include "../sample.h"

#include <algorithm>

namespace hookstats::cpu {
namespace {

constexpr int64_t kAhead = 4 * kRun;
constexpr size_t kLine = 64;  // bytes that the processor fetches at once

template <class scalar_t>
void sample_as(const Sampled& tensor) {
  const auto* data = static_cast<const scalar_t*>(tensor.data);
  auto* values = static_cast<acc_of<scalar_t>*>(tensor.values);
  auto* differences = static_cast<acc_of<scalar_t>*>(tensor.differences);
  const int64_t size = sample_size(tensor.count);
  for (int64_t first = 0; first < size; first += kRun) {
    const scalar_t* run = data + sample_place(tensor.count, first);
    const int64_t length = std::min(kRun, size - first);
    if (first + kAhead < size) {  // no hardware looks that far ahead, from one run to another
      const auto* later = reinterpret_cast<const char*>(data + sample_place(tensor.count, first + kAhead));
      for (size_t byte = 0; byte < kRun * sizeof(scalar_t); byte += kLine) __builtin_prefetch(later + byte);
    }
    if (differences) {
      for (int64_t i = 0; i < length; ++i) take_sample(run[i], first + i, values, differences);
    } else {
      for (int64_t i = 0; i < length; ++i) values[first + i] = widen(run[i]);
    }
  }
}

}  // namespace

void sample(const std::vector<Sampled>& tensors) {
  for (const Sampled& tensor : tensors) {
    with_dtype(tensor.dtype, [&](auto value) { sample_as<decltype(value)>(tensor); });
  }
}

}  // namespace hookstats::cpu
