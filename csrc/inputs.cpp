// Tensors as kernels are given them, checked: dtypes, states, layouts, the rows that count. Knows of no kind of tensor.

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "stable.h"

namespace hookstats {
namespace {

#define HOOKSTATS_DTYPE_NAME(name, type, aten) " " #name
constexpr const char* kDtypeNames = "" HOOKSTATS_DTYPES(HOOKSTATS_DTYPE_NAME);

// How many of the tensor's first dimensions are rows of the mask; 0: the mask is not about it, all of it counts.
int64_t row_dims_of(const View& x, int64_t channel, const View& mask) {
  int64_t dims = 0;
  if (x.begins_with(mask)) {
    dims = mask.dim();
  } else if (x.dim() > 0 && x.sizes[0] == mask.numel()) {
    dims = 1;
  }
  return 0 <= channel && channel < dims ? 0 : dims;
}

// The rows of a layout that count.
void look_up(Layout& layout, const Rows& rows, Device device) {
  layout.row_index = rows.row_index.as<const int32_t>();
  layout.kept = rows.kept.as<const int32_t>();
  if (!runs_cuda_kernels(device)) layout.count = *std::exchange(layout.kept, nullptr) * layout.row_size();
}

// All dimensions but that of the channels, -1: none, in the tensor's order or by their strides. The first `row_dims`
// are those of the mask's rows.
Layout lay_out(const View& x, int64_t channel, int64_t row_dims, const Rows* rows, bool by_strides) {
  constexpr int kMostDims = 64;  // as torch's own operators take
  Layout layout;
  Layout::Dim dims[kMostDims];
  int n = 0;
  for (int64_t d = 0; d < x.dim() && n < kMostDims; ++d) {
    if (d != channel) dims[n++] = {x.sizes[d], x.strides[d]};
  }
  for (int i = int(row_dims) + 1; by_strides && i < n; ++i) {  // not std::stable_sort, which allocates
    for (int d = i; d > row_dims && dims[d - 1].stride < dims[d].stride; --d) std::swap(dims[d - 1], dims[d]);
  }
  if (x.dim() > kMostDims || !layout.set_dims(dims, n, int(row_dims))) {
    refuse("hookstats: expected at most ", Layout::kMaxDims,
           " dimensions that do not merge beside the channels, got strides ", x.strides, " for shape ", x.sizes);
  }
  if (channel >= 0) {
    layout.channels = x.sizes[channel];
    layout.channel_stride = x.strides[channel];
  }
  if (row_dims > 0) look_up(layout, *rows, x.device);
  return layout;
}

Layout layout_of(const View& x, const State& state, int64_t channel_dim, const Rows* rows) {
  const int64_t ndim = x.dim();
  const int64_t dim = channel_dim_for(channel_dim, ndim).value_or(ndim);  // ndim: none
  const int64_t named = dim < 0 ? dim + ndim : dim, channel = state.channels > 1 ? named : -1;
  if (state.channels > 1) {
    if (channel < 0 || channel >= ndim) {
      refuse("hookstats: channel_dim=", dim, " is out of range for a tensor of shape ", x.sizes);
    }
    if (x.sizes[channel] != state.channels) {
      refuse("hookstats: expected ", state.channels, " channels in dimension ", dim, ", got a tensor of shape ",
             x.sizes);
    }
  }
  if (!rows && (channel < 0 || channel == ndim - 1) && x.is_contiguous()) {  // most tensors are
    if (const int64_t elements = x.numel()) {
      Layout layout;
      const Layout::Dim dim_of_rows{elements / state.channels, state.channels};
      layout.set_dims(&dim_of_rows, 1);
      layout.channels = state.channels;
      layout.channel_stride = channel < 0 ? 0 : 1;
      return layout;
    }
  }
  return lay_out(x, channel, rows ? row_dims_of(x, named, rows->row_index) : 0, rows, true);
}

// The last dimension as channels, the others in the tensor's order. rows: they are about the tensor; where they are all
// of its dimensions, it has one channel.
Layout matrix_of(const View& x, const Rows* rows) {
  const int64_t ndim = x.dim(), row_dims = rows ? row_dims_of(x, -1, rows->row_index) : 0;
  return lay_out(x, row_dims == ndim ? -1 : ndim - 1, row_dims, rows, false);
}

State state_of(const View& moments, const View& counters, const std::optional<View>& histogram, double low, double high,
               int64_t block) {
  if (moments.dtype != ScalarType::Double || moments.dim() != 2 || moments.sizes[0] != kFields ||
      moments.sizes[1] < 1 || (moments.sizes[1] > 1 && moments.strides[1] != 1)) {
    refuse("hookstats: moments: expected float64 [", int(kFields), ", channels] with adjacent channels, got ",
           moments.dtype, " ", moments.sizes, " with strides ", moments.strides);
  }
  if (counters.dtype != ScalarType::Long || counters.dim() != 1 || counters.sizes[0] != kCounters ||
      !counters.is_contiguous() || counters.device != moments.device) {
    refuse("hookstats: counters: expected int64 [", int(kCounters), "] on ", moments.device, ", got ", counters.dtype,
           " ", counters.sizes, " on ", counters.device);
  }
  State state{};
  state.moments = moments.as<double>();
  state.row_stride = moments.strides[0];
  state.channels = moments.sizes[1];
  state.counters = counters.as<int64_t>();
  if (!histogram) return state;
  const View& h = *histogram;
  const bool exponents = low == high;
  state.by_channel = h.dim() == 2;
  state.bins = h.dim() ? int(h.sizes[h.dim() - 1]) : 0;
  state.low = low;
  state.high = high;
  state.kind = !exponents         ? HistogramKind::linear
               : state.by_channel ? HistogramKind::per_channel
                                  : HistogramKind::per_tensor;
  state.block = int(block);
  if (block != 0 && ((std::abs(block) != 16 && std::abs(block) != 32) || !exponents || h.dim() != 1)) {
    refuse("hookstats: block: expected 16, 32, -16 or -32 beside exponents per tensor, or 0; got ", block);
  }
  const int expected = state.by_channel ? kOctaveBins : kExponentBins + (block ? kBlockBins : 0);
  const bool fits = state.by_channel ? h.sizes[0] == state.channels : h.dim() == 1;
  if (h.dtype != ScalarType::Long || !fits || !(exponents ? state.bins == expected : state.bins > 2) ||
      !h.is_contiguous() || h.device != moments.device) {
    refuse("hookstats: histogram: expected int64 [", block ? expected : kExponentBins, "] or [", state.channels, ", ",
           kOctaveBins, "] on ", moments.device, ", or with low < high [bins + 2] or [", state.channels,
           ", bins + 2]; got ", h.dtype, " ", h.sizes, " on ", h.device, " with low=", low, ", high=", high);
  }
  state.histogram = h.as<int64_t>();
  return state;
}

void check_one_int32(const char* name, const View& x, Device device) {
  if (x.dtype != ScalarType::Int || x.numel() != 1 || x.device != device) {
    refuse("hookstats: ", name, ": expected one int32 on ", device, ", got ", x.dtype, " ", x.sizes, " on ", x.device);
  }
}

void check_rows(const Rows& rows, Device device) {
  const View& index = rows.row_index;
  if (index.dtype != ScalarType::Int || !index.is_contiguous() || index.device != device) {
    refuse("hookstats: rows: expected contiguous int32 on ", device, ", got ", index.dtype, " ", index.sizes,
           " with strides ", index.strides, " on ", index.device);
  }
  check_one_int32("kept", rows.kept, device);
  if (runs_cuda_kernels(device)) return;
  const int32_t kept = *rows.kept.as<const int32_t>();
  if (kept < 0 || kept > index.numel()) {
    refuse("hookstats: kept: expected 0 to ", index.numel(), " rows, got ", kept);
  }
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Device& device) {
  if (device.is_cpu()) return out << "cpu";
  if (device.is_cuda()) return out << "cuda:" << device.index;
  return out << "a device of type " << device.type;
}

std::ostream& operator<<(std::ostream& out, const Numbers& numbers) {
  for (int64_t i = 0; i < numbers.count; ++i) out << (i ? ", " : "[") << numbers[i];
  return out << (numbers.count ? "]" : "[]");
}

Dtype dtype_of(ScalarType dtype) {
  switch (dtype) {
#define HOOKSTATS_CASE(name, type, aten) \
  case ScalarType::aten:                 \
    return Dtype::name;
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
    default:
      refuse("hookstats: expected a tensor of one of", kDtypeNames, ", got ", dtype);
  }
}

void check_device(Device device) {
  if (!device.is_cpu() && !runs_cuda_kernels(device)) refuse("hookstats: this build has no kernels for ", device);
}

Site::Site(const View& moments, const View& counters, const std::optional<View>& histogram,
           const std::optional<View>& active, int64_t channel_dim, double low, double high, int64_t block,
           std::vector<Memory> memory)
    : state(state_of(moments, counters, histogram, low, high, block)),
      device(moments.device),
      active(active ? active->as<const int32_t>() : nullptr),
      channel_dim(channel_dim),
      memory(std::move(memory)) {
  check_device(device);
  if (active) check_one_int32("active", *active, device);
}

SampledView::SampledView(const View& x, const Site& site, const Rows* rows, Sampling sampling) : view_(x) {
  constexpr int64_t kRowBytes = 64;
  const int64_t ndim = x.dim(), every = sampling.every;
  if (!x.is_strided || !x.data || ndim > Layout::kMaxDims || site.state.block < 0) return;
  const int64_t dim = channel_dim_for(site.channel_dim, ndim).value_or(ndim), channel = dim < 0 ? dim + ndim : dim;
  if (rows && row_dims_of(x, channel, rows->row_index) > 0) return;
  const auto bytes = with_dtype(dtype_of(x.dtype), [](auto value) { return int64_t(sizeof value); });

  int order[Layout::kMaxDims], n = 0;  // dimensions that lead to other memory, the innermost first
  for (int d = 0; d < ndim; ++d) {
    if (x.sizes[d] == 1 || x.strides[d] == 0) continue;
    int at = n++;
    for (; at > 0 && x.strides[order[at - 1]] > x.strides[d]; --at) order[at] = order[at - 1];
    order[at] = d;
  }
  int64_t row = 1;  // elements of one
  int outer = 0;
  while (outer < n && row * bytes < kRowBytes && x.strides[order[outer]] == row) row *= x.sizes[order[outer++]];
  if (row * bytes < kRowBytes) return;

  std::copy(x.sizes.data, x.sizes.data + ndim, sizes_);
  std::copy(x.strides.data, x.strides.data + ndim, strides_);
  for (int64_t count = 0; outer < n; ++outer) {
    const int chosen = order[outer];
    if (chosen == channel) continue;
    int last = outer + 1;  // those that only go on where it ends are its rows, too
    for (count = x.sizes[chosen]; last < n && order[last] != channel; ++last) {
      if (x.strides[order[last]] != count * x.strides[chosen]) break;
      count *= x.sizes[order[last]];
    }
    if (count < every || (site.state.block > 0 && chosen == ndim - 1)) continue;
    for (int i = outer + 1; i < last; ++i) sizes_[order[i]] = 1;
    sizes_[chosen] = (count - sampling.phase + every - 1) / every;
    strides_[chosen] *= every;
    view_.data = static_cast<const char*>(x.data) + sampling.phase * x.strides[chosen] * bytes;
    view_.sizes.data = sizes_;
    view_.strides.data = strides_;
    return;
  }
}

Input described(const View& x, const Site& site, const Rows* rows) {
  if (!x.is_strided) refuse("hookstats: expected a dense strided tensor, got one of another layout");
  if (x.device != site.device) {
    refuse("hookstats: expected a tensor on ", site.device, ", where its state is, got one on ", x.device);
  }
  const Dtype dtype = dtype_of(x.dtype);
  if (rows) check_rows(*rows, site.device);
  Input input{nullptr, dtype, layout_of(x, site.state, site.channel_dim, rows)};
  if (site.state.block) input.matrix = matrix_of(x, input.layout.row_dims > 0 ? rows : nullptr);
  return input;
}

}  // namespace hookstats
