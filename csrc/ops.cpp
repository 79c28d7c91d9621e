// One tensor to its kernel; the operators, their schemas and registration.

#include "ops.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <mutex>
#include <utility>

namespace hookstats {
namespace {

// Two threads may run through one site. CUDA kernels are ordered on their streams instead.
std::array<std::mutex, 64> cpu_locks;

std::mutex& cpu_lock(const State& state) {
  return cpu_locks[reinterpret_cast<uintptr_t>(state.counters) / sizeof(int64_t) % cpu_locks.size()];
}

void accumulate_op(const at::Tensor& x, at::Tensor moments, at::Tensor counters, std::optional<at::Tensor> histogram,
                   const std::optional<at::Tensor>& active, int64_t channel_dim, bool skip_recomputation, double low,
                   double high, const std::optional<at::Tensor>& rows, const std::optional<at::Tensor>& kept,
                   int64_t block) {
  if (skip_recomputation && backward_is_running()) return;
  TORCH_CHECK(rows.has_value() == kept.has_value(), "hookstats: expected both rows and kept or neither, got only ",
              rows ? "rows" : "kept");
  const Site site(
      {std::move(moments), std::move(counters), std::move(histogram), active, channel_dim, low, high, block});
  if (!rows) return void(accumulate(x, site));
  const Rows both{*rows, *kept};
  accumulate(x, site, &both);
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
    const auto to = launch_on(moments.device(), std::nullopt, 0, 0);
    if (to.capture) {
      keep_for_graphs({moments, counters, from_moments, from_counters});
      if (histogram) keep_for_graphs({*histogram, *from_histogram});
    }
    return check(cuda::merge(into, from, to));
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

}  // namespace

void do_nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

void parallel_for(int64_t tasks, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, tasks, 1, body);
}

bool backward_is_running() { return torch::autograd::get_current_graph_task_id() != -1; }

NoCpuKernel::NoCpuKernel() {
  for (std::mutex& lock : cpu_locks) lock.lock();
}

NoCpuKernel::~NoCpuKernel() {
  for (std::mutex& lock : cpu_locks) lock.unlock();
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
    const auto to = launch_on(x.device(), active);
    const auto of_rows = rows ? std::vector{rows->row_index, rows->kept} : std::vector<at::Tensor>();
    if (to.capture) keep_for_graphs(site.tensors, of_rows);
    if (rows && rows->made) rows->made->used_here(of_rows);
    check(cuda::accumulate(input, state, to));
    if (state.block) check(cuda::count_blocks(input, state, to));
    return by_rows;
  }
#endif
  if (active && *active->const_data_ptr<int32_t>() == 0) return by_rows;
  const std::lock_guard<std::mutex> lock(cpu_lock(state));
  cpu::accumulate(input, state, parallel_for);
  if (state.block) cpu::count_blocks(input, state);
  return by_rows;
}

TORCH_LIBRARY(HOOKSTATS_NAMESPACE, m) {
  m.def(
      "accumulate(Tensor x, Tensor(a!) moments, Tensor(b!) counters, Tensor(c!)? histogram, Tensor? active, "
      "int channel_dim, bool skip_recomputation=False, float low=0.0, float high=0.0, Tensor? rows=None, "
      "Tensor? kept=None, int block=0) -> ()");
  m.def(
      "merge(Tensor(a!) moments, Tensor(b!) counters, Tensor(c!)? histogram, Tensor from_moments, "
      "Tensor from_counters, Tensor? from_histogram) -> ()");
  m.def("add(Tensor(a!) counter, Tensor amount, bool skip_recomputation) -> ()");

  add_kernels(m, "accumulate", accumulate_op);
  add_kernels(m, "merge", merge_op);
  for (const char* name : {"accumulate", "merge"}) {
    m.impl(name, torch::dispatch(c10::DispatchKey::Meta, torch::CppFunction::makeFromBoxedFunction<&do_nothing>()));
  }
  // On any device, in any build.
  m.impl("add", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, add_op));
  m.impl("add", torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
}

}  // namespace hookstats
