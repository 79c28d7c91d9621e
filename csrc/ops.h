// What ops.cpp and scratch.cpp offer hook.cpp, batch.cpp and totals.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>

#include "kernels.h"

#if defined(HOOKSTATS_CUDA) || defined(HOOKSTATS_CUDA_ON_CPU)
#define HOOKSTATS_CUDA_KERNELS
#endif

#if defined(HOOKSTATS_CUDA_ON_CPU)
#define HOOKSTATS_NAMESPACE hookstats_cuda_on_cpu
#else
#define HOOKSTATS_NAMESPACE hookstats
#endif

namespace hookstats {

// Channel dimensions that are none: of a site whose first tensor is still to come (hook.cpp asks Python then); and by
// the number of dimensions: 1 for 4-D and 5-D tensors, else the last.
constexpr int64_t kUnknownDim = std::numeric_limits<int32_t>::min();
constexpr int64_t kDimByRule = kUnknownDim + 1;

// One site's state: see kernels.h. All tensors lie on one device.
struct SiteState {
  at::Tensor moments;                   // [fields, channels] float64
  at::Tensor counters;                  // [2] int64
  std::optional<at::Tensor> histogram;  // int64: [512] or [channels, 64]; linear bins: [bins + 2], [channels, bins + 2]
  std::optional<at::Tensor> active;     // [1] int32; zero: the kernel returns at once
  int64_t channel_dim = 0;              // not read where the state has one channel
  double low = 0, high = 0;             // of linear bins; equal: there are none
};

// A site's state, checked, so that a hook need not.
struct Site {
  SiteState tensors;
  State state;

  Site() = default;
  explicit Site(SiteState tensors);
};

// Of the tensors that a mask applies to, those that begin with its shape or have its elements in dimension 0, the rows
// that count. Both int32, on the device of the data, and not written before the kernels that read them have run.
struct Rows {
  at::Tensor listed;  // of the mask's shape: at its beginning the numbers of those rows, ascending
  at::Tensor kept;    // [1]: how many they are; on a GPU it is read by the kernel alone
};

// Folds `x`, or its rows that count, into the state. One kernel on the current stream; nothing is allocated or waited
// for. Throws c10::Error.
// Returns whether there are rows and they are about this tensor.
bool accumulate(const at::Tensor& x, const Site& site, const Rows* rows = nullptr);

// Makes sure that the first launches on new streams of this device find their scratch allocated.
void reserve_scratch(at::Device device);

// What a kernel is given for `x`, checked; the data pointer is still to come. Throws c10::Error.
Input described(const at::Tensor& x, const Site& site, const Rows* rows = nullptr);

#if defined(HOOKSTATS_CUDA_KERNELS)
// The CUDA kernels run on the GPU, or, in the tests' build, on the CPU (tests/cuda_on_cpu).
bool runs_cuda_kernels(at::Device device);

// The current stream of a device; null on a CPU.
void* stream_of(at::Device device);

// The same with its scratch.
cuda::Launch launch_on(at::Device device, const std::optional<at::Tensor>& active);

void check(const char* cuda_error);
#endif

// Wrappers without memory of their own: fake and meta tensors, and what functorch makes. Their own keys tell; a
// dispatch mode that is merely active (selective checkpointing, FLOP counting) changes nothing about the data.
bool has_no_data(const at::Tensor& x);

// Waits for the current stream of a device.
void wait_for(at::Device device);

// What went wrong, in a line.
const char* reason(const std::exception& error);

// Whether this thread is inside backward(): a forward seen there is a recomputation.
bool backward_is_running();

}  // namespace hookstats
