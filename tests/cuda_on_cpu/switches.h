// What kernels.cpp offers harness.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cuda_on_cpu {

// Whether tensors are read in one part each, so that a thread reads many tiles of a small one.
extern bool in_one_part;

// Runs a kernel with a planted fault.
int64_t run_faulty(const std::string& name);

// Of packs first, first + step, ... of `inner` in each run, how far from the first element each lies.
std::vector<int64_t> near_addresses(int64_t inner, int64_t outer_stride, int64_t first, int64_t step, int64_t count);

}  // namespace cuda_on_cpu
