// Before the first launch on a device: whether the kernels can run there, and what is made and loaded ahead.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <mutex>
#include <set>
#include <string>

#include "ops.h"

namespace hookstats {

#if defined(HOOKSTATS_CUDA_KERNELS)
namespace {

std::string in_words(int version) { return c10::str(version / 1000, ".", version % 1000 / 10); }

// Throws what is expected and what was found where the kernels cannot run on a device.
void check_versions(at::Device device) {
  constexpr int kOldestDriver = 12010;  // from this on kernels take more than 4 KB of parameters (many.cu)
  constexpr int kOldestGpu = 80;        // from this on shared memory is filled asynchronously (device.h)
  cuda::Versions found;
  const char* problem = cuda::ask(found, number_of(device));
  const int driver = found.runtime / 1000 > kOldestDriver / 1000 ? found.runtime / 1000 * 1000 : kOldestDriver;
  TORCH_CHECK(found.driver >= driver, "hookstats: ", device, ": expected an NVIDIA driver for CUDA ", in_words(driver),
              " or newer, found one for CUDA ", in_words(found.driver), "; this hookstats was built with CUDA ",
              in_words(found.runtime), ": update the driver, or rebuild hookstats with a toolkit from 12.1 to ",
              "the driver's version");
  TORCH_CHECK(!problem, "hookstats: ", device, ": CUDA: ", problem);
  TORCH_CHECK(found.capability >= kOldestGpu, "hookstats: ", device,
              ": expected a GPU of compute capability 8.0 or newer, found ", found.capability / 10, ".",
              found.capability % 10);
}

// One launch of a kernel of each file, which loads the CUDA runtime and compiles what was built as PTX alone: a hook
// that came first might do so while a CUDA graph is captured.
void try_kernels(at::Device device) {
  const auto options = at::TensorOptions().device(device);
  const auto state = [&] {
    return Site({at::zeros({kFields, 1}, options.dtype(at::kDouble)), at::zeros({kCounters}, options.dtype(at::kLong)),
                 std::nullopt, std::nullopt});
  };
  const Site once = state(), both = state();
  const at::Tensor x = at::ones({1}, options.dtype(at::kFloat));
  accumulate(x, once);
  Input input = described(x, once);
  input.data = x.const_data_ptr();
  const auto how = cuda::among_many(input, HistogramKind::none, number_of(device));
  auto many = cuda::plan_many({input}, {once.state}, how);
  const at::Tensor table = on_device(many.table, device);
  const c10::DeviceGuard guard(device);
  const auto to = launch_on(device, std::nullopt, many.partials, many.arrivals);
  check(cuda::accumulate(many, table.const_data_ptr(), &input.data, to));
  check(cuda::merge(both.state, once.state, to));
  const double count = both.tensors.moments[k_count].item<double>();
  TORCH_CHECK(count == 2, "expected 2 values counted, got ", count);
}

void try_once(at::Device device) {
  static std::mutex mutex;
  static std::set<int> tried;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (tried.count(device.index())) return;
  }
  try {  // without the lock: operators may wait for the GIL, and who has that for the lock
    try_kernels(device);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "hookstats: a first launch on ", device, " failed: ", reason(error),
                "; hookstats.build_info() says for which GPUs it was built");
  }
  const std::lock_guard<std::mutex> lock(mutex);
  tried.insert(device.index());
}

}  // namespace

#endif  // HOOKSTATS_CUDA_KERNELS

int64_t reserve_scratch([[maybe_unused]] at::Device device) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (!runs_cuda_kernels(device)) return 0;
  check_versions(device);
  {
    const c10::DeviceGuard guard(device);
    launch_on(device, std::nullopt);
  }
  try_once(device);
  wait_for(device);  // for what was cleared on this stream, and is used on others
  return cuda::scratch_bytes(number_of(device));
#else
  return 0;
#endif
}

void load_kernels([[maybe_unused]] at::Device device, [[maybe_unused]] const std::vector<int64_t>& dtypes,
                  [[maybe_unused]] int64_t kind) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (!runs_cuda_kernels(device)) return;
  const c10::DeviceGuard guard(device);
  for (const int64_t dtype : dtypes) check(cuda::load(Dtype(dtype), HistogramKind(kind), number_of(device)));
#endif
}

}  // namespace hookstats
