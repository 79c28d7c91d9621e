// The kernels of csrc/cuda under the harness, its switches, and kernels with planted faults that it must find.

#include "cuda/accumulate.cu"
#include "cuda/many.cu"
#include "cuda/merge.cu"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

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

void overrun_kernel(int64_t* out) {
  HOOKSTATS_SHARED(char, values, 64);
  values[threadIdx.x + 1] = 1;
  if (threadIdx.x == 0) *out = 1;
}

int64_t run_faulty(const std::string& name) {
  const auto kernel = name == "partial_barrier"    ? partial_barrier_kernel
                      : name == "diverged_barrier" ? diverged_barrier_kernel
                      : name == "missing_barrier"  ? missing_barrier_kernel
                                                   : overrun_kernel;
  int64_t out = 0;
  hookstats::cuda::launch(kernel, dim3(1), dim3(64), 0, nullptr, &out);
  return out;
}

// Sets a flag to zero after that many blocks of each later launch; a negative number: never.
void switch_off_after(const at::Tensor& flag, int64_t blocks) {
  cuda_on_cpu::before_block = nullptr;
  if (blocks < 0) return;
  cuda_on_cpu::before_block = [=](uint64_t done) {
    if (done == uint64_t(blocks)) *flag.mutable_data_ptr<int32_t>() = 0;
  };
}

void shuffle(int64_t seed) { cuda_on_cpu::shuffle_seed = unsigned(seed); }
int64_t launches() { return cuda_on_cpu::launches; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(hookstats_cuda_on_cpu, m) {
  m.def("shuffle(int seed) -> ()", &shuffle);
  m.def("launches() -> int", &launches);
  m.def("switch_off_after(Tensor flag, int blocks) -> ()", &switch_off_after);
  m.def("run_faulty(str name) -> int", &run_faulty);
}
