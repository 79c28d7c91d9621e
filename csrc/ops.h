// What ops.cpp offers hook.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>

namespace hookstats {

// Channel dimensions that are none: of a site whose first tensor is still to come (hook.cpp asks Python then); and by
// the number of dimensions: 1 for 4-D and 5-D tensors, else the last.
constexpr int64_t kUnknownDim = std::numeric_limits<int32_t>::min();
constexpr int64_t kDimByRule = kUnknownDim + 1;

// One site's state: see kernels.h. All tensors lie on one device.
struct SiteState {
  at::Tensor moments;                   // [fields, channels] float64
  at::Tensor counters;                  // [2] int64
  std::optional<at::Tensor> histogram;  // [512] or [channels, 64] int64
  std::optional<at::Tensor> active;     // [1] int32; zero: the kernel returns at once
  int64_t channel_dim;                  // not read where the state has one channel
};

// Folds `x` into the state. One kernel on the current stream; nothing is allocated or waited for. Throws c10::Error.
void accumulate(const at::Tensor& x, const SiteState& site);

// What accumulate would throw for `x`, without measuring it.
void check_measurable(const at::Tensor& x, const SiteState& site);

// Makes sure that the first launches on new streams of this device find their scratch allocated.
void reserve_scratch(at::Device device);

// Whether this thread is inside backward(): a forward seen there is a recomputation.
bool backward_is_running();

}  // namespace hookstats
