// The softmax of rows of logits, in numbers: on a GPU one launch.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "ops.h"

namespace hookstats {
namespace {

// [numbers, ...], each as large as the logits without their last dimension.
at::Tensor empty_for(const at::Tensor& logits, int64_t top_k) {
  TORCH_CHECK_VALUE(logits.dim() > 0,
                    "hookstats: softmax_rows: expected logits [..., n], got a tensor of no dimensions");
  TORCH_CHECK_VALUE(0 <= top_k && top_k < kMostKept && (top_k == 0 || top_k < logits.sym_size(-1)),
                    "hookstats: softmax_rows: expected top_k from 1 to ", kMostKept - 1,
                    " and less than the number of logits of a row, ", logits.sym_size(-1), "; got ", top_k);
  auto sizes = logits.sym_sizes().vec();
  sizes.pop_back();
  sizes.insert(sizes.begin(), kSoftmaxFields + (top_k > 0));
  const auto dtype = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty_symint(sizes, logits.options().dtype(dtype).layout(at::kStrided));
}

at::Tensor softmax_rows(const at::Tensor& given, int64_t top_k) {
  const at::Tensor out = empty_for(given, top_k);
  at::Tensor logits = given.resolve_neg();
  const Dtype dtype = dtype_of(logits.scalar_type());
  SoftmaxRows rows{};
  const auto describe = [&] {
    c10::SmallVector<Layout::Dim, 8> dims;
    for (int64_t d = 0; d < logits.dim() - 1; ++d) dims.push_back({logits.size(d), logits.stride(d)});
    rows = {logits.const_data_ptr(), {}, logits.size(-1), logits.size(-1) > 1 ? logits.stride(-1) : 1, int(top_k)};
    return rows.at.add_dims(dims.data(), int(dims.size()));
  };
  if (!describe()) {  // more dimensions than a layout has that do not merge
    logits = logits.contiguous();
    describe();
  }
  if (rows.rows() == 0) return out;
  TORCH_CHECK_VALUE(rows.n == 0 || rows.data, "hookstats: softmax_rows: expected logits with data");
#if defined(HOOKSTATS_CUDA_KERNELS)
  const auto device = logits.device();
  if (runs_cuda_kernels(device)) {
    const c10::DeviceGuard guard(device);
    check(cuda::softmax_rows(rows, dtype, out.mutable_data_ptr(), stream_of(device), number_of(device)));
    return out;
  }
#endif
  cpu::softmax_rows(rows, dtype, out.mutable_data_ptr(), parallel_for);
  return out;
}

TORCH_LIBRARY_FRAGMENT(HOOKSTATS_NAMESPACE, m) {
  m.def("softmax_rows(Tensor logits, int top_k=0) -> Tensor");
  add_kernels(m, "softmax_rows", softmax_rows);
  m.impl("softmax_rows", torch::dispatch(c10::DispatchKey::Meta, empty_for));
}

}  // namespace
}  // namespace hookstats
