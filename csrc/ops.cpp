// Tensors to kernels: checks, layout, device and stream; the operators' schemas and registration.

#include "ops.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace hookstats {
namespace {

#define HOOKSTATS_DTYPE_NAME(name, type, aten) " " #name
constexpr const char* kDtypeNames = "" HOOKSTATS_DTYPES(HOOKSTATS_DTYPE_NAME);

}  // namespace

Dtype dtype_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
#define HOOKSTATS_CASE(name, type, aten) \
  case at::ScalarType::aten:             \
    return Dtype::name;
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
    default:
      TORCH_CHECK_TYPE(false, "hookstats: expected a tensor of one of", kDtypeNames, ", got ", x.scalar_type());
  }
}

namespace {

bool has_device_kernels([[maybe_unused]] at::Device device) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  return runs_cuda_kernels(device);
#else
  return false;
#endif
}

// low < high: the histogram is of linear bins. Both NaN: of any bins; it is only to be merged.
State state_of(const at::Tensor& moments, const at::Tensor& counters, const std::optional<at::Tensor>& histogram,
               double low, double high) {
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
    const int expected = state.by_channel ? kOctaveBins : kExponentBins;
    const bool fits = state.by_channel ? h.size(0) == state.channels : h.dim() == 1;
    TORCH_CHECK(h.scalar_type() == at::kLong && fits && (exponents ? state.bins == expected : state.bins > 2) &&
                    h.is_contiguous() && h.device() == moments.device(),
                "hookstats: histogram: expected int64 [", kExponentBins, "] or [", state.channels, ", ", kOctaveBins,
                "] on ", moments.device(), ", or with low < high [bins + 2] or [", state.channels, ", bins + 2]; got ",
                h.scalar_type(), " ", h.sizes(), " on ", h.device(), " with low=", low, ", high=", high);
    state.histogram = h.mutable_data_ptr<int64_t>();
  }
  return state;
}

// How many of the tensor's first dimensions are rows of the mask; 0: the mask is not about it, all of it counts.
int64_t row_dims_of(const at::Tensor& x, int64_t channel, const at::Tensor& mask) {
  int64_t dims = 0;
  if (x.dim() >= mask.dim() && x.sizes().slice(0, mask.dim()) == mask.sizes()) {
    dims = mask.dim();
  } else if (x.dim() > 0 && x.size(0) == mask.numel()) {
    dims = 1;
  }
  return 0 <= channel && channel < dims ? 0 : dims;
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
  if (row_dims > 0) {
    layout.row_index = rows->row_index.const_data_ptr<int32_t>();
    layout.kept = rows->kept.const_data_ptr<int32_t>();
    if (!has_device_kernels(x.device())) layout.count = *std::exchange(layout.kept, nullptr) * layout.row_size();
  }
  return layout;
}

void check_device(at::Device device) {
  if (has_device_kernels(device)) return;
  TORCH_CHECK(device.is_cpu(), "hookstats: this build has no kernels for ", device);
}

void parallel_for(int64_t tasks, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, tasks, 1, body);
}

// Two threads may run through one site. The CUDA kernels are ordered by their stream instead.
std::array<std::mutex, 64> cpu_locks;

std::mutex& cpu_lock(const State& state) {
  return cpu_locks[reinterpret_cast<uintptr_t>(state.counters) / sizeof(int64_t) % cpu_locks.size()];
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

void accumulate_op(const at::Tensor& x, at::Tensor moments, at::Tensor counters, std::optional<at::Tensor> histogram,
                   const std::optional<at::Tensor>& active, int64_t channel_dim, bool skip_recomputation, double low,
                   double high, const std::optional<at::Tensor>& rows, const std::optional<at::Tensor>& kept) {
  if (skip_recomputation && backward_is_running()) return;
  TORCH_CHECK(rows.has_value() == kept.has_value(), "hookstats: expected both rows and kept or neither, got only ",
              rows ? "rows" : "kept");
  const Site site({std::move(moments), std::move(counters), std::move(histogram), active, channel_dim, low, high});
  if (!rows) return void(accumulate(x, site));
  const Rows both{*rows, *kept};
  accumulate(x, site, &both);
}

// A state that is one tensor, int64: moments, counters, histogram (exponents or octaves) one behind another, as
// hookstats/watch/memory.py lays them out.
Site site_in(const at::Tensor& state, const at::Tensor& active, int64_t channels, bool per_channel,
             int64_t channel_dim) {
  const int64_t counters = int64_t(kFields) * channels;
  const int64_t words = state.numel() - counters - int64_t(kCounters);
  const int64_t bins = words == 0 ? 0 : per_channel ? kOctaveBins : kExponentBins;
  TORCH_CHECK(state.scalar_type() == at::kLong && state.is_contiguous() && channels >= 1 &&
                  words == bins * (per_channel ? channels : 1),
              "hookstats: state: expected contiguous int64 of ", counters + int64_t(kCounters),
              " words and a histogram", per_channel ? " per channel" : "", ", got ", state.scalar_type(), " ",
              state.sizes(), " with strides ", state.strides());
  check_device(state.device());
  check_one_int32("active", active, state.device());
  Site site;
  site.tensors.moments = state;
  site.tensors.active = active;
  site.tensors.channel_dim = channel_dim;
  auto* memory = state.mutable_data_ptr<int64_t>();
  site.state = {};
  site.state.moments = reinterpret_cast<double*>(memory);
  site.state.row_stride = site.state.channels = channels;
  site.state.counters = memory + counters;
  if (bins) {
    site.state.histogram = site.state.counters + int64_t(kCounters);
    site.state.kind = per_channel ? HistogramKind::per_channel : HistogramKind::per_tensor;
    site.state.by_channel = per_channel;
    site.state.bins = int(bins);
  }
  return site;
}

void fold_output_op(const at::Tensor& x, at::Tensor state, const at::Tensor& active, int64_t channels, bool per_channel,
                    int64_t channel_dim) {
  if (!backward_is_running()) accumulate(x, site_in(state, active, channels, per_channel, channel_dim));
}

void fold_output_rows_op(const at::Tensor& x, at::Tensor state, const at::Tensor& active, int64_t channels,
                         bool per_channel, int64_t channel_dim, const at::Tensor& rows, const at::Tensor& kept) {
  const Rows both{rows, kept};
  if (!backward_is_running()) accumulate(x, site_in(state, active, channels, per_channel, channel_dim), &both);
}

void fold_gradient_op(const at::Tensor& x, at::Tensor state, const at::Tensor& active, int64_t channels,
                      bool per_channel, int64_t channel_dim) {
  accumulate(x, site_in(state, active, channels, per_channel, channel_dim));
}

void fold_gradient_rows_op(const at::Tensor& x, at::Tensor state, const at::Tensor& active, int64_t channels,
                           bool per_channel, int64_t channel_dim, const at::Tensor& rows, const at::Tensor& kept) {
  const Rows both{rows, kept};
  accumulate(x, site_in(state, active, channels, per_channel, channel_dim), &both);
}

void merge_op(at::Tensor moments, at::Tensor counters, std::optional<at::Tensor> histogram,
              const at::Tensor& from_moments, const at::Tensor& from_counters,
              const std::optional<at::Tensor>& from_histogram) {
  constexpr double kAny = std::numeric_limits<double>::quiet_NaN();
  const State into = state_of(moments, counters, histogram, kAny, kAny);
  const State from = state_of(from_moments, from_counters, from_histogram, kAny, kAny);
  TORCH_CHECK_VALUE(into.channels == from.channels || into.channels == 1, "hookstats: expected ", into.channels,
                    " channels to merge, or one channel to merge into; got ", from.channels);
  TORCH_CHECK_VALUE(into.kind == from.kind && into.bins == from.bins && into.by_channel == from.by_channel,
                    "hookstats: expected states with the same kind of histogram to merge, got ", into.bins, " and ",
                    from.bins, " bins, by channel: ", into.by_channel, " and ", from.by_channel);
  TORCH_CHECK(moments.device() == from_moments.device(), "hookstats: expected states on one device to merge, got ",
              moments.device(), " and ", from_moments.device());
  check_device(moments.device());
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (runs_cuda_kernels(moments.device())) {
    const c10::DeviceGuard guard(moments.device());
    return check(cuda::merge(into, from, launch_on(moments.device(), std::nullopt)));
  }
#endif
  const std::lock_guard<std::mutex> lock(cpu_lock(into));
  cpu::merge(into, from);
}

// Asks when a graph runs, not when it is traced. The counter's version stays: changed in a gradient hook, it would be
// refused while the hook is traced.
void add_op(at::Tensor counter, const at::Tensor& amount, bool skip_recomputation) {
  if (skip_recomputation && backward_is_running()) return;
  const at::AutoDispatchBelowADInplaceOrView no_version;
  counter.add_(amount);
}

void accumulate_meta(const at::Tensor&, at::Tensor, at::Tensor, std::optional<at::Tensor>,
                     const std::optional<at::Tensor>&, int64_t, bool, double, double, const std::optional<at::Tensor>&,
                     const std::optional<at::Tensor>&) {}

void fold_meta(const at::Tensor&, at::Tensor, const at::Tensor&, int64_t, bool, int64_t) {}

void fold_rows_meta(const at::Tensor&, at::Tensor, const at::Tensor&, int64_t, bool, int64_t, const at::Tensor&,
                    const at::Tensor&) {}

void merge_meta(at::Tensor, at::Tensor, std::optional<at::Tensor>, const at::Tensor&, const at::Tensor&,
                const std::optional<at::Tensor>&) {}

}  // namespace

#if defined(HOOKSTATS_CUDA_ON_CPU)
bool runs_cuda_kernels(at::Device) { return true; }
#elif defined(HOOKSTATS_CUDA)
bool runs_cuda_kernels(at::Device device) { return device.is_cuda(); }
#endif

#if defined(HOOKSTATS_CUDA_KERNELS)
void* stream_of(at::Device device) {
#if defined(HOOKSTATS_CUDA_ON_CPU)
  return imitated_stream;
#endif
  if (device.is_cpu()) return nullptr;
  // libc10 alone: the same binary loads with and without CUDA in torch.
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
}

void check(const char* cuda_error) { TORCH_CHECK(!cuda_error, "hookstats: CUDA: ", cuda_error); }
#endif

MadeOn::MadeOn(at::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}

void MadeOn::written() {
  if (is_captured(device_)) stream_.reset();  // in its graph alone, where it comes first
  if (!stream_) return;
  event_ = std::make_shared<c10::Event>(device_.type());
  event_->record(*stream_);
}

void MadeOn::used_here(const std::vector<at::Tensor>& memory) const {
  if (!stream_) return;
  const auto here = c10::impl::getDeviceGuardImpl(device_.type())->getStream(device_);
  if (here == *stream_ || is_captured(device_)) return;
  event_->block(here);
  for (const at::Tensor& each : memory) each.record_stream(here);
}

Site::Site(SiteState of)
    : tensors(std::move(of)),
      state(state_of(tensors.moments, tensors.counters, tensors.histogram, tensors.low, tensors.high)) {
  const auto device = tensors.moments.device();
  check_device(device);
  if (tensors.active) check_one_int32("active", *tensors.active, device);
}

Input described(const at::Tensor& x, const Site& site, const Rows* rows) {
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, "hookstats: expected a dense strided tensor, got layout ", x.layout());
  const auto device = site.tensors.moments.device();
  TORCH_CHECK(x.device() == device, "hookstats: expected a tensor on ", device, ", where its state is, got one on ",
              x.device());
  const Dtype dtype = dtype_of(x);
  if (rows) check_rows(*rows, device);
  return {nullptr, dtype, layout_of(x, site.state, site.tensors.channel_dim, rows)};
}

const char* reason(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

bool has_no_data(const at::Tensor& x) {
  return x.is_meta() || !x.has_storage() || x.key_set().has(c10::DispatchKey::Python);
}

void wait_for(at::Device device) {
  if (device.is_cpu()) return;
  const auto* impl = c10::impl::getDeviceGuardImpl(device.type());
  impl->synchronizeStream(impl->getStream(device));
}

bool backward_is_running() { return torch::autograd::get_current_graph_task_id() != -1; }

NoCpuKernel::NoCpuKernel() {
  for (std::mutex& lock : cpu_locks) lock.lock();
}

NoCpuKernel::~NoCpuKernel() {
  for (std::mutex& lock : cpu_locks) lock.unlock();
}

bool is_captured([[maybe_unused]] at::Device device) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  return runs_cuda_kernels(device) && cuda::is_capturing(stream_of(device));
#else
  return false;
#endif
}

void keep_for_graphs(const SiteState& site, const std::vector<at::Tensor>& others) {
  static std::mutex mutex;
  static auto* const kept =
      new std::map<const void*, at::Tensor>;  // never destroyed: graphs may be replayed until then
  const std::lock_guard<std::mutex> lock(mutex);
  const auto keep = [](const at::Tensor& each) { kept->emplace(each.unsafeGetTensorImpl(), each); };
  keep(site.moments);
  keep(site.counters);
  if (site.histogram) keep(*site.histogram);
  if (site.active) keep(*site.active);
  for (const at::Tensor& each : others) keep(each);
}

bool accumulate(const at::Tensor& tensor, const Site& site, const Rows* rows) {
  if (tensor.is_neg()) return accumulate(tensor.resolve_neg(), site, rows);
  const at::Tensor& x = tensor;
  const State& state = site.state;
  const auto& active = site.tensors.active;
  Input input = described(x, site, rows);
  const bool by_rows = input.layout.row_dims > 0;
  if (input.layout.count == 0) return by_rows;
  input.data = x.const_data_ptr();
  TORCH_CHECK(input.data, "hookstats: expected a tensor with data, got one without storage");
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (runs_cuda_kernels(x.device())) {
    const c10::DeviceGuard guard(x.device());
    check(cuda::accumulate(input, state, launch_on(x.device(), active)));
    return by_rows;
  }
#endif
  if (active && *active->const_data_ptr<int32_t>() == 0) return by_rows;
  const std::lock_guard<std::mutex> lock(cpu_lock(state));
  cpu::accumulate(input, state, parallel_for);
  return by_rows;
}

TORCH_LIBRARY(HOOKSTATS_NAMESPACE, m) {
  m.def(
      "accumulate(Tensor x, Tensor(a!) moments, Tensor(b!) counters, Tensor(c!)? histogram, Tensor? active, "
      "int channel_dim, bool skip_recomputation=False, float low=0.0, float high=0.0, Tensor? rows=None, "
      "Tensor? kept=None) -> ()");
  m.def(
      "merge(Tensor(a!) moments, Tensor(b!) counters, Tensor(c!)? histogram, Tensor from_moments, "
      "Tensor from_counters, Tensor? from_histogram) -> ()");
  m.def("add(Tensor(a!) counter, Tensor amount, bool skip_recomputation) -> ()");
  // What graphs call, for each site of a measured step: of few arguments, and none that could be left out, since
  // inductor writes down the defaults, too. Bins are exponents; nothing is folded by `fold_output` inside of a
  // backward.
#define HOOKSTATS_FOLDED "Tensor x, Tensor(a!) state, Tensor active, int channels, bool per_channel, int channel_dim"
  m.def("fold_output(" HOOKSTATS_FOLDED ") -> ()");
  m.def("fold_output.rows(" HOOKSTATS_FOLDED ", Tensor rows, Tensor kept) -> ()");
  m.def("fold_gradient(" HOOKSTATS_FOLDED ") -> ()");
  m.def("fold_gradient.rows(" HOOKSTATS_FOLDED ", Tensor rows, Tensor kept) -> ()");
}

#define HOOKSTATS_KERNELS(key)                           \
  TORCH_LIBRARY_IMPL(HOOKSTATS_NAMESPACE, key, m) {      \
    m.impl("accumulate", accumulate_op);                 \
    m.impl("merge", merge_op);                           \
    m.impl("fold_output", fold_output_op);               \
    m.impl("fold_output.rows", fold_output_rows_op);     \
    m.impl("fold_gradient", fold_gradient_op);           \
    m.impl("fold_gradient.rows", fold_gradient_rows_op); \
  }
HOOKSTATS_KERNELS(CPU)
#if defined(HOOKSTATS_CUDA)
HOOKSTATS_KERNELS(CUDA)
#endif

TORCH_LIBRARY_IMPL(HOOKSTATS_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("add", add_op);  // on any device, in any build
}

TORCH_LIBRARY_IMPL(HOOKSTATS_NAMESPACE, Meta, m) {
  m.impl("accumulate", accumulate_meta);
  m.impl("merge", merge_meta);
  for (const char* name : {"fold_output", "fold_gradient"}) {
    m.impl(name, fold_meta);
    m.impl((std::string(name) + ".rows").c_str(), fold_rows_meta);
  }
}

// No gradient flows through a statistic, and none is stopped: autograd does not look.
TORCH_LIBRARY_IMPL(HOOKSTATS_NAMESPACE, Autograd, m) {
  for (const char* name :
       {"accumulate", "merge", "add", "fold_output", "fold_output.rows", "fold_gradient", "fold_gradient.rows"}) {
    m.impl(name, torch::CppFunction::makeFallthrough());
  }
}

}  // namespace hookstats
