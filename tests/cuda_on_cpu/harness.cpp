// The operators of csrc, and the switches of the harness: C functions, which loading.py names. The kernels are in
// kernels.cpp. No header but those of the stable ABI, as the others take half a minute.

#include "cuda_runtime.h"
#include "library.cpp"
#include "switches.h"

void* hookstats::imitated_stream = nullptr;
int hookstats::imitated_device = 0;
bool hookstats::imitates_foreign_streams = false;

namespace {

hookstats::cuda::Launch launch_here() { return hookstats::launch_on({}, nullptr); }

std::string said;  // by what failed, until somebody asks

int64_t or_said(int64_t (*ask)(const char*), const char* word) {
  try {
    return ask(word);
  } catch (const std::exception& error) {
    said = error.what();
    return 0;
  }
}

}  // namespace

extern "C" {

// What the last call failed with; null: it did not.
const char* take_error() {
  static std::string taken;
  taken = std::exchange(said, {});
  return taken.empty() ? nullptr : taken.c_str();
}

// Sets a flag to zero after that many blocks of each later launch; a negative number: never.
void switch_off_after(int32_t* flag, int64_t blocks) {
  cuda_on_cpu::before_block = nullptr;
  if (blocks < 0) return;
  cuda_on_cpu::before_block = [=](uint64_t done) {
    if (done == uint64_t(blocks)) *flag = 0;
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

void tell_captures(int64_t told) { cuda_on_cpu::captures_are_told = told; }
int64_t last_error() { return cuda_on_cpu::last_error; }
int64_t scratch() {
  return or_said([](const char*) { return reinterpret_cast<int64_t>(launch_here().partials); }, nullptr);
}

// What streams were told since this was asked, a line each.
const char* take_order() {
  static std::string lines;
  lines.clear();
  for (const std::string& each : std::exchange(cuda_on_cpu::order, {})) lines += each + "\n";
  return lines.c_str();
}

void end_graph(int64_t capture) { cuda_on_cpu::end_graph(capture); }
void use_foreign_streams(int64_t use) { hookstats::imitates_foreign_streams = use; }
void use_memory(int64_t has_some) { cuda_on_cpu::has_memory = has_some; }
void fail_device(int64_t fail) { cuda_on_cpu::device_failed = fail; }
int64_t blocks() { return cuda_on_cpu::blocks; }
int64_t queries() { return cuda_on_cpu::queries; }
void forget_kernels() { cuda_on_cpu::loaded.clear(); }
void use_one_part(int64_t use) { cuda_on_cpu::in_one_part = use; }
void shuffle(int64_t seed) { cuda_on_cpu::shuffle_seed = unsigned(seed); }
int64_t launches() { return cuda_on_cpu::launches; }
int64_t run_faulty(const char* name) {
  return or_said([](const char* word) { return cuda_on_cpu::run_faulty(word); }, name);
}

// So many as are asked for; null where there are none.
const int64_t* near_addresses(int64_t inner, int64_t outer_stride, int64_t first, int64_t step, int64_t count) {
  static std::vector<int64_t> found;
  found = cuda_on_cpu::near_addresses(inner, outer_stride, first, step, count);
  return found.empty() ? nullptr : found.data();
}

}  // extern "C"
