// Devices and their streams: in which order memory is written and used there, and what CUDA graphs keep.

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
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

namespace {

// A stream of torch's own is never destroyed. The number of another one is its address, and so an even one; the default
// stream is number 0.
cuda::Stream current_stream(at::Device device) {
#if defined(HOOKSTATS_CUDA_ON_CPU)
  return {imitated_stream, number_of(device), !imitates_foreign_streams};
#else
  if (device.is_cpu()) return {nullptr, 0, true};
  const auto stream = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
  return {stream.native_handle(), number_of(device), stream.id() == 0 || stream.id() % 2 != 0};
#endif
}

}  // namespace

cuda::Launch launch_on(at::Device device, const std::optional<at::Tensor>& active, int64_t doubles, int64_t counters) {
  cuda::Launch launch{};
  const int32_t* flag = active ? active->const_data_ptr<int32_t>() : nullptr;
  check(cuda::launch_on(launch, current_stream(device), flag, doubles, counters));
  return launch;
}

void check(const char* cuda_error) { TORCH_CHECK(!cuda_error, "hookstats: CUDA: ", cuda_error); }

at::Tensor on_device(std::vector<unsigned char>& table, at::Device device) {
  return at::from_blob(table.data(), {int64_t(table.size())}, at::kByte)
      .to(device, at::kByte, /*non_blocking=*/false, /*copy=*/true);
}
#endif

Closing::Closing([[maybe_unused]] at::Device device) : device_(device) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (!runs_cuda_kernels(device_)) return;
  const c10::DeviceGuard guard(device_);
  check(cuda::begin_closing(current_stream(device_)));
#endif
}

void Closing::end() const {
#if defined(HOOKSTATS_CUDA_KERNELS)
  if (!runs_cuda_kernels(device_)) return;
  const c10::DeviceGuard guard(device_);
  check(cuda::end_closing(current_stream(device_)));
#endif
}

MadeOn::MadeOn(at::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}

void MadeOn::written() {
  if (!stream_) return;
  capture_ = capture_on(device_);
  event_ = std::make_shared<c10::Event>(device_.type());
  event_->record(*stream_);
}

void MadeOn::used_here(const std::vector<at::Tensor>& memory) const {
  if (!stream_) return;
  const auto here = c10::impl::getDeviceGuardImpl(device_.type())->getStream(device_);
  // What was made in a capture can be waited for there alone. Before a capture, torch has waited for all that was made.
  if (here == *stream_ || capture_on(device_) != capture_) return;
  event_->block(here);
  if (capture_) return;  // the memory is its graph's
  for (const at::Tensor& each : memory) each.record_stream(here);
}

unsigned long long capture_on([[maybe_unused]] at::Device device) {
#if defined(HOOKSTATS_CUDA_KERNELS)
  return runs_cuda_kernels(device) ? cuda::capture_on(stream_of(device)) : 0;
#else
  return 0;
#endif
}

bool is_captured(at::Device device) { return capture_on(device) != 0; }

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
