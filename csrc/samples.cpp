// Samples of many tensors: on a GPU one launch.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "ops.h"
#include "sample.h"

namespace hookstats {
namespace {

void* buffer_of(const char* name, const at::Tensor& buffer, const at::Tensor& x) {
  const auto dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  TORCH_CHECK_VALUE(buffer.scalar_type() == dtype && buffer.device() == x.device() && buffer.is_contiguous() &&
                        buffer.numel() == sample_size(x.numel()),
                    "hookstats: sample: ", name, ": expected contiguous ", dtype, " [", sample_size(x.numel()), "] on ",
                    x.device(), ", got ", buffer.scalar_type(), " ", buffer.sizes(), " on ", buffer.device());
  return buffer.mutable_data_ptr();
}

Sampled sampled(const at::Tensor& x, const at::Tensor& values, const at::Tensor* differences) {
  TORCH_CHECK_TYPE(x.layout() == at::kStrided && !has_no_data(x),
                   "hookstats: sample: expected a plain tensor with data, got a wrapper, a mere shape or layout ",
                   x.layout());
  TORCH_CHECK_VALUE(x.is_non_overlapping_and_dense() && !x.is_neg(),
                    "hookstats: sample: expected a tensor whose elements lie side by side, got strides ", x.strides(),
                    " for shape ", x.sizes());
  return {x.const_data_ptr(), buffer_of("values", values, x),
          differences ? buffer_of("differences", *differences, x) : nullptr, x.numel(), dtype_of(x.scalar_type())};
}

// Of each tensor into its `values`; with differences, by how much these have changed into its `differences`. All lie on
// one device.
void sample(at::TensorList tensors, at::TensorList values, const std::optional<at::Tensor>& active,
            at::TensorList differences) {
  TORCH_CHECK_VALUE(values.size() == tensors.size() && (differences.empty() || differences.size() == tensors.size()),
                    "hookstats: sample: expected lists of one length, got ", tensors.size(), ", ", values.size(), ", ",
                    differences.size());
  if (tensors.empty()) return;
  const auto device = tensors[0].device();
  std::vector<Sampled> all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].device() == device, "hookstats: sample: expected tensors on one device, got ", device,
                      " and ", tensors[i].device());
    if (tensors[i].numel() == 0) continue;
    all.push_back(sampled(tensors[i], values[i], differences.empty() ? nullptr : &differences[i]));
  }
  const int32_t* flag = active.has_value() ? active->const_data_ptr<int32_t>() : nullptr;
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (runs_cuda_kernels(device)) {
    const c10::DeviceGuard guard(device);
    const auto to = launch_on(device, active, 0, 0);
    if (to.capture) {
      keep_for_graphs(values.vec());
      keep_for_graphs(differences.vec());
      if (active) keep_for_graphs({*active});
    }
    check(cuda::sample(all, to));
    return;
  }
#endif
  if (!flag || *flag != 0) cpu::sample(all);
}

TORCH_LIBRARY_FRAGMENT(HOOKSTATS_NAMESPACE, m) {
  m.def("sample(Tensor[] tensors, Tensor(a!)[] values, Tensor? active, Tensor(b!)[] differences) -> ()");
  add_kernels(m, "sample", sample);
}

}  // namespace
}  // namespace hookstats
