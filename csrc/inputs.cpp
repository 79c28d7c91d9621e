// Tensors as kernels are given them, checked: dtypes, states, layouts, the rows that count.

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include <string>
#include <utility>

#include "ops.h"

namespace hookstats {
namespace {

#define HOOKSTATS_DTYPE_NAME(name, type, aten) " " #name
constexpr const char* kDtypeNames = "" HOOKSTATS_DTYPES(HOOKSTATS_DTYPE_NAME);

bool has_device_kernels([[maybe_unused]] at::Device device) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  return runs_cuda_kernels(device);
#else
  return false;
#endif
}

// How many of the tensor's first dimensions are rows of the mask; 0: the mask is not about it, all of it counts.
int64_t row_dims_of(const at::Tensor& x, int64_t channel, const at::Tensor& mask) {
  int64_t dims = 0;
  if (begins_with(x, mask)) {
    dims = mask.dim();
  } else if (x.dim() > 0 && x.size(0) == mask.numel()) {
    dims = 1;
  }
  return 0 <= channel && channel < dims ? 0 : dims;
}

// The rows of a layout that count.
void look_up(Layout& layout, const Rows& rows, at::Device device) {
  layout.row_index = rows.row_index.const_data_ptr<int32_t>();
  layout.kept = rows.kept.const_data_ptr<int32_t>();
  if (!has_device_kernels(device)) layout.count = *std::exchange(layout.kept, nullptr) * layout.row_size();
}

Layout layout_of(const at::Tensor& x, const State& state, int64_t channel_dim, const Rows* rows) {
  Layout layout;
  const int64_t ndim = x.dim();
  const int64_t dim = channel_dim_for(channel_dim, ndim).value_or(ndim);  // ndim: none
  const int64_t named = dim < 0 ? dim + ndim : dim;
  int64_t channel = -1;
  if (state.channels > 1) {
    channel = named;
    TORCH_CHECK_INDEX(0 <= channel && channel < ndim, "hookstats: channel_dim=", dim,
                      " is out of range for a tensor of shape ", x.sizes());
    TORCH_CHECK_VALUE(x.size(channel) == state.channels, "hookstats: expected ", state.channels,
                      " channels in dimension ", dim, ", got a tensor of shape ", x.sizes());
    layout.channels = state.channels;
    layout.channel_stride = x.stride(channel);
  }
  if (!rows && (channel < 0 || channel == ndim - 1) && x.numel() > 0 && x.is_contiguous()) {  // most tensors are
    Layout::Dim dim_of_rows{x.numel() / layout.channels, layout.channels};
    layout.set_dims(&dim_of_rows, 1);
    return layout;
  }
  c10::SmallVector<Layout::Dim, 8> dims;
  for (int64_t d = 0; d < ndim; ++d) {
    if (d != channel) dims.push_back({x.size(d), x.stride(d)});
  }
  const int64_t row_dims = rows ? row_dims_of(x, named, rows->row_index) : 0;
  TORCH_CHECK_VALUE(layout.set_dims(dims.data(), int(dims.size()), int(row_dims)), "hookstats: expected at most ",
                    Layout::kMaxDims, " dimensions that do not merge beside the channels, got strides ", x.strides(),
                    " for shape ", x.sizes());
  if (row_dims > 0) look_up(layout, *rows, x.device());
  return layout;
}

// The last dimension as channels, the others in the tensor's order. by_rows: the mask's rows are about the tensor;
// where they are all of its dimensions, it has one channel.
Layout matrix_of(const at::Tensor& x, const Rows* by_rows) {
  Layout layout;
  const int64_t ndim = x.dim(), row_dims = by_rows ? row_dims_of(x, -1, by_rows->row_index) : 0;
  const int64_t others = row_dims == ndim ? ndim : ndim - 1;
  if (others < ndim) {
    layout.channels = x.size(others);
    layout.channel_stride = x.stride(others);
  }
  c10::SmallVector<Layout::Dim, 8> dims;
  for (int64_t d = 0; d < others; ++d) dims.push_back({x.size(d), x.stride(d)});
  bool fits = layout.add_dims(dims.data(), int(row_dims));
  if (row_dims > 0 && layout.ndim == 0) layout.size[layout.ndim++] = 1;
  layout.row_dims = row_dims > 0 ? layout.ndim : 0;
  fits = fits && layout.add_dims(dims.data() + row_dims, int(others - row_dims));
  TORCH_CHECK_VALUE(fits, "hookstats: expected at most ", Layout::kMaxDims,
                    " dimensions that do not merge, got strides ", x.strides(), " for shape ", x.sizes());
  if (row_dims > 0) look_up(layout, *by_rows, x.device());
  return layout;
}

void check_one_int32(const char* name, const at::Tensor& x, at::Device device) {
  TORCH_CHECK(x.scalar_type() == at::kInt && x.numel() == 1 && x.device() == device, "hookstats: ", name,
              ": expected one int32 on ", device, ", got ", x.scalar_type(), " ", x.sizes(), " on ", x.device());
}

void check_rows(const Rows& rows, at::Device device) {
  const at::Tensor& row_index = rows.row_index;
  TORCH_CHECK(row_index.scalar_type() == at::kInt && row_index.is_contiguous() && row_index.device() == device,
              "hookstats: rows: expected contiguous int32 on ", device, ", got ", row_index.scalar_type(), " ",
              row_index.sizes(), " with strides ", row_index.strides(), " on ", row_index.device());
  check_one_int32("kept", rows.kept, device);
  if (has_device_kernels(device)) return;
  const int32_t kept = *rows.kept.const_data_ptr<int32_t>();
  TORCH_CHECK_VALUE(0 <= kept && kept <= row_index.numel(), "hookstats: kept: expected 0 to ", row_index.numel(),
                    " rows, got ", kept);
}

}  // namespace

Dtype dtype_of(at::ScalarType dtype) {
  switch (dtype) {
#define HOOKSTATS_CASE(name, type, aten) \
  case at::ScalarType::aten:             \
    return Dtype::name;
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
    default:
      TORCH_CHECK_TYPE(false, "hookstats: expected a tensor of one of", kDtypeNames, ", got ", dtype);
  }
}

State state_of(const at::Tensor& moments, const at::Tensor& counters, const std::optional<at::Tensor>& histogram,
               double low, double high, int64_t block) {
  TORCH_CHECK(moments.scalar_type() == at::kDouble && moments.dim() == 2 && moments.size(0) == kFields &&
                  moments.size(1) >= 1 && (moments.size(1) == 1 || moments.stride(1) == 1),
              "hookstats: moments: expected float64 [", int(kFields), ", channels] with adjacent channels, got ",
              moments.scalar_type(), " ", moments.sizes(), " with strides ", moments.strides());
  TORCH_CHECK(counters.scalar_type() == at::kLong && counters.dim() == 1 && counters.size(0) == kCounters &&
                  counters.is_contiguous() && counters.device() == moments.device(),
              "hookstats: counters: expected int64 [", int(kCounters), "] on ", moments.device(), ", got ",
              counters.scalar_type(), " ", counters.sizes(), " on ", counters.device());
  State state{};
  state.moments = moments.mutable_data_ptr<double>();
  state.row_stride = moments.stride(0);
  state.channels = moments.size(1);
  state.counters = counters.mutable_data_ptr<int64_t>();
  if (histogram) {
    const auto& h = *histogram;
    const bool exponents = low == high;
    state.by_channel = h.dim() == 2;
    state.bins = h.dim() ? int(h.size(-1)) : 0;
    state.low = low;
    state.high = high;
    state.kind = !exponents         ? HistogramKind::linear
                 : state.by_channel ? HistogramKind::per_channel
                                    : HistogramKind::per_tensor;
    state.block = int(block);
    const bool is_block = block == 0 || ((std::abs(block) == 16 || std::abs(block) == 32) && exponents && h.dim() == 1);
    TORCH_CHECK_VALUE(is_block, "hookstats: block: expected 16, 32, -16 or -32 beside exponents per tensor, or 0; got ",
                      block);
    const int expected = state.by_channel ? kOctaveBins : kExponentBins + (block ? kBlockBins : 0);
    const bool fits = state.by_channel ? h.size(0) == state.channels : h.dim() == 1;
    TORCH_CHECK(h.scalar_type() == at::kLong && fits && (exponents ? state.bins == expected : state.bins > 2) &&
                    h.is_contiguous() && h.device() == moments.device(),
                "hookstats: histogram: expected int64 [", block ? expected : kExponentBins, "] or [", state.channels,
                ", ", kOctaveBins, "] on ", moments.device(), ", or with low < high [bins + 2] or [", state.channels,
                ", bins + 2]; got ", h.scalar_type(), " ", h.sizes(), " on ", h.device(), " with low=", low,
                ", high=", high);
    state.histogram = h.mutable_data_ptr<int64_t>();
  }
  return state;
}

void check_device(at::Device device) {
  if (has_device_kernels(device)) return;
  TORCH_CHECK(device.is_cpu(), "hookstats: this build has no kernels for ", device);
}

Site::Site(SiteState of)
    : tensors(std::move(of)),
      state(state_of(tensors.moments, tensors.counters, tensors.histogram, tensors.low, tensors.high, tensors.block)) {
  const auto device = tensors.moments.device();
  check_device(device);
  if (tensors.active) check_one_int32("active", *tensors.active, device);
}

Input described(const at::Tensor& x, const Site& site, const Rows* rows) {
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, "hookstats: expected a dense strided tensor, got layout ", x.layout());
  const auto device = site.tensors.moments.device();
  TORCH_CHECK(x.device() == device, "hookstats: expected a tensor on ", device, ", where its state is, got one on ",
              x.device());
  const Dtype dtype = dtype_of(x.scalar_type());
  if (rows) check_rows(*rows, device);
  Input input{nullptr, dtype, layout_of(x, site.state, site.tensors.channel_dim, rows)};
  if (site.state.block) input.matrix = matrix_of(x, input.layout.row_dims > 0 ? rows : nullptr);
  return input;
}

bool has_no_data(const at::Tensor& x) {
  return x.is_meta() || !x.has_storage() || x.key_set().has(c10::DispatchKey::Python);
}

}  // namespace hookstats
