// What the files of host code here offer each other.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/library.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

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

// One site's state: see kernels.h. All tensors lie on one device.
struct SiteState {
  at::Tensor moments;                   // [fields, channels] float64
  at::Tensor counters;                  // [2] int64
  std::optional<at::Tensor> histogram;  // int64: [512] or [channels, 64]; linear bins: [bins + 2], [channels, bins + 2]
  std::optional<at::Tensor> active;     // [1] int32; zero: the kernel returns at once
  int64_t channel_dim = 0;              // not read where the state has one channel
  double low = 0, high = 0;             // of linear bins; equal: there are none
  int64_t block = 0;                    // State.block: then the histogram per tensor is of [512 + kBlockBins]
};

// A site's state, checked, so that a hook need not.
struct Site {
  SiteState tensors;
  State state;

  Site() = default;
  explicit Site(SiteState tensors);
};

// The stream on which memory was allocated and written that may be used on other ones, too.
class MadeOn {
 public:
  explicit MadeOn(at::Device device);

  // All has been written. Waits for nothing.
  void written();

  // Before a launch on the current stream that uses it: there it comes behind the writing, and the memory is not given
  // to others before the launch has ended. What a CUDA graph captures must be kept besides, and was waited for by
  // torch.
  void used_here(const std::vector<at::Tensor>& memory) const;

 private:
  at::Device device_;
  std::optional<c10::Stream> stream_;  // none on a CPU
  unsigned long long capture_ = 0;     // in which it was written
  std::shared_ptr<c10::Event> event_;
};

// Around what reads, clears, switches on or gives away memory of monitors on the current stream, so that it comes
// behind launches on other streams, and later ones behind it.
class Closing {
 public:
  explicit Closing(at::Device device);
  void end() const;

 private:
  at::Device device_;
};

// Of the tensors that a mask applies to, those that begin with its shape or have its elements in dimension 0, the rows
// that count. Both int32, on the device of the data, and not written before the kernels that read them have run.
struct Rows {
  at::Tensor row_index;  // of the mask's shape: at its beginning the numbers of those rows, ascending
  at::Tensor kept;       // [1]: how many they are; on a GPU it is read by the kernel alone
  std::shared_ptr<const MadeOn> made = nullptr;  // null: who launches has seen to it
};

// Folds `x`, or its rows that count, into the state; in a CUDA graph that is captured, too, and on any stream. One
// kernel on the current stream, two with blocks; nothing is waited for, nor allocated after the first launch on the
// stream. Throws c10::Error. Returns whether there are rows and they are about this tensor.
bool accumulate(const at::Tensor& x, const Site& site, const Rows* rows = nullptr);

// While it lives no CPU kernel writes into any state.
class NoCpuKernel {
 public:
  NoCpuKernel();
  NoCpuKernel(const NoCpuKernel&) = delete;
  NoCpuKernel& operator=(const NoCpuKernel&) = delete;
  ~NoCpuKernel();
};

// The capture into a CUDA graph that a kernel which is launched now on this device becomes part of; 0: none.
unsigned long long capture_on(at::Device device);
bool is_captured(at::Device device);

// Keeps memory that a captured kernel refers to: nobody tells when a CUDA graph is no more.
void keep_for_graphs(const std::vector<at::Tensor>& memory);
void keep_for_graphs(const SiteState& site, const std::vector<at::Tensor>& others);

// Makes blocks of state on the CPU zero; those elsewhere, on the current stream.
void clear_on_cpu(const std::vector<at::Tensor>& blocks, const NoCpuKernel&);
void clear_on_gpu(const std::vector<at::Tensor>& blocks);

// Makes blocks of state, all on one device, zero between two kernels.
void clear(const std::vector<at::Tensor>& blocks);

// Writes what says whether kernels measure: launches so far find what it was, on any stream, and later ones this. The
// flags' versions stay: compiled graphs keep them for their backward, which is not to refuse them for having changed.
void set_flags(const std::vector<at::Tensor>& flags, int64_t value);

// Before blocks of state, all on one device, are freed: others get the memory behind the launches on all streams.
void give_away(const std::vector<at::Tensor>& blocks);

// Copies of the blocks of a store. On the CPU, of each block the memory of one copy that nobody holds any more is kept
// and used again.
class __attribute__((visibility("hidden"))) Copies {  // as the class that pybind11 makes of it
 public:
  Copies();

  // Copies of these blocks, int64, all on one device, as they are between two kernels; then (clear) the blocks are
  // zero. On a GPU in the order of the current stream.
  std::vector<at::Tensor> take(const std::vector<at::Tensor>& blocks, bool clear);

  // Frees the memory that no copy uses, now or when nobody holds it any more.
  void give_up_spares();

 private:
  struct Spares;
  at::Tensor tensor_for(const at::Tensor& block, size_t number);
  std::shared_ptr<Spares> spares_;
};

// Makes sure that launches on the current stream of this device find their scratch allocated, and that what was cleared
// there can be used on others. The first time, throws where the kernels cannot run there. Returns the bytes of all
// scratch on the device.
int64_t reserve_scratch(at::Device device);

// Loads what tensors of these dtypes (of Dtype) and bins (of HistogramKind) need, where that could not be done while a
// CUDA graph is captured.
void load_kernels(at::Device device, const std::vector<int64_t>& dtypes, int64_t kind);

// Whether the tensor's first dimensions are those of a mask.
inline bool begins_with(const at::Tensor& x, const at::Tensor& mask) {
  return x.dim() >= mask.dim() && x.sizes().slice(0, mask.dim()) == mask.sizes();
}

// As kernels name it; TypeError for one that they do not take.
Dtype dtype_of(at::ScalarType dtype);

// low < high: the histogram is of linear bins. Both NaN: of any bins; it is only to be merged.
State state_of(const at::Tensor& moments, const at::Tensor& counters, const std::optional<at::Tensor>& histogram,
               double low, double high, int64_t block = 0);

// Refuses a device for which this build has no kernels.
void check_device(at::Device device);

// What a kernel is given for `x`, checked; the data pointer is still to come. Throws c10::Error.
Input described(const at::Tensor& x, const Site& site, const Rows* rows = nullptr);

#if defined(HOOKSTATS_CUDA_ON_CPU)
// tests/cuda_on_cpu/harness.cpp
extern void* imitated_stream;
extern int imitated_device;
extern bool imitates_foreign_streams;
#endif

#if defined(HOOKSTATS_CUDA_KERNELS)
// The CUDA kernels run on the GPU, or, in the tests' build, on the CPU (tests/cuda_on_cpu).
bool runs_cuda_kernels(at::Device device);

// The current stream of a device; null on a CPU, but for the tests' build, which imitates streams there.
void* stream_of(at::Device device);

// The same with its scratch, of the usual size, of another one, or without.
cuda::Launch launch_on(at::Device device, const std::optional<at::Tensor>& active,
                       int64_t doubles = cuda::kScratchDoubles, int64_t counters = cuda::kScratchCounters);

void check(const char* cuda_error);

// As the CUDA runtime numbers it.
inline int number_of(at::Device device) {
#if defined(HOOKSTATS_CUDA_ON_CPU)
  return imitated_device;
#else
  return device.is_cpu() ? 0 : device.index();
#endif
}

// A copy of a plan's table there.
at::Tensor on_device(std::vector<unsigned char>& table, at::Device device);
#endif

// The kernels' ParallelFor, on torch's threads.
void parallel_for(int64_t tasks, const std::function<void(int64_t, int64_t)>& body);

// What an operator does on the CPU and, in a build with CUDA kernels, on GPUs. No gradient flows through a statistic,
// and none is stopped: autograd does not look.
template <class Function>
void add_kernels(torch::Library& m, const char* name, Function* function) {
  m.impl(name, torch::dispatch(c10::DispatchKey::CPU, function));
#if defined(HOOKSTATS_CUDA)
  m.impl(name, torch::dispatch(c10::DispatchKey::CUDA, function));
#endif
  m.impl(name, torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
}

// For tensors without data, of operators that return nothing.
void do_nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack);

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
