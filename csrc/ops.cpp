// One tensor to its kernel; tensors of the stable ABI as views; the operators for one tensor, and what Python is told.

#include <array>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>

#include "stable.h"

namespace hookstats {
namespace {

// Two threads may run through one site. CUDA kernels are ordered on their streams instead.
std::array<std::mutex, 64> cpu_locks;

std::mutex& cpu_lock(const State& state) {
  return cpu_locks[reinterpret_cast<uintptr_t>(state.counters) / sizeof(int64_t) % cpu_locks.size()];
}

Sampling sampling_of(int64_t every, int64_t phase) {
  if (every < 1 || phase < 0 || phase >= every || every > std::numeric_limits<int32_t>::max()) {
    refuse("hookstats: expected every from 1 on and a phase from 0 to below it, got ", every, " and ", phase);
  }
  return {int32_t(every), int32_t(phase)};
}

int64_t make_site(const Tensor& moments, const Tensor& counters, const std::optional<Tensor>& histogram,
                  const std::optional<Tensor>& active, int64_t channel_dim, double low, double high, int64_t block) {
  auto made = std::make_unique<HeldSite>();
  made->site = site_of(moments, counters, histogram, active, channel_dim, low, high, block);
  return hold(std::move(made));
}

// Folds a tensor; with only_look, refuses what could not be folded, and folds nothing.
bool fold_op(const Tensor& x, int64_t site, const std::optional<Tensor>& row_index, const std::optional<Tensor>& kept,
             bool only_look, int64_t every, int64_t phase) {
  const auto rows = rows_of(row_index, kept);
  const Rows* counting = rows ? &*rows : nullptr;
  const Site& into = held<HeldSite>(site).site;
  if (only_look) return described(view_of(x), into, counting).layout.row_dims > 0;
  return accumulate(view_of(x), into, counting, sampling_of(every, phase));
}

void merge_op(int64_t site, int64_t other) {
  const Site &into = held<HeldSite>(site).site, &from = held<HeldSite>(other).site;
  const State &to = into.state, &of = from.state;
  if (to.channels != of.channels && to.channels != 1) {
    refuse("hookstats: expected ", to.channels, " channels to merge, or one channel to merge into; got ", of.channels);
  }
  if (to.kind != of.kind || to.bins != of.bins || to.by_channel != of.by_channel) {
    refuse("hookstats: expected states with the same kind of histogram to merge, got ", to.bins, " and ", of.bins,
           " bins, by channel: ", to.by_channel, " and ", of.by_channel);
  }
  if (into.device != from.device) {
    refuse("hookstats: expected states on one device to merge, got ", into.device, " and ", from.device);
  }
  if (runs_cuda_kernels(into.device)) {
    const OnDevice here(into.device);
    const auto launch = launch_on(into.device, nullptr, 0, 0);
    if (launch.capture) {
      keep_for_graphs(into.memory);
      keep_for_graphs(from.memory);
    }
    return cuda::merge(to, of, launch);
  }
  const std::lock_guard<std::mutex> lock(cpu_lock(to));
  cpu::merge(to, of);
}

void let_go(int64_t number) { delete reinterpret_cast<Held*>(number); }

int64_t capture_on_op(int64_t device) { return int64_t(capture_on(Device::numbered(device))); }
void begin_closing(int64_t device) { const Closing begun(Device::numbered(device)); }
void end_closing(int64_t device) { Closing::end(Device::numbered(device)); }
int64_t reserve_scratch_op(int64_t device) { return reserve_scratch(Device::numbered(device)); }

// The words of an int64 tensor from `offset` on, as a tensor of its own over the same memory.
Tensor part(const Tensor& memory, int64_t offset, std::vector<int64_t> shape, bool is_float64) {
  const View words = view_of(memory);
  if (words.dtype != ScalarType::Long || !words.is_contiguous()) {
    refuse("part: expected contiguous int64, got ", words.dtype, " with strides ", words.strides);
  }
  std::vector<int64_t> strides(shape.size());
  int64_t size = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = size;
    size *= shape[d];
  }
  if (offset < 0 || offset + size > words.numel()) {
    refuse("part: expected words ", offset, " to ", offset + size, " in a memory of ", words.numel());
  }
  return stable::from_blob(words.as<int64_t>() + offset, shape, strides, memory.device(),
                           is_float64 ? ScalarType::Double : ScalarType::Long, [memory](void*) {});
}

}  // namespace

Device device_of(const Tensor& x) {
  int32_t type = 0, index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &index));
  return {type, index};
}

View view_of(const Tensor& x) {
  View view;
  int32_t number = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &number));
  view.dtype = ScalarType(number);
  view.device = device_of(x);
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(x.get(), &number));
  view.is_strided = number == 0;
  if (!view.is_strided) return view;
  int64_t *sizes = nullptr, *strides = nullptr, ndim = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(x.get(), &ndim));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(x.get(), &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(x.get(), &strides));
  view.sizes = {sizes, ndim};
  view.strides = {strides, ndim};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(x.get(), &view.data));
  return view;
}

std::optional<View> view_of(const std::optional<Tensor>& x) { return x ? std::optional(view_of(*x)) : std::nullopt; }

Memory memory_of(const Tensor& x) { return std::make_shared<Tensor>(x); }

std::vector<Memory> memory_of(const MaybeTensors& all) {
  std::vector<Memory> memory;
  for (const auto& each : all) {
    if (each) memory.push_back(memory_of(*each));
  }
  return memory;
}

std::optional<Rows> rows_of(const std::optional<Tensor>& row_index, const std::optional<Tensor>& kept) {
  if (row_index.has_value() != kept.has_value()) {
    refuse("hookstats: expected both rows and kept or neither, got only ", row_index ? "rows" : "kept");
  }
  if (!row_index) return std::nullopt;
  return Rows{view_of(*row_index), view_of(*kept), memory_of({*row_index, *kept})};
}

Site site_of(const Tensor& moments, const Tensor& counters, const std::optional<Tensor>& histogram,
             const std::optional<Tensor>& active, int64_t channel_dim, double low, double high, int64_t block) {
  return {view_of(moments),
          view_of(counters),
          view_of(histogram),
          view_of(active),
          channel_dim,
          low,
          high,
          block,
          memory_of({moments, counters, histogram, active})};
}

Tensor empty(std::vector<int64_t> sizes, ScalarType dtype, Device device) {
  const auto type = device.is_cpu() ? torch::headeronly::DeviceType::CPU : torch::headeronly::DeviceType::CUDA;
  return stable::empty(sizes, dtype, std::nullopt, stable::Device(type, device.is_cpu() ? -1 : device.index));
}

Tensor bytes_of(const void* data, size_t count) {
  Tensor bytes = empty({int64_t(count)}, ScalarType::Byte, {});
  if (count) memcpy(bytes.mutable_data_ptr(), data, count);
  return bytes;
}

void parallel_for(int64_t tasks, const std::function<void(int64_t, int64_t)>& body) {
  stable::parallel_for(0, tasks, 1, body);
}

NoCpuKernel::NoCpuKernel() {
  for (std::mutex& lock : cpu_locks) lock.lock();
}

NoCpuKernel::~NoCpuKernel() {
  for (std::mutex& lock : cpu_locks) lock.unlock();
}

bool accumulate(const View& whole, const Site& site, const Rows* rows, Sampling sampling) {
  const State& state = site.state;
  std::optional<SampledView> sampled;
  if (sampling.every > 1 && !capture_on(site.device)) sampled.emplace(whole, site, rows, sampling);
  const View& x = sampled ? sampled->view() : whole;
  Input input = described(x, site, rows);
  const bool by_rows = input.layout.row_dims > 0;
  if (input.layout.count == 0) return by_rows;
  input.data = x.data;
  if (!input.data) refuse("hookstats: expected a tensor with data, got one without storage");
  if (runs_cuda_kernels(site.device)) {
    const OnDevice here(site.device);
    const auto to = launch_on(site.device, site.active);
    if (to.capture) {
      keep_for_graphs(site.memory);
      if (rows) keep_for_graphs(rows->memory);
    }
    cuda::accumulate(input, state, to);
    if (state.block) cuda::count_blocks(input, state, to);
    return by_rows;
  }
  if (site.active && *site.active == 0) return by_rows;
  const std::lock_guard<std::mutex> lock(cpu_lock(state));
  cpu::accumulate(input, state, parallel_for);
  if (state.block) cpu::count_blocks(input, state);
  return by_rows;
}

}  // namespace hookstats
