// The operators of csrc, and the switches of the harness. The kernels are in kernels.cpp.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "cuda_runtime.h"
#include "library.cpp"
#include "switches.h"

void* hookstats::imitated_stream = nullptr;
int hookstats::imitated_device = 0;
bool hookstats::imitates_foreign_streams = false;

namespace {

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
void use_gpu(int64_t capability, int64_t shared_memory, int64_t driver, int64_t runtime, int64_t multiprocessors) {
  static std::vector<cuda_on_cpu::Gpu> gpus(1);
  const cuda_on_cpu::Gpu first;
  const auto or_first = [](int64_t given, int otherwise) { return given ? int(given) : otherwise; };
  cuda_on_cpu::gpu = {or_first(shared_memory, first.shared_memory), or_first(capability, first.capability),
                      or_first(driver, first.driver), or_first(runtime, first.runtime),
                      or_first(multiprocessors, first.multiprocessors)};
  size_t number = 0;
  while (number < gpus.size() && gpus[number].all() != cuda_on_cpu::gpu.all()) ++number;
  if (number == gpus.size()) gpus.push_back(cuda_on_cpu::gpu);
  hookstats::imitated_device = int(number);
}

void tell_captures(bool told) { cuda_on_cpu::captures_are_told = told; }
int64_t last_error() { return cuda_on_cpu::last_error; }
hookstats::cuda::Launch launch_here() { return hookstats::launch_on({}, nullptr); }
int64_t scratch() { return reinterpret_cast<int64_t>(launch_here().partials); }

// An arrival that belongs to no launch, at the piece of scratch of this stream.
void stray_arrival(int64_t word) { launch_here().arrivals[word] += 1; }

// What streams were told since this was asked.
std::vector<std::string> order() { return std::exchange(cuda_on_cpu::order, {}); }
void end_graph(int64_t capture) { cuda_on_cpu::end_graph(capture); }
void use_foreign_streams(bool use) { hookstats::imitates_foreign_streams = use; }
void use_memory(bool has_some) { cuda_on_cpu::has_memory = has_some; }
void fail_device(bool fail) { cuda_on_cpu::device_failed = fail; }
int64_t blocks() { return cuda_on_cpu::blocks; }
int64_t queries() { return cuda_on_cpu::queries; }
void forget_kernels() { cuda_on_cpu::loaded.clear(); }
void close_step(at::TensorList blocks) {
  const hookstats::Closing closing({});
  for (const at::Tensor& block : blocks) block.zero_();
  closing.end();
}

void use_one_part(bool use) { cuda_on_cpu::in_one_part = use; }
int64_t copies() { return cuda_on_cpu::copies; }
void shuffle(int64_t seed) { cuda_on_cpu::shuffle_seed = unsigned(seed); }
int64_t launches() { return cuda_on_cpu::launches; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(hookstats_cuda_on_cpu, m) {
  m.def("shuffle(int seed) -> ()", &shuffle);
  m.def("launches() -> int", &launches);
  m.def("copies() -> int", &copies);
  m.def("use_one_part(bool use) -> ()", &use_one_part);
  m.def("switch_off_after(Tensor flag, int blocks) -> ()", &switch_off_after);
  m.def("run_faulty(str name) -> int", &cuda_on_cpu::run_faulty);
  m.def("use_stream(int stream, int capture=0) -> ()", &use_stream);
  m.def("use_gpu(int capability=0, int shared_memory=0, int driver=0, int runtime=0, int multiprocessors=0) -> ()",
        &use_gpu);
  m.def("tell_captures(bool told) -> ()", &tell_captures);
  m.def("last_error() -> int", &last_error);
  m.def("scratch() -> int", &scratch);
  m.def("stray_arrival(int word) -> ()", &stray_arrival);
  m.def("order() -> str[]", &order);
  m.def("end_graph(int capture) -> ()", &end_graph);
  m.def("use_foreign_streams(bool use) -> ()", &use_foreign_streams);
  m.def("use_memory(bool has_some) -> ()", &use_memory);
  m.def("fail_device(bool fail) -> ()", &fail_device);
  m.def("blocks() -> int", &blocks);
  m.def("queries() -> int", &queries);
  m.def("forget_kernels() -> ()", &forget_kernels);
  m.def("close_step(Tensor(a!)[] blocks) -> ()", &close_step);
  m.def("near_addresses(int inner, int outer_stride, int first, int step, int count) -> int[]",
        &cuda_on_cpu::near_addresses);
}
