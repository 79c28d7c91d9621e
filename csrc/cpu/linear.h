// Linear bins on the CPU: a thread's own counters, one update per value. Slower than histogram.h; made on request only.
// Included by accumulate.cpp alone, as tile.h.
#pragma once

#include <vector>

#include "tile.h"

namespace hookstats::cpu {

class LinearHistogram {
 public:
  // `plane`: so many neighbouring lanes of a tile are elements of one channel.
  LinearHistogram(const State& state, int plane) : state_(state), plane_(plane) {
    if (state.kind != HistogramKind::linear) return;
    const int64_t channels = state.by_channel ? std::min<int64_t>(kLanes / plane, state.channels) : 1;
    stride_ = state.bins + 1;  // the last takes NaN and Inf, and is dropped
    lane_is_channel_ = channels > 1;
    if (channels * stride_ > kMostWords) return;
    for (int lane = 0; lane < kLanes; ++lane) {
      first_[lane] =
          lane_is_channel_ ? lane / plane % state.channels * stride_ : 0;  // several lanes may be one channel
    }
    thread_local std::vector<uint32_t> buffer;
    if (int64_t(buffer.size()) < channels * stride_) buffer.resize(channels * stride_);
    counts_ = buffer.data();
    used_ = channels * stride_;
  }
  ~LinearHistogram() { flush(); }

  // The channel of lane 0 from here on.
  void move_to(int64_t channel) {
    if (channel != channel_ && state_.by_channel) flush();
    channel_ = channel;
  }

  template <class scalar_t>
  void add(const Tile<scalar_t>& tile) {
    if (state_.kind != HistogramKind::linear) return;
    if (!counts_) return add_to_state(tile);
    if (pending_ > kMostPending) flush();
    pending_ += int64_t(tile.rows) * tile.width;
    int64_t at[kLanes];
    for (int r = 0; r < tile.rows; ++r) {
      const scalar_t* row = tile.row(r);
      for (int lane = 0; lane < tile.width; ++lane) at[lane] = first_[lane] + counter_of(widen(row[lane]));
      for (int lane = 0; lane < tile.width; ++lane) ++counts_[at[lane]];
    }
  }

 private:
  static constexpr int64_t kMostPending = 1 << 30;  // of 32-bit counters
  static constexpr int64_t kMostWords = 1 << 16;    // of a thread's own; more are counted where they are kept

  template <class scalar_t>
  void add_to_state(const Tile<scalar_t>& tile) {
    for (int r = 0; r < tile.rows; ++r) {
      for (int lane = 0; lane < tile.width; ++lane) {
        const int bin = counter_of(widen(tile.row(r)[lane]));
        if (bin < state_.bins) add_to_bin(channel_ + (lane_is_channel_ ? lane / plane_ % state_.channels : 0), bin, 1);
      }
    }
  }

  void add_to_bin(int64_t channel, int64_t bin, int64_t count) {
    __atomic_fetch_add(&state_.histogram[(state_.by_channel ? channel : 0) * state_.bins + bin], count,
                       __ATOMIC_RELAXED);
  }

  template <class acc_t>
  int counter_of(acc_t x) const {
    return x - x == 0 ? linear_bin(x, acc_t(state_.low), acc_t(state_.high), state_.bins) : state_.bins;
  }

  void flush() {
    pending_ = 0;
    for (int64_t i = 0; i < used_; ++i) {
      const int64_t bin = i % stride_;
      if (counts_[i] != 0 && bin < state_.bins) add_to_bin(channel_ + i / stride_, bin, counts_[i]);
      counts_[i] = 0;
    }
  }

  const State& state_;
  int plane_;
  bool lane_is_channel_ = false;
  int64_t stride_ = 0, used_ = 0;
  int64_t first_[kLanes];
  uint32_t* counts_ = nullptr;
  int64_t channel_ = 0;
  int64_t pending_ = 0;
};

}  // namespace hookstats::cpu
