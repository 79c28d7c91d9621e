// The kernels of csrc/cuda under the harness, its switches, and kernels with planted faults that it must find.

#include "cuda/plan.h"

// Whether tensors are read in one part each, so that a thread reads many tiles of a small one.
static bool in_one_part = false;
#define cut(job, parts) cut(job, in_one_part ? 1 : (parts))

#include "cuda/accumulate.cu"
#include "cuda/blocks.cu"
#include "cuda/checksum.cu"
#include "cuda/interface.cu"
#include "cuda/many.cu"
#include "cuda/merge.cu"
#include "cuda/sample.cu"
#include "cuda/scratch.cu"
#include "cuda/softmax.cu"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "ops.h"

void* hookstats::imitated_stream = nullptr;
int hookstats::imitated_device = 0;
bool hookstats::imitates_foreign_streams = false;

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

void overrun_kernel(int64_t* out) {
  HOOKSTATS_SHARED(char, values, 64);
  values[threadIdx.x + 1] = 1;
  if (threadIdx.x == 0) *out = 1;
}

// Only the first block of the cluster reaches the barrier.
void partial_cluster_kernel(int64_t* out) {
  if (blockIdx.y == 0) hookstats::cuda::cluster_barrier();
  *out = 1;
}

// The second block of the cluster does not stay until it has been read.
void left_cluster_kernel(int64_t* out) {
  HOOKSTATS_SHARED(int64_t, value, 1);
  if (threadIdx.x == 0) value[0] = blockIdx.y;
  hookstats::cuda::cluster_barrier();
  if (blockIdx.y == 1) return;
  __syncthreads();
  __syncthreads();
  if (threadIdx.x == 0) *out = *hookstats::cuda::in_block(value, 1);
}

int64_t run_faulty(const std::string& name) {
  const auto kernel = name == "partial_barrier"    ? partial_barrier_kernel
                      : name == "diverged_barrier" ? diverged_barrier_kernel
                      : name == "missing_barrier"  ? missing_barrier_kernel
                      : name == "shared_copy"      ? shared_copy_kernel
                      : name == "partial_cluster"  ? partial_cluster_kernel
                      : name == "left_cluster"     ? left_cluster_kernel
                                                   : overrun_kernel;
  int64_t out = 0;
  if (name.find("cluster") != std::string::npos) {
    hookstats::cuda::launch_as(true, false, kernel, dim3(1, 2), dim3(64), 0, nullptr, &out);
  } else {
    hookstats::cuda::launch(kernel, dim3(1), dim3(64), 0, nullptr, &out);
  }
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

// From now on launches go to this stream, 0: the default one. While `capture` is a number from 1, it is captured.
void use_stream(int64_t stream, int64_t capture) {
  hookstats::imitated_stream = reinterpret_cast<void*>(stream);
  cuda_on_cpu::capture = capture;
}

// From now on it is the GPU of this capability, with so much shared memory for a block; 0: as at first. Each is a
// device of its own, of which what was asked is remembered.
void use_gpu(int64_t capability, int64_t shared_memory, int64_t driver, int64_t runtime, int64_t built_for,
             int64_t multiprocessors) {
  static std::vector<cuda_on_cpu::Gpu> gpus(1);
  const cuda_on_cpu::Gpu first;
  const auto or_first = [](int64_t given, int otherwise) { return given ? int(given) : otherwise; };
  cuda_on_cpu::gpu = {or_first(shared_memory, first.shared_memory),
                      or_first(capability, first.capability),
                      or_first(driver, first.driver),
                      or_first(runtime, first.runtime),
                      or_first(built_for, first.built_for),
                      or_first(multiprocessors, first.multiprocessors)};
  size_t number = 0;
  while (number < gpus.size() && gpus[number].all() != cuda_on_cpu::gpu.all()) ++number;
  if (number == gpus.size()) gpus.push_back(cuda_on_cpu::gpu);
  hookstats::imitated_device = int(number);
}

void tell_captures(bool told) { cuda_on_cpu::captures_are_told = told; }
int64_t last_error() { return cuda_on_cpu::last_error; }
void reserve_scratch() { hookstats::reserve_scratch(at::kCPU); }
hookstats::cuda::Launch launch_here() { return hookstats::launch_on(at::kCPU, std::nullopt); }
int64_t scratch() { return reinterpret_cast<int64_t>(launch_here().partials); }

// An arrival that belongs to no launch, at the piece of scratch of this stream.
void stray_arrival(int64_t word) { launch_here().arrivals[word] += 1; }

// What streams were told since this was asked.
std::vector<std::string> order() { return std::exchange(cuda_on_cpu::order, {}); }
void end_graph(int64_t capture) { cuda_on_cpu::end_graph(capture); }
void use_foreign_streams(bool use) { hookstats::imitates_foreign_streams = use; }
void use_memory(bool has_some) { cuda_on_cpu::has_memory = has_some; }
int64_t blocks() { return cuda_on_cpu::blocks; }
int64_t queries() { return cuda_on_cpu::queries; }
int64_t mended() { return hookstats::cuda::mended(); }
void forget_kernels() { cuda_on_cpu::loaded.clear(); }
void load_kernels(at::IntArrayRef dtypes, int64_t kind) { hookstats::load_kernels(at::kCPU, dtypes.vec(), kind); }
void close_step(at::TensorList blocks) {
  const hookstats::Closing closing(at::kCPU);
  for (const at::Tensor& block : blocks) block.zero_();
  closing.end();
}

// Of packs first, first + step, ... of `inner` in each run, how far from the first element each lies.
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
void use_one_part(bool use) { in_one_part = use; }
int64_t copies() { return cuda_on_cpu::copies; }
void shuffle(int64_t seed) { cuda_on_cpu::shuffle_seed = unsigned(seed); }
void use_small_variant(int64_t bits) { hookstats::cuda::small_variant() = int(bits); }
int64_t cluster_launches() { return cuda_on_cpu::cluster_launches; }
int64_t launches() { return cuda_on_cpu::launches; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(hookstats_cuda_on_cpu, m) {
  m.def("shuffle(int seed) -> ()", &shuffle);
  m.def("launches() -> int", &launches);
  m.def("copies() -> int", &copies);
  m.def("use_one_part(bool use) -> ()", &use_one_part);
  m.def("cluster_launches() -> int", &cluster_launches);
  m.def("use_small_variant(int bits) -> ()", &use_small_variant);
  m.def("switch_off_after(Tensor flag, int blocks) -> ()", &switch_off_after);
  m.def("run_faulty(str name) -> int", &run_faulty);
  m.def("use_stream(int stream, int capture=0) -> ()", &use_stream);
  m.def(
      "use_gpu(int capability=0, int shared_memory=0, int driver=0, int runtime=0, int built_for=0, "
      "int multiprocessors=0) -> ()",
      &use_gpu);
  m.def("tell_captures(bool told) -> ()", &tell_captures);
  m.def("last_error() -> int", &last_error);
  m.def("reserve_scratch() -> ()", &reserve_scratch);
  m.def("scratch() -> int", &scratch);
  m.def("stray_arrival(int word) -> ()", &stray_arrival);
  m.def("order() -> str[]", &order);
  m.def("end_graph(int capture) -> ()", &end_graph);
  m.def("use_foreign_streams(bool use) -> ()", &use_foreign_streams);
  m.def("use_memory(bool has_some) -> ()", &use_memory);
  m.def("blocks() -> int", &blocks);
  m.def("queries() -> int", &queries);
  m.def("mended() -> int", &mended);
  m.def("forget_kernels() -> ()", &forget_kernels);
  m.def("load_kernels(int[] dtypes, int kind) -> ()", &load_kernels);
  m.def("close_step(Tensor(a!)[] blocks) -> ()", &close_step);
  m.def("near_addresses(int inner, int outer_stride, int first, int step, int count) -> int[]", &near_addresses);
}
