// Tensors of torch's stable ABI, as the operators are given them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ops.h"

#if !defined(STABLE_TORCH_ERROR_CODE_CHECK)  // its name in torch 2.11
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace hookstats {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using MaybeTensors = std::vector<std::optional<Tensor>>;
namespace stable = torch::stable;

Device device_of(const Tensor& x);
View view_of(const Tensor& x);
std::optional<View> view_of(const std::optional<Tensor>& x);
Memory memory_of(const Tensor& x);
std::vector<Memory> memory_of(const MaybeTensors& all);
std::optional<Rows> rows_of(const std::optional<Tensor>& row_index, const std::optional<Tensor>& kept);
Site site_of(const Tensor& moments, const Tensor& counters, const std::optional<Tensor>& histogram,
             const std::optional<Tensor>& active, int64_t channel_dim = 0, double low = 0, double high = 0,
             int64_t block = 0);

// Not initialized.
Tensor empty(std::vector<int64_t> sizes, ScalarType dtype, Device device);

// A copy on the CPU.
Tensor bytes_of(const void* data, size_t count);

// What Python has a number of, until it lets go of it.
struct Held {
  virtual ~Held() = default;
};

template <class T>
int64_t hold(std::unique_ptr<T> made) {
  return reinterpret_cast<int64_t>(static_cast<Held*>(made.release()));
}

template <class T>
T& held(int64_t number) {
  return *static_cast<T*>(reinterpret_cast<Held*>(number));
}

// A site that is checked once, for Python.
struct HeldSite : Held {
  Site site;
};

// The kernels' ParallelFor, on torch's threads.
void parallel_for(int64_t tasks, const std::function<void(int64_t, int64_t)>& body);

// Makes blocks of state on the CPU zero; those elsewhere, on the current stream.
void clear_on_cpu(const Tensors& blocks, const NoCpuKernel&);
void clear_on_gpu(const Tensors& blocks);

// Makes sure that launches on the current stream of this device find their scratch allocated. The first time, throws
// where the kernels cannot run there. Returns the bytes of all scratch on the device.
int64_t reserve_scratch(Device device);

// The current stream of a device with CUDA kernels.
cuda::Stream current_stream(Device device);

// The same with its scratch, of the usual size, of another one, or without.
inline cuda::Launch launch_on(Device device, const int32_t* active, int64_t doubles = cuda::kScratchDoubles,
                              int64_t counters = cuda::kScratchCounters) {
  return cuda::launch_on(current_stream(device), active, doubles, counters);
}

// As the CUDA runtime numbers it.
inline int number_of(Device device) {
#if defined(HOOKSTATS_CUDA_ON_CPU)
  return imitated_device;
#else
  return device.index;
#endif
}

// While it lives, what torch allocates and launches is on this device.
class __attribute__((visibility("hidden"))) OnDevice {  // as the guard
 public:
  explicit OnDevice(Device device) {
    if (device.is_cuda()) guard_.emplace(device.index);
  }

 private:
  std::optional<stable::accelerator::DeviceGuard> guard_;
};

// A copy of a plan's table there. Waits until it is written.
Tensor on_device(std::vector<unsigned char>& table, Device device);

}  // namespace hookstats
