// Tensors of this torch: as views, whether they have data, the streams that they were written on; what of them counts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/graph_task.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#include "ops.h"

namespace hookstats {

inline Device device_of(at::Device device) { return {int(device.type()), device.is_cpu() ? 0 : int(device.index())}; }

// Of a tensor with a storage.
inline View view_of(const at::Tensor& x) {
  View view{nullptr, x.scalar_type(), device_of(x.device()), x.layout() == at::kStrided};
  if (!view.is_strided) return view;
  view.data = x.const_data_ptr();
  view.sizes = {x.sizes().data(), x.dim()};
  view.strides = {x.strides().data(), x.dim()};
  return view;
}

inline std::vector<Memory> memory_of(std::initializer_list<at::Tensor> all) {
  std::vector<Memory> memory;
  for (const at::Tensor& each : all) {
    if (each.defined()) memory.push_back(std::make_shared<at::Tensor>(each));
  }
  return memory;
}

// Wrappers without memory of their own: fake and meta tensors, and what functorch makes. Their own keys tell; a
// dispatch mode that is merely active (selective checkpointing, FLOP counting) changes nothing about the data.
inline bool has_no_data(const at::Tensor& x) {
  return x.is_meta() || !x.has_storage() || x.key_set().has(c10::DispatchKey::Python);
}

// Whether this thread is inside backward(): a forward seen there is a recomputation.
inline bool backward_is_running() { return torch::autograd::get_current_graph_task_id() != -1; }

// The stream on which memory was allocated and written that may be used on other ones, too.
class MadeOn {
 public:
  explicit MadeOn(at::Device device) : device_(device) {
    if (!device.is_cpu()) stream_ = stream_here();
  }

  // All has been written. Waits for nothing.
  void written() {
    if (!stream_) return;
    capture_ = capture_on(device_of(device_));
    event_ = std::make_shared<c10::Event>(device_.type());
    event_->record(*stream_);
  }

  // Before a launch on the current stream that uses it: there it comes behind the writing, and the memory is not given
  // to others before the launch has ended. What a CUDA graph captures must be kept besides, and was waited for by
  // torch.
  void used_here(const std::vector<at::Tensor>& memory) const {
    if (!stream_) return;
    const auto here = stream_here();
    // What was made in a capture can be waited for there alone. Before a capture, torch has waited for all.
    if (here == *stream_ || capture_on(device_of(device_)) != capture_) return;
    event_->block(here);
    if (capture_) return;  // the memory is its graph's
    for (const at::Tensor& each : memory) each.record_stream(here);
  }

 private:
  c10::Stream stream_here() const { return c10::impl::getDeviceGuardImpl(device_.type())->getStream(device_); }

  at::Device device_;
  std::optional<c10::Stream> stream_;  // none on a CPU
  unsigned long long capture_ = 0;     // in which it was written
  std::shared_ptr<c10::Event> event_;
};

// Rows that count, as tensors: see Rows.
struct Counting {
  at::Tensor row_index, kept;
  std::shared_ptr<const MadeOn> made = nullptr;  // null: who launches has seen to it

  Rows views() const {
    // Only what is captured is kept, and nothing is on a CPU.
    return {view_of(row_index), view_of(kept),
            row_index.is_cpu() ? std::vector<Memory>() : memory_of({row_index, kept})};
  }
  void used_here() const {
    if (made) made->used_here({row_index, kept});
  }
};

}  // namespace hookstats
