// The memory that the CUDA kernels of a stream work in.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "ops.h"

namespace hookstats {

#if defined(HOOKSTATS_CUDA_KERNELS)
namespace {

// Scratch belongs to a (device, stream): two streams may measure at once. Graphs that torch captures all come from one
// stream, and are replayed on any: each capture has scratch of its own. Spare pieces are made ahead, because a hook
// must not allocate (it may run while a CUDA graph is captured).
class Scratch {
 public:
  struct Piece {
    at::Tensor partials, arrivals, clock;
  };

  void reserve(at::Device device) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto& spare = spare_[key(device)];
    while (spare.size() < kSpare) spare.push_back(make(device));
  }

  Piece of(at::Device device, void* stream) {
    const unsigned long long capture = cuda::capture_on(stream);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find({key(device), stream, capture});
    if (found != used_.end()) return found->second;
    const Piece piece = capture ? for_capture(device) : next(device);
    used_.emplace(std::make_tuple(key(device), stream, capture), piece);
    return piece;
  }

 private:
  static constexpr size_t kSpare = 6;     // of 3.8 MB
  static constexpr size_t kCaptures = 4;  // whose graphs may be replayed at once; nobody tells when a graph is no more
  Piece next(at::Device device) {
    auto& spare = spare_[key(device)];
    if (spare.empty()) spare.push_back(make(device));
    const Piece piece = spare.back();
    spare.pop_back();
    return piece;
  }
  Piece for_capture(at::Device device) {
    auto& [pieces, captures] = captured_[key(device)];
    if (pieces.size() < kCaptures && !spare_[key(device)].empty()) pieces.push_back(next(device));
    TORCH_CHECK(!pieces.empty(), "hookstats: expected scratch on ", device,
                " from before the capture of a CUDA graph, where nothing can be allocated; attach made none there");
    return pieces[captures++ % pieces.size()];
  }
  static int key(at::Device device) { return device.is_cpu() ? -1 : device.index(); }
  at::Tensor clock(at::Device device) {  // one, whatever the stream
    auto& clock = clocks_[key(device)];
    if (!clock.defined()) clock = at::zeros({1}, at::TensorOptions().device(device).dtype(at::kLong));
    return clock;
  }
  Piece make(at::Device device) {
    const auto options = at::TensorOptions().device(device);
    Piece piece{at::empty({cuda::kScratchDoubles}, options.dtype(at::kDouble)),
                at::zeros({cuda::kScratchCounters}, options.dtype(at::kInt)), clock(device)};
    wait_for(device);  // it may be used first on another stream than the one that clears it here
    return piece;
  }

  std::mutex mutex_;
  std::map<int, at::Tensor> clocks_;
  std::map<int, std::vector<Piece>> spare_;
  std::map<int, std::pair<std::vector<Piece>, size_t>> captured_;  // and how many captures there were
  std::map<std::tuple<int, void*, unsigned long long>, Piece> used_;
};

Scratch& scratch() {
  static auto* the = new Scratch;  // never destroyed: the device may be gone before static destructors run
  return *the;
}

std::string in_words(int version) { return c10::str(version / 1000, ".", version % 1000 / 10); }

// Throws what is expected and what was found where the kernels cannot run on a device.
void check_versions(at::Device device) {
  constexpr int kOldestDriver = 12010;  // from this on kernels take 32 KB of parameters (many.cu)
  constexpr int kOldestGpu = 80;        // from this on shared memory is filled asynchronously (device.h)
  cuda::Versions found;
  const char* problem = cuda::ask(found, device.is_cpu() ? 0 : device.index());
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
  const auto how = cuda::among_many(input, HistogramKind::none, device.is_cpu() ? 0 : device.index());
  auto many = cuda::plan_many({input}, {once.state}, how);
  const auto table = at::from_blob(many.table.data(), {int64_t(many.table.size())}, at::kByte).to(device);
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
  const auto piece = scratch().of(device, stream);
  return {stream,
          device.is_cpu() ? 0 : device.index(),
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
  scratch().reserve(device);
  try_once(device);
  wait_for(device);  // for what was cleared on this stream, and is used on others
#endif
}

}  // namespace hookstats
