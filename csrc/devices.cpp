// Devices and their streams: in which order memory is written and used there, what CUDA graphs keep, and what is looked
// at, made and loaded before the first launch.

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "stable.h"

namespace hookstats {

namespace {

// The stream that is current on a device with CUDA kernels. The library that knows is not linked: the same binary loads
// with and without CUDA in torch.
void* handle_of([[maybe_unused]] Device device) {
#if defined(HOOKSTATS_CUDA_ON_CPU)
  return imitated_stream;
#else
  using Ask = AOTITorchError (*)(int32_t, void**);
  static const auto ask = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Ask>(dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
  }();
  if (!ask) refuse("hookstats: expected aoti_torch_get_current_cuda_stream in this torch's libtorch_cuda, found none");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(ask(device.index, &stream));
  return stream;
#endif
}

}  // namespace

// A stream of torch's own is never destroyed. The number of another one is its address, and so an even one; the default
// stream is number 0.
cuda::Stream current_stream(Device device) {
#if defined(HOOKSTATS_CUDA_ON_CPU)
  const bool stays = !imitates_foreign_streams;
#else
  const auto id = stable::accelerator::getCurrentStream(device.index).id();
  const bool stays = id == 0 || id % 2 != 0;
#endif
  return {handle_of(device), number_of(device), stays};
}

Tensor on_device(std::vector<unsigned char>& table, Device device) {
  const auto bytes = int64_t(table.size());
  const std::vector<int64_t> sizes = {bytes}, strides = {1};
  const auto here = stable::from_blob(table.data(), sizes, strides, stable::Device(torch::headeronly::DeviceType::CPU),
                                      ScalarType::Byte);
  Tensor there = empty({bytes}, ScalarType::Byte, device);
  return stable::copy_(there, here, /*non_blocking=*/false);
}

Closing::Closing(Device device) : device_(device) {
  if (!runs_cuda_kernels(device_)) return;
  const OnDevice here(device_);
  cuda::begin_closing(current_stream(device_));
}

void Closing::end(Device device) {
  if (!runs_cuda_kernels(device)) return;
  const OnDevice here(device);
  cuda::end_closing(current_stream(device));
}

unsigned long long capture_on(Device device) {
  return runs_cuda_kernels(device) ? cuda::capture_on(handle_of(device)) : 0;
}

void keep_for_graphs(const std::vector<Memory>& memory) {
  static std::mutex mutex;
  static auto* const kept = new std::map<const void*, Memory>;  // never destroyed: graphs may be replayed until then
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Memory& each : memory) kept->emplace(each.get(), each);
}

namespace {

std::string in_words(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

// Throws what is expected and what was found where the kernels cannot run on a device; loads them where that must have
// been done before a CUDA graph is captured.
void check_versions(Device device) {
  constexpr int kLoadsInCaptures = 12030;  // a driver from CUDA 12.3 on
  constexpr int kOldestDriver = 12010;     // from this on kernels take more than 4 KB of parameters (many.cu)
  constexpr int kOldestGpu = 80;           // from this on shared memory is filled asynchronously (device.h)
  const cuda::Versions found = cuda::versions_of(number_of(device));
  const int driver = found.runtime / 1000 > kOldestDriver / 1000 ? found.runtime / 1000 * 1000 : kOldestDriver;
  if (found.driver < driver) {
    refuse("hookstats: ", device, ": expected an NVIDIA driver for CUDA ", in_words(driver),
           " or newer, found one for CUDA ", in_words(found.driver), "; this hookstats was built with CUDA ",
           in_words(found.runtime), ": update the driver, or rebuild hookstats with a toolkit from 12.1 to ",
           "the driver's version");
  }
  if (found.capability < kOldestGpu) {
    refuse("hookstats: ", device, ": expected a GPU of compute capability 8.0 or newer, found ", found.capability / 10,
           ".", found.capability % 10);
  }
  if (found.driver < kLoadsInCaptures) cuda::load_kernels(number_of(device));
}

Tensor zeros(std::vector<int64_t> sizes, ScalarType dtype, Device device) {
  Tensor made = empty(std::move(sizes), dtype, device);
  return stable::zero_(made);
}

// One launch of a kernel of each file, which loads the CUDA runtime and compiles what was built as PTX alone: a hook
// that came first might do so while a CUDA graph is captured.
void try_kernels(Device device) {
  const Tensor moments = zeros({2 * kFields, 1}, ScalarType::Double, device);
  const Tensor counters = zeros({2 * kCounters}, ScalarType::Long, device);
  const auto site = [&](int64_t number) {
    auto rows = stable::narrow(const_cast<Tensor&>(moments), 0, number * kFields, kFields);
    auto words = stable::narrow(const_cast<Tensor&>(counters), 0, number * kCounters, kCounters);
    return site_of(rows, words, std::nullopt, std::nullopt);
  };
  const Site once = site(0), both = site(1);
  const Tensor x = zeros({1}, ScalarType::Float, device);
  const View view = view_of(x);
  accumulate(view, once);
  Input input = described(view, once);
  input.data = view.data;
  const auto how = cuda::among_many(input, HistogramKind::none, number_of(device));
  auto many = cuda::plan_many({input}, {once.state}, how);
  const Tensor table = on_device(many.table, device);
  const OnDevice here(device);
  const auto to = launch_on(device, nullptr, many.partials, many.arrivals);
  cuda::accumulate(many, table.const_data_ptr(), &input.data, to);
  cuda::merge(both.state, once.state, to);
  Tensor read = empty({2 * kFields, 1}, ScalarType::Double, {});
  stable::copy_(read, moments, /*non_blocking=*/false);
  const double count = view_of(read).as<double>()[kFields + k_count];
  if (count != 2) refuse("expected 2 values counted, got ", count);
}

void try_once(Device device) {
  static std::mutex mutex;
  static std::set<int> tried;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (tried.count(device.index)) return;
  }
  try {  // without the lock: operators may wait for the GIL, and who has that for the lock
    try_kernels(device);
  } catch (const std::exception& error) {
    refuse("hookstats: a first launch on ", device, " failed: ", error.what(),
           "; hookstats.build_info() says for which GPUs it was built");
  }
  const std::lock_guard<std::mutex> lock(mutex);
  tried.insert(device.index);
}

}  // namespace

int64_t reserve_scratch(Device device) {
  if (!runs_cuda_kernels(device)) return 0;
  const OnDevice here(device);
  check_versions(device);
  launch_on(device, nullptr);
  try_once(device);
  return cuda::scratch_bytes(number_of(device));
}

}  // namespace hookstats
