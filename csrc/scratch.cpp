// The memory that the CUDA kernels of a stream work in.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "ops.h"

namespace hookstats {

#if defined(HOOKSTATS_CUDA_KERNELS)
namespace {

struct Piece {
  at::Tensor partials, arrivals, clock;
};

constexpr size_t kSpare = 6;     // pieces of 3.8 MB
constexpr size_t kCaptures = 4;  // whose graphs may be replayed at once; nobody tells when a graph is no more

// Scratch belongs to a (device, stream): two streams may measure at once. Graphs that torch captures all come from one
// stream, and are replayed on any: each capture has scratch of its own. Spare pieces are made ahead, because a hook
// must not allocate (it may run while a CUDA graph is captured).
struct DeviceScratch {
  at::Device device;
  at::Tensor clock;  // one, whatever the stream
  std::vector<Piece> spare, of_captures;
  size_t captures = 0;
  std::map<std::pair<void*, unsigned long long>, Piece> used;  // by stream and capture

  explicit DeviceScratch(at::Device on) : device(on) {}

  void reserve() {
    while (spare.size() < kSpare) spare.push_back(made());
  }

  const Piece& of(void* stream) {
    const unsigned long long capture = cuda::capture_on(stream);
    const auto found = used.find({stream, capture});
    if (found != used.end()) return found->second;
    return used.emplace(std::make_pair(stream, capture), capture ? for_capture() : next()).first->second;
  }

 private:
  Piece next() {
    if (spare.empty()) spare.push_back(made());
    const Piece piece = spare.back();
    spare.pop_back();
    return piece;
  }
  Piece for_capture() {
    if (of_captures.size() < kCaptures && !spare.empty()) of_captures.push_back(next());
    TORCH_CHECK(!of_captures.empty(), "hookstats: expected scratch on ", device,
                " from before the capture of a CUDA graph, where nothing can be allocated; attach made none there");
    return of_captures[captures++ % of_captures.size()];
  }
  Piece made() {
    const auto options = at::TensorOptions().device(device);
    if (!clock.defined()) clock = at::zeros({1}, options.dtype(at::kLong));
    Piece piece{at::empty({cuda::kScratchDoubles}, options.dtype(at::kDouble)),
                at::zeros({cuda::kScratchCounters}, options.dtype(at::kInt)), clock};
    wait_for(device);  // it may be used first on another stream than the one that clears it here
    return piece;
  }
};

std::mutex scratch_mutex;
auto* const scratch_of_devices = new std::map<int, DeviceScratch>;  // never destroyed: the device may be gone before

// Calls f with the scratch of a device, which no other thread has meanwhile.
template <class F>
auto with_scratch(at::Device device, const F& f) {
  const std::lock_guard<std::mutex> lock(scratch_mutex);
  return f(scratch_of_devices->try_emplace(number_of(device), device).first->second);
}

std::string in_words(int version) { return c10::str(version / 1000, ".", version % 1000 / 10); }

// Throws what is expected and what was found where the kernels cannot run on a device.
void check_versions(at::Device device) {
  constexpr int kOldestDriver = 12010;  // from this on kernels take 32 KB of parameters (many.cu)
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
  const auto to = launch_on(device, std::nullopt);
  check(cuda::accumulate(many, table.const_data_ptr(), &input.data, to));
  check(cuda::merge(both.state, once.state, to));
  const double count = both.tensors.moments[k_count].item<double>();
  TORCH_CHECK(count == 2, "expected 2 values counted, got ", count);
}

void try_once(at::Device device) {
  static std::mutex mutex;
  static std::set<int> tried;
  const std::lock_guard<std::mutex> lock(mutex);
  if (tried.count(device.index())) return;
  try {
    try_kernels(device);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "hookstats: a first launch on ", device, " failed: ", reason(error),
                "; hookstats.build_info() says for which GPUs it was built");
  }
  tried.insert(device.index());
}

}  // namespace

cuda::Launch launch_on(at::Device device, const std::optional<at::Tensor>& active) {
  void* stream = stream_of(device);
  const Piece piece = with_scratch(device, [&](DeviceScratch& scratch) { return scratch.of(stream); });
  return {stream,
          number_of(device),
          piece.partials.mutable_data_ptr<double>(),
          reinterpret_cast<unsigned*>(piece.arrivals.mutable_data_ptr<int32_t>()),
          reinterpret_cast<unsigned long long*>(piece.clock.mutable_data_ptr<int64_t>()),
          active ? active->const_data_ptr<int32_t>() : nullptr};
}
#endif  // HOOKSTATS_CUDA_KERNELS

void reserve_scratch([[maybe_unused]] at::Device device) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (!runs_cuda_kernels(device)) return;
  check_versions(device);
  with_scratch(device, [](DeviceScratch& scratch) { scratch.reserve(); });
  try_once(device);
  wait_for(device);  // for what was cleared on this stream, and is used on others
#endif
}

}  // namespace hookstats
