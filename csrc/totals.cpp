// The totals of many sites, all channels of each together: on a GPU one launch.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/custom_class.h>

#include <cstring>
#include <type_traits>

#include "ops.h"

namespace hookstats {
namespace {

// The states of sites on one device, as a table that the kernel reads, made once.
class Totals : public torch::CustomClassHolder {
 public:
  Totals(std::vector<at::Tensor> moments, std::vector<at::Tensor> counters)
      : moments_(std::move(moments)), counters_(std::move(counters)) {
    const size_t n = moments_.size();
    TORCH_CHECK_VALUE(n > 0 && counters_.size() == n,
                      "hookstats: Totals: expected two lists of one length from 1, got ", n, " and ", counters_.size());
    const auto device = moments_[0].device();
    for (size_t i = 0; i < n; ++i) {
      TORCH_CHECK_VALUE(moments_[i].device() == device, "hookstats: Totals: expected states on one device, got ",
                        device, " and ", moments_[i].device());
      states_.push_back(Site({moments_[i], counters_[i], {}, {}}).state);
    }
#if defined(HOOKSTATS_CUDA_KERNELS)
    if (!runs_cuda_kernels(device)) return;
    // Out of pinned memory, in the stream's order: a step that takes totals does not wait, not even the first time.
    static_assert(std::is_trivially_copyable_v<State>);
    plan_ = cuda::plan_totals(states_);
    const int64_t bytes = plan_.table.size();
    const auto table = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(device.is_cuda()));
    memcpy(table.mutable_data_ptr(), plan_.table.data(), bytes);
    stream_.emplace(device);
    table_ = table.to(device, at::kByte, /*non_blocking=*/true, /*copy=*/true);
    stream_->written();
#endif
  }

  // Of each site in a row: fields, as the bits of float64, then counters. int64 [sites, kTotalsWords]. Then the blocks
  // of memory, which are those of the states, or none, are zero; no kernel comes between.
  at::Tensor take(const std::vector<at::Tensor>& blocks) const {
    const auto device = moments_[0].device();
    const int64_t n = states_.size();
    at::Tensor out = at::empty({n, kTotalsWords}, at::TensorOptions().device(device).dtype(at::kLong));
    auto* words = out.mutable_data_ptr<int64_t>();
#if defined(HOOKSTATS_CUDA_KERNELS)
    if (runs_cuda_kernels(device)) {
      const c10::DeviceGuard guard(device);
      const Closing closing(device);
      stream_->used_here({table_});
      // Of this call, whose stream may be another one than that of the last.
      at::Tensor scratch;
      if (plan_.scratch) scratch = at::zeros({plan_.scratch}, out.options());
      auto* parts = plan_.scratch ? scratch.mutable_data_ptr<int64_t>() : nullptr;
      check(cuda::totals(plan_, table_.const_data_ptr(), parts, words, launch_on(device, std::nullopt, 0, 0)));
      clear_on_gpu(blocks);
      closing.end();
      clear_on_cpu(blocks, NoCpuKernel());  // of tests that imitate a GPU
      return out;
    }
#endif
    const NoCpuKernel none;
    cpu::totals(states_.data(), n, words, parallel_for);
    clear_on_cpu(blocks, none);
    return out;
  }

 private:
  std::vector<at::Tensor> moments_, counters_;  // the states' memory
  std::vector<State> states_;
#if defined(HOOKSTATS_CUDA_KERNELS)
  cuda::TotalsPlan plan_{};
  at::Tensor table_;  // its table on the device
  std::optional<MadeOn> stream_;
#endif
};

TORCH_LIBRARY_FRAGMENT(HOOKSTATS_NAMESPACE, m) {
  m.class_<Totals>("Totals")
      .def(torch::init<std::vector<at::Tensor>, std::vector<at::Tensor>>())
      .def("take", &Totals::take);
}

}  // namespace
}  // namespace hookstats
