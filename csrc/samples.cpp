// Samples of many tensors: on a GPU one launch.

#include <algorithm>

#include "sample.h"
#include "stable.h"

namespace hookstats {
namespace {

// Whether its elements lie side by side, in any order.
bool is_dense(const View& x) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.sizes[d] != 1) dims.emplace_back(x.strides[d], x.sizes[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != expected) return false;
    expected *= size;
  }
  return true;
}

void* buffer_of(const char* name, const Tensor& buffer, const View& x) {
  const auto dtype = x.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  const View view = view_of(buffer);
  if (view.dtype != dtype || view.device != x.device || !view.is_contiguous() ||
      view.numel() != sample_size(x.numel())) {
    refuse("hookstats: sample: ", name, ": expected contiguous ", dtype, " [", sample_size(x.numel()), "] on ",
           x.device, ", got ", view.dtype, " ", view.sizes, " on ", view.device);
  }
  return view.as<void>();
}

Sampled sampled(const View& x, const Tensor& values, const Tensor* differences) {
  if (!x.is_strided || !x.data) {
    refuse("hookstats: sample: expected a plain tensor with data, got a wrapper, a mere shape or another layout");
  }
  if (!is_dense(x)) {
    refuse("hookstats: sample: expected a tensor whose elements lie side by side, got strides ", x.strides,
           " for shape ", x.sizes);
  }
  return {x.data, buffer_of("values", values, x), differences ? buffer_of("differences", *differences, x) : nullptr,
          x.numel(), dtype_of(x.dtype)};
}

// Of each tensor into its `values`; with differences, by how much these have changed into its `differences`. All lie on
// one device.
void sample(Tensors tensors, Tensors values, const std::optional<Tensor>& active, Tensors differences) {
  if (values.size() != tensors.size() || (!differences.empty() && differences.size() != tensors.size())) {
    refuse("hookstats: sample: expected lists of one length, got ", tensors.size(), ", ", values.size(), ", ",
           differences.size());
  }
  if (tensors.empty()) return;
  const Device device = device_of(tensors[0]);
  std::vector<Sampled> all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const View x = view_of(tensors[i]);
    if (x.device != device) {
      refuse("hookstats: sample: expected tensors on one device, got ", device, " and ", x.device);
    }
    if (x.is_strided && x.numel() == 0) continue;
    all.push_back(sampled(x, values[i], differences.empty() ? nullptr : &differences[i]));
  }
  check_device(device);
  const int32_t* flag = active ? view_of(*active).as<const int32_t>() : nullptr;
  if (runs_cuda_kernels(device)) {
    const OnDevice here(device);
    const auto to = launch_on(device, flag, 0, 0);
    if (to.capture) {
      keep_for_graphs(memory_of(MaybeTensors(values.begin(), values.end())));
      keep_for_graphs(memory_of(MaybeTensors(differences.begin(), differences.end())));
      keep_for_graphs(memory_of({active}));
    }
    return cuda::sample(all, to);
  }
  if (!flag || *flag != 0) cpu::sample(all);
}

}  // namespace
}  // namespace hookstats
