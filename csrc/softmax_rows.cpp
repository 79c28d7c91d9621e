// The softmax of rows of logits, in numbers: on a GPU one launch. _native says what shape comes of mere shapes.

#include "stable.h"

namespace hookstats {
namespace {

// False: more dimensions than a layout has that do not merge.
bool describe_rows(SoftmaxRows& rows, const View& logits, int64_t top_k) {
  const int64_t last = logits.dim() - 1, n = logits.sizes[last];
  std::vector<Layout::Dim> dims;
  for (int64_t d = 0; d < last; ++d) dims.push_back({logits.sizes[d], logits.strides[d]});
  rows = {logits.data, {}, n, n > 1 ? logits.strides[last] : 1, int(top_k)};
  return rows.at.add_dims(dims.data(), int(dims.size()));
}

Tensor softmax_rows(const Tensor& given, int64_t top_k) {
  Tensor logits = given;
  View view = view_of(logits);
  if (view.dim() == 0) refuse("hookstats: softmax_rows: expected logits [..., n], got a tensor of no dimensions");
  if (top_k < 0 || top_k >= kMostKept || (top_k > 0 && top_k >= view.sizes[view.dim() - 1])) {
    refuse("hookstats: softmax_rows: expected top_k from 1 to ", kMostKept - 1,
           " and less than the number of logits of a row, ", view.sizes[view.dim() - 1], "; got ", top_k);
  }
  const Device device = view.device;
  check_device(device);
  const Dtype dtype = dtype_of(view.dtype);
  std::vector<int64_t> sizes(view.sizes.data, view.sizes.data + view.dim() - 1);
  sizes.insert(sizes.begin(), kSoftmaxFields + (top_k > 0));
  Tensor out = empty(sizes, view.dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float, device);
  SoftmaxRows rows{};
  if (!describe_rows(rows, view, top_k)) {
    logits = stable::contiguous(logits);
    view = view_of(logits);
    describe_rows(rows, view, top_k);
  }
  if (rows.rows() == 0) return out;
  if (rows.n > 0 && !rows.data) refuse("hookstats: softmax_rows: expected logits with data");
  const OnDevice here(device);
  runs_cuda_kernels(device) ? cuda::softmax_rows(rows, dtype, out.mutable_data_ptr(), current_stream(device))
                            : cpu::softmax_rows(rows, dtype, out.mutable_data_ptr(), parallel_for);
  return out;
}

}  // namespace
}  // namespace hookstats
