// What the operators (_ops.so, which serves every torch) offer each other and the hook of one torch (hook.cpp). A
// tensor is a View here, so that either makes one of its own kind of tensor; what cannot be is a std::runtime_error.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace hookstats {

using torch::headeronly::ScalarType;

// A site's channel dimension is a number, as everywhere in torch; or, where the module's type does not tell,
// kDimsByNdim plus 4 bits for each number of dimensions from 0 to 7: the channel dimension of such tensors plus 1, or 0
// while none was met (hook.cpp asks Python then).
constexpr int64_t kDimsByNdim = int64_t(1) << 32;

// The channel dimension of a tensor with so many dimensions.
inline std::optional<int64_t> channel_dim_for(int64_t channel_dim, int64_t ndim) {
  if (channel_dim < kDimsByNdim) return channel_dim;
  if (ndim > 7) return -1;
  const int64_t entry = channel_dim >> (4 * ndim) & 15;
  return entry ? std::optional(entry - 1) : std::nullopt;
}

// As torch numbers its types. To operators that are given no tensor, a number below 0 is the CPU.
struct Device {
  int type = 0, index = 0;

  static Device numbered(int64_t n) { return n < 0 ? Device{} : Device{1, int(n)}; }
  constexpr bool is_cpu() const { return type == 0; }
  constexpr bool is_cuda() const { return type == 1; }
  bool operator==(const Device& other) const { return type == other.type && (is_cpu() || index == other.index); }
  bool operator!=(const Device& other) const { return !(*this == other); }
};
std::ostream& operator<<(std::ostream& out, const Device& device);

struct Numbers {
  const int64_t* data = nullptr;
  int64_t count = 0;

  int64_t operator[](int64_t i) const { return data[i]; }
  bool operator==(const Numbers& other) const {
    return count == other.count && std::equal(data, data + count, other.data);
  }
};
std::ostream& operator<<(std::ostream& out, const Numbers& numbers);

template <class... Words>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(const Words&... words) {
  std::ostringstream all;
  (all << ... << words);
  throw std::runtime_error(all.str());
}

// How a tensor lies in memory; a borrowed look at one.
struct View {
  const void* data = nullptr;
  ScalarType dtype = ScalarType::Undefined;
  Device device = {};
  bool is_strided = true;  // else there are neither strides nor data
  Numbers sizes = {}, strides = {};

  int64_t dim() const { return sizes.count; }
  int64_t numel() const {
    int64_t elements = 1;
    for (int64_t d = 0; d < dim(); ++d) elements *= sizes[d];
    return elements;
  }
  bool is_contiguous() const {
    int64_t elements = 1;
    for (int64_t d = dim() - 1; d >= 0; --d) {
      if (sizes[d] != 1 && strides[d] != elements) return numel() == 0;
      elements *= sizes[d];
    }
    return true;
  }
  // Whether the tensor's first dimensions are those of a mask.
  bool begins_with(const View& mask) const {
    return dim() >= mask.dim() && std::equal(mask.sizes.data, mask.sizes.data + mask.dim(), sizes.data);
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(const_cast<void*>(data));
  }
};

using Memory = std::shared_ptr<void>;  // what keeps a tensor

// A site's state (kernels.h), checked, so that a hook need not. All tensors lie on one device.
struct Site {
  State state{};
  Device device;
  const int32_t* active = nullptr;  // zero: the kernel returns at once
  int64_t channel_dim = 0;          // not read where the state has one channel
  std::vector<Memory> memory;

  // moments: [fields, channels] float64; counters: [2] int64; histogram, int64: [512] or [channels, 64]; of linear bins
  // [bins + 2] or [channels, bins + 2]; [512 + kBlockBins] where blocks are counted; active: [1] int32. low, high: of
  // linear bins; equal: there are none. block: State.block.
  Site() = default;
  Site(const View& moments, const View& counters, const std::optional<View>& histogram,
       const std::optional<View>& active, int64_t channel_dim, double low, double high, int64_t block,
       std::vector<Memory> memory);
};

// Of the tensors that a mask applies to, those that begin with its shape or have its elements in dimension 0, the rows
// that count. Both int32, on the device of the data, and not written before the kernels that read them have run.
struct Rows {
  View row_index;  // of the mask's shape: at its beginning the numbers of those rows, ascending
  View kept;       // [1]: how many they are; on a GPU it is read by the kernel alone
  std::vector<Memory> memory = {};
};

// Every `every`-th row of a tensor is read, from row `phase` on.
struct Sampling {
  int32_t every = 1, phase = 0;
};

// A tensor as it is read where its rows are sampled: a tensor of fewer rows over the same memory. A row is a contiguous
// run of at least 64 bytes: a token, a line of a plane, a plane where its lines are shorter. Read whole are tensors of
// fewer than `every` rows, those whose channels alone tell rows apart, and those whose rows a mask lists: the list has
// been sampled then. The channel dimension is never cut.
class SampledView {
 public:
  SampledView(const View& x, const Site& site, const Rows* rows, Sampling sampling);
  SampledView(const SampledView&) = delete;
  SampledView& operator=(const SampledView&) = delete;
  const View& view() const { return view_; }

 private:
  View view_;
  int64_t sizes_[Layout::kMaxDims], strides_[Layout::kMaxDims];
};

// Folds `x`, or its rows that count, into the state; in a CUDA graph that is captured, too, and on any stream. One
// kernel on the current stream, two with blocks; nothing is waited for, nor allocated after the first launch on the
// stream. Returns whether there are rows and they are about this tensor. A CUDA graph that is captured reads all of it.
bool accumulate(const View& x, const Site& site, const Rows* rows = nullptr, Sampling sampling = {});

// What a kernel is given for `x`, checked; the data pointer is still to come.
Input described(const View& x, const Site& site, const Rows* rows = nullptr);

// As kernels name it; refuses one that they do not take.
Dtype dtype_of(ScalarType dtype);

// Whether there are the kernels of csrc/cuda. A build without them has no call of one: they would not be found.
#if defined(HOOKSTATS_CUDA) || defined(HOOKSTATS_CUDA_ON_CPU)
constexpr bool kHasCudaKernels = true;
#else
constexpr bool kHasCudaKernels = false;
#endif

// Whether those are a device's: a GPU's, or, in the tests' build, the CPU's (tests/cuda_on_cpu).
constexpr bool runs_cuda_kernels([[maybe_unused]] Device device) {
#if defined(HOOKSTATS_CUDA_ON_CPU)
  return true;
#else
  return kHasCudaKernels && device.is_cuda();
#endif
}

// Refuses a device for which this build has no kernels.
void check_device(Device device);

// The capture into a CUDA graph that a kernel which is launched now on this device becomes part of; 0: none.
unsigned long long capture_on(Device device);

// Around what reads, clears, switches on or gives away memory of monitors on the current stream, so that it comes
// behind launches on other streams, and later ones behind it.
class Closing {
 public:
  explicit Closing(Device device);
  void end() const { end(device_); }
  static void end(Device device);

 private:
  Device device_;
};

// While it lives no CPU kernel writes into any state.
class NoCpuKernel {
 public:
  NoCpuKernel();
  NoCpuKernel(const NoCpuKernel&) = delete;
  NoCpuKernel& operator=(const NoCpuKernel&) = delete;
  ~NoCpuKernel();
};

// Keeps memory that a captured kernel refers to: nobody tells when a CUDA graph is no more.
void keep_for_graphs(const std::vector<Memory>& memory);

#if defined(HOOKSTATS_CUDA_ON_CPU)
// tests/cuda_on_cpu/harness.cpp
extern void* imitated_stream;
extern int imitated_device;
extern bool imitates_foreign_streams;
#endif

}  // namespace hookstats
