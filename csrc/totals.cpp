// The totals of many sites, all channels of each together: on a GPU one launch.

#include <type_traits>

#include "stable.h"

namespace hookstats {
namespace {

// The states of sites on one device, as a table that the kernel reads, made once.
struct Totals : Held {
  Device device;
  std::vector<Memory> memory;  // the states'
  std::vector<State> states;
  cuda::TotalsPlan plan{};  // where CUDA kernels run
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
  static_assert(std::is_trivially_copyable_v<State>);
  if (runs_cuda_kernels(made->device)) made->plan = cuda::plan_totals(made->states);
  return hold(std::move(made));
}

// A copy on the CPU of what the kernel is to find on the device; nothing where none runs.
Tensor totals_table(int64_t number) {
  const auto& table = held<Totals>(number).plan.table;
  return bytes_of(table.data(), table.size());
}

// Of each site in a row: fields, as the bits of float64, then counters. int64 [sites, kTotalsWords]. Then the blocks of
// memory, which are those of the states, or none, are zero; no kernel comes between. table: there.
Tensor take_totals(int64_t number, const Tensor& table, Tensors blocks) {
  const auto& of = held<Totals>(number);
  const int64_t n = of.states.size();
  Tensor out = empty({n, kTotalsWords}, ScalarType::Long, of.device);
  auto* words = static_cast<int64_t*>(out.mutable_data_ptr());
  if (runs_cuda_kernels(of.device)) {
    const OnDevice here(of.device);
    const Closing closing(of.device);
    // Of this call, whose stream may be another one than that of the last.
    Tensor scratch = empty({of.plan.scratch}, ScalarType::Long, of.device);
    stable::zero_(scratch);
    auto* parts = static_cast<int64_t*>(scratch.mutable_data_ptr());
    cuda::totals(of.plan, table.const_data_ptr(), parts, words, launch_on(of.device, nullptr, 0, 0));
    clear_on_gpu(blocks);
    closing.end();
    clear_on_cpu(blocks, NoCpuKernel());  // of tests that imitate a GPU
    return out;
  }
  const NoCpuKernel none;
  cpu::totals(of.states.data(), n, words, parallel_for);
  clear_on_cpu(blocks, none);
  return out;
}

}  // namespace
}  // namespace hookstats
