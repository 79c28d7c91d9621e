// Devices and their streams: in which order memory is written and used there, and what CUDA graphs keep.

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

#include "ops.h"

namespace hookstats {

#if defined(HOOKSTATS_CUDA_ON_CPU)
bool runs_cuda_kernels(at::Device) { return true; }
#elif defined(HOOKSTATS_CUDA)
bool runs_cuda_kernels(at::Device device) { return device.is_cuda(); }
#endif

#if defined(HOOKSTATS_CUDA_KERNELS)
void* stream_of(at::Device device) {
#if defined(HOOKSTATS_CUDA_ON_CPU)
  return imitated_stream;
#endif
  if (device.is_cpu()) return nullptr;
  // libc10 alone: the same binary loads with and without CUDA in torch.
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
}

void check(const char* cuda_error) { TORCH_CHECK(!cuda_error, "hookstats: CUDA: ", cuda_error); }

at::Tensor on_device(std::vector<unsigned char>& table, at::Device device) {
  return at::from_blob(table.data(), {int64_t(table.size())}, at::kByte)
      .to(device, at::kByte, /*non_blocking=*/false, /*copy=*/true);
}
#endif

MadeOn::MadeOn(at::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}

void MadeOn::written() {
  if (is_captured(device_)) stream_.reset();  // in its graph alone, where it comes first
  if (!stream_) return;
  event_ = std::make_shared<c10::Event>(device_.type());
  event_->record(*stream_);
}

void MadeOn::used_here(const std::vector<at::Tensor>& memory) const {
  if (!stream_) return;
  const auto here = c10::impl::getDeviceGuardImpl(device_.type())->getStream(device_);
  if (here == *stream_ || is_captured(device_)) return;
  event_->block(here);
  for (const at::Tensor& each : memory) each.record_stream(here);
}

bool is_captured([[maybe_unused]] at::Device device) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  return runs_cuda_kernels(device) && cuda::is_capturing(stream_of(device));
#else
  return false;
#endif
}

void keep_for_graphs(const std::vector<at::Tensor>& memory) {
  static std::mutex mutex;
  static auto* const kept =
      new std::map<const void*, at::Tensor>;  // never destroyed: graphs may be replayed until then
  const std::lock_guard<std::mutex> lock(mutex);
  for (const at::Tensor& each : memory) kept->emplace(each.unsafeGetTensorImpl(), each);
}

void keep_for_graphs(const SiteState& site, const std::vector<at::Tensor>& others) {
  keep_for_graphs({site.moments, site.counters});
  if (site.histogram) keep_for_graphs({*site.histogram});
  if (site.active) keep_for_graphs({*site.active});
  keep_for_graphs(others);
}

void wait_for(at::Device device) {
  if (device.is_cpu()) return;
  const auto* impl = c10::impl::getDeviceGuardImpl(device.type());
  impl->synchronizeStream(impl->getStream(device));
}

const char* reason(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

}  // namespace hookstats
