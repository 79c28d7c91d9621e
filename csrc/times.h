// What hookstats itself takes of a step: time on the host, and on a device between pairs of events. Waits for nothing.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "ops.h"

namespace hookstats {

class __attribute__((visibility("hidden"))) Times {  // as pybind11's own classes
 public:
  // Counts its own life, as time on the host, and as time on the current stream of the device. Null times: nothing.
  // `calls`: of hooks in a forward, of which a part is outside. Inside another span of the thread, the host's time is
  // already counted.
  class Span {
   public:
    Span(Times* times, at::Device device, int calls = 0) : times_(times), device_(device), calls_(calls) {
      if (!times_) return;
      is_outermost_ = depth()++ == 0;
      before_ = times_->marked(device_);
      begin_ = Clock::now();
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() {
      if (!times_) return;
      const auto end = Clock::now();
      auto after = before_ ? times_->marked(device_) : std::nullopt;
      --depth();
      const std::lock_guard<std::mutex> lock(times_->mutex_);
      if (after) times_->events_.emplace_back(std::move(*before_), std::move(*after));
      if (!is_outermost_) return;
      times_->host_ += end - begin_;
      times_->calls_ += calls_;
    }

   private:
    using Clock = std::chrono::steady_clock;
    static int& depth() {
      thread_local int depth = 0;
      return depth;
    }
    Times* times_;  // an Enabled keeps it
    at::Device device_;
    int calls_;
    bool is_outermost_ = false;
    Clock::time_point begin_;
    std::optional<c10::Event> before_;
  };

  int64_t calls() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

  double host_us() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::chrono::duration<double, std::micro>(host_).count();
  }

  // None while the device has not come to the last event; 0 if it was never used. Events that are read are given back.
  std::optional<double> device_us() {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (!events_.empty() && events_.back().second.query()) {
      device_us_ += 1e3 * events_.back().first.elapsedTime(events_.back().second);
      events_.pop_back();
    }
    return events_.empty() ? std::optional(device_us_) : std::nullopt;
  }

 private:
  // An event on the current stream; none where there are none, or where a CUDA graph would capture it.
  static std::optional<c10::Event> marked(at::Device device) {
    if (device.is_cpu()) return std::nullopt;
    try {
      if (is_captured(device)) return std::nullopt;
      c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
      event.record(c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
      return event;
    } catch (const std::exception&) {  // a device without timing
      return std::nullopt;
    }
  }

  mutable std::mutex mutex_;
  std::chrono::steady_clock::duration host_{};
  int64_t calls_ = 0;
  double device_us_ = 0;
  std::vector<std::pair<c10::Event, c10::Event>> events_;
};

}  // namespace hookstats
