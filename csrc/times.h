// The host's time that hookstats itself takes of a step.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>

namespace hookstats {

class __attribute__((visibility("hidden"))) Times {  // as pybind11's own classes
 public:
  // Counts its own life; inside another span of the thread, that is already counted. Null times: nothing. `calls`: of
  // hooks in a forward, of which a part is outside.
  class Span {
   public:
    explicit Span(Times* times, int calls = 0) : times_(times), calls_(calls) {
      if (times_ && depth()++ == 0) begin_ = Clock::now();
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span() {
      if (!times_ || --depth() > 0) return;
      const auto took = Clock::now() - begin_;
      const std::lock_guard<std::mutex> lock(times_->mutex_);
      times_->host_ += took;
      times_->calls_ += calls_;
    }

   private:
    using Clock = std::chrono::steady_clock;
    static int& depth() {
      thread_local int depth = 0;
      return depth;
    }
    Times* times_;  // an Enabled keeps it
    int calls_;
    Clock::time_point begin_;
  };

  int64_t calls() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return calls_;
  }

  double host_us() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::chrono::duration<double, std::micro>(host_).count();
  }

 private:
  mutable std::mutex mutex_;
  std::chrono::steady_clock::duration host_{};
  int64_t calls_ = 0;
};

}  // namespace hookstats
