// Checksums of the bits of many tensors: on a GPU one launch.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "ops.h"

namespace hookstats {
namespace {

Words words_of(const at::Tensor& x) {
  const auto bytes = int64_t(x.element_size());
  const int64_t parts = bytes > 8 ? bytes / 8 : 1;  // of an element: a complex128 is two words
  c10::SmallVector<Layout::Dim, 8> dims;
  for (int64_t d = 0; d < x.dim(); ++d) dims.push_back({x.size(d), x.stride(d) * parts});
  dims.push_back({parts, 1});
  Words words{x.const_data_ptr(), {}, int(bytes / parts)};
  if (words.layout.add_dims(dims.data(), int(dims.size()))) return words;
  return {};
}

// Of each tensor, int64 [tensors] on their device. Equal where shape, dtype and bits are: csrc/checksum.h.
at::Tensor checksums(at::TensorList tensors) {
  const auto device = tensors[0].device();
  std::vector<at::Tensor> held;
  std::vector<Words> words;
  for (const at::Tensor& each : tensors) {
    TORCH_CHECK_VALUE(each.device() == device, "hookstats: checksums: expected tensors on one device, got ", device,
                      " and ", each.device());
    TORCH_CHECK_VALUE(each.numel() == 0 || each.const_data_ptr(),
                      "hookstats: checksums: expected tensors with data, got one whose storage is empty");
    held.push_back(each.is_conj() || each.is_neg() ? each.resolve_conj().resolve_neg() : each);
    words.push_back(words_of(held.back()));
    if (words.back().element_bytes == 0) {  // more dimensions than a layout has that do not merge
      held.back() = held.back().contiguous();
      words.back() = words_of(held.back());
    }
  }
  const at::Tensor out = at::zeros({int64_t(words.size())}, at::TensorOptions().device(device).dtype(at::kLong));
  auto* sums = reinterpret_cast<uint64_t*>(out.mutable_data_ptr<int64_t>());
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (runs_cuda_kernels(device)) {
    auto plan = cuda::plan_checksums(words);
    if (plan.blocks == 0) return out;
    const c10::DeviceGuard guard(device);
    const at::Tensor table = on_device(plan.table, device);
    check(cuda::checksums(plan, table.const_data_ptr(), sums, stream_of(device), number_of(device)));
    return out;
  }
#endif
  cpu::checksums(words, sums, parallel_for);
  return out;
}

TORCH_LIBRARY_FRAGMENT(HOOKSTATS_NAMESPACE, m) {
  m.def("checksums(Tensor[] tensors) -> Tensor");
  add_kernels(m, "checksums", checksums);
}

}  // namespace
}  // namespace hookstats
