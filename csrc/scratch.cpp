// The memory that the CUDA kernels of a stream work in.

#include <ATen/ATen.h>

#include <map>
#include <mutex>
#include <utility>

#include "ops.h"

namespace hookstats {

#if defined(HOOKSTATS_CUDA_KERNELS)
namespace {

// Scratch belongs to a (device, stream): two streams may measure at once. Spare pieces are made ahead, because a hook
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
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = used_.find({key(device), stream});
    if (found != used_.end()) return found->second;
    auto& spare = spare_[key(device)];
    if (spare.empty()) {
      TORCH_CHECK(!cuda::is_capturing(stream), "hookstats: expected at most ", kSpare,
                  " new streams between attach and the capture of a CUDA graph, where nothing can be allocated");
      spare.push_back(make(device));
    }
    const Piece piece = spare.back();
    spare.pop_back();
    used_.emplace(std::make_pair(key(device), stream), piece);
    return piece;
  }

 private:
  static constexpr size_t kSpare = 4;  // of 2.6 MB
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
  std::map<std::pair<int, void*>, Piece> used_;
};

Scratch& scratch() {
  static auto* the = new Scratch;  // never destroyed: the device may be gone before static destructors run
  return *the;
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
  if (runs_cuda_kernels(device)) scratch().reserve(device);
#endif
}

}  // namespace hookstats
