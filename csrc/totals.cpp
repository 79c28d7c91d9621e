// The totals of many sites, all channels of each together: on a GPU one launch.

#include <cstring>
#include <type_traits>

#include "stable.h"

namespace hookstats {
namespace {

// The states of sites on one device, as a table that the kernel reads, made once.
struct Totals : Held {
  Device device;
  std::vector<Memory> memory;  // the states'
  std::vector<State> states;
#if defined(HOOKSTATS_CUDA_KERNELS)
  cuda::TotalsPlan plan{};
#endif
};

int64_t make_totals(Tensors moments, Tensors counters) {
  const size_t n = moments.size();
  if (n == 0 || counters.size() != n) {
    refuse("hookstats: Totals: expected two lists of one length from 1, got ", n, " and ", counters.size());
  }
  auto made = std::make_unique<Totals>();
  made->device = device_of(moments[0]);
  for (size_t i = 0; i < n; ++i) {
    if (device_of(moments[i]) != made->device) {
      refuse("hookstats: Totals: expected states on one device, got ", made->device, " and ", device_of(moments[i]));
    }
    Site site = site_of(moments[i], counters[i], std::nullopt, std::nullopt);
    made->states.push_back(site.state);
    for (Memory& each : site.memory) made->memory.push_back(std::move(each));
  }
#if defined(HOOKSTATS_CUDA_KERNELS)
  static_assert(std::is_trivially_copyable_v<State>);
  if (runs_cuda_kernels(made->device)) made->plan = cuda::plan_totals(made->states);
#endif
  return hold(std::move(made));
}

// A copy on the CPU of what the kernel is to find on the device; nothing where none runs.
Tensor totals_table([[maybe_unused]] int64_t number) {
  int64_t bytes = 0;
#if defined(HOOKSTATS_CUDA_KERNELS)
  const auto& table = held<Totals>(number).plan.table;
  bytes = table.size();
#endif
  Tensor copy = empty({bytes}, ScalarType::Byte, {});
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (bytes) memcpy(copy.mutable_data_ptr(), table.data(), bytes);
#endif
  return copy;
}

// Of each site in a row: fields, as the bits of float64, then counters. int64 [sites, kTotalsWords]. Then the blocks of
// memory, which are those of the states, or none, are zero; no kernel comes between. table: there.
Tensor take_totals(int64_t number, [[maybe_unused]] const Tensor& table, Tensors blocks) {
  const auto& of = held<Totals>(number);
  const int64_t n = of.states.size();
  Tensor out = empty({n, kTotalsWords}, ScalarType::Long, of.device);
  auto* words = static_cast<int64_t*>(out.mutable_data_ptr());
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (runs_cuda_kernels(of.device)) {
    const OnDevice here(of.device);
    const Closing closing(of.device);
    // Of this call, whose stream may be another one than that of the last.
    Tensor scratch = empty({of.plan.scratch}, ScalarType::Long, of.device);
    stable::zero_(scratch);
    auto* parts = static_cast<int64_t*>(scratch.mutable_data_ptr());
    check(cuda::totals(of.plan, table.const_data_ptr(), parts, words, launch_on(of.device, nullptr, 0, 0)));
    clear_on_gpu(blocks);
    closing.end();
    clear_on_cpu(blocks, NoCpuKernel());  // of tests that imitate a GPU
    return out;
  }
#endif
  const NoCpuKernel none;
  cpu::totals(of.states.data(), n, words, parallel_for);
  clear_on_cpu(blocks, none);
  return out;
}

HOOKSTATS_OPERATORS(m) {
  m.def("make_totals(Tensor[] moments, Tensor[] counters) -> int");
  m.def("totals_table(int totals) -> Tensor");
  m.def("take_totals(int totals, Tensor table, Tensor(a!)[] blocks) -> Tensor");
}

HOOKSTATS_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("make_totals", TORCH_BOX(&make_totals));
  m.impl("totals_table", TORCH_BOX(&totals_table));
  m.impl("take_totals", TORCH_BOX(&take_totals));
}

}  // namespace
}  // namespace hookstats
