// The kernels of csrc/cuda under the harness, and kernels with planted faults that it must find. No torch header, which
// would take long: the operators and switches are in harness.cpp.

#include "switches.h"

#include "cuda/plan.h"

bool cuda_on_cpu::in_one_part = false;
#define cut(job, parts) cut(job, cuda_on_cpu::in_one_part ? 1 : (parts))

#include "cuda/accumulate.cu"
#include "cuda/accumulate_bfloat16.cu"
#include "cuda/accumulate_float16.cu"
#include "cuda/accumulate_float32.cu"
#include "cuda/accumulate_float64.cu"
#include "cuda/accumulate_float8.cu"
#include "cuda/blocks.cu"
#include "cuda/joint.cu"
#include "cuda/many.cu"
#include "cuda/merge.cu"
#include "cuda/sample.cu"
#include "cuda/scratch.cu"
#include "cuda/softmax.cu"

namespace {

// Only the first half of the block reaches the barrier.
void partial_barrier_kernel(int64_t* out) {
  if (threadIdx.x < blockDim.x / 2) __syncthreads();
  if (threadIdx.x == 0) *out = 1;
}

// All threads reach a barrier, but not the same one.
void diverged_barrier_kernel(int64_t* out) {
  if (threadIdx.x < blockDim.x / 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = 1;
}

// Thread 0 reads what the others wrote, with no barrier between.
void missing_barrier_kernel(int64_t* out) {
  HOOKSTATS_SHARED(int, values, 64);
  values[threadIdx.x] = 1;
  if (threadIdx.x != 0) return;
  *out = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) *out += values[i] == 1;
}

// All threads copy to the same place.
void shared_copy_kernel(int64_t* out) {
  static const int numbers[2] = {0, 1};
  HOOKSTATS_SHARED(int, copied, 1);
  hookstats::cuda::copy_async<4>(copied, &numbers[threadIdx.x % 2]);
  hookstats::cuda::end_group();
  hookstats::cuda::wait_for_all_but<0>();
  if (copied[0] != int(threadIdx.x % 2)) *out += 1;
}

// Where an array lies that asks for no alignment.
void unaligned_kernel(int64_t* out) {
  HOOKSTATS_SHARED(char, values, 64);
  if (threadIdx.x == 0) *out = int64_t(reinterpret_cast<uintptr_t>(values) % 2);
}

void overrun_kernel(int64_t* out) {
  HOOKSTATS_SHARED(char, values, 64);
  values[threadIdx.x + 1] = 1;
  if (threadIdx.x == 0) *out = 1;
}

}  // namespace

namespace cuda_on_cpu {

int64_t run_faulty(const std::string& name) {
  const auto kernel = name == "partial_barrier"    ? partial_barrier_kernel
                      : name == "diverged_barrier" ? diverged_barrier_kernel
                      : name == "missing_barrier"  ? missing_barrier_kernel
                      : name == "shared_copy"      ? shared_copy_kernel
                      : name == "unaligned"        ? unaligned_kernel
                                                   : overrun_kernel;
  int64_t out = 0;
  hookstats::cuda::start(kernel, dim3(1), dim3(64), 0, nullptr, &out);
  return out;
}

std::vector<int64_t> near_addresses(int64_t inner, int64_t outer_stride, int64_t first, int64_t step, int64_t count) {
  hookstats::Layout layout;
  layout.ndim = 2;
  layout.size[0] = 4;
  layout.stride[0] = outer_stride;
  layout.size[1] = inner;
  layout.stride[1] = 1;
  if (!hookstats::cuda::is_near(layout)) return {};
  hookstats::cuda::NearWalker<char> walker(nullptr, layout, first, step);
  std::vector<int64_t> found;
  for (int64_t i = 0; i < count; ++i) found.push_back(reinterpret_cast<int64_t>(walker.next()));
  return found;
}

}  // namespace cuda_on_cpu
