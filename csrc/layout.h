// How a strided tensor maps to (channel, element): the elements of a channel are numbered 0 .. count - 1.
// Statistics do not depend on the order of the elements, so the dimensions beside the channel are sorted by stride and
// merged where they are contiguous: any permutation of a dense tensor becomes one or two dimensions.
// Host and device code; knows nothing of torch.
#pragma once

#include <cstdint>

#include "stats.h"

namespace hookstats {

struct Layout {
  static constexpr int kMaxDims = 12;

  int64_t channels = 1;
  int64_t channel_stride = 0;
  int64_t count = 1;  // elements of one channel
  int ndim = 0;       // dimensions beside the channel, outermost first
  int64_t size[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};

  // Innermost dimension; one element where there is none.
  HOOKSTATS_HD int64_t inner_size() const { return ndim ? size[ndim - 1] : 1; }
  HOOKSTATS_HD int64_t inner_stride() const { return ndim ? stride[ndim - 1] : 1; }

  // Neighbouring channels lie closer than neighbouring elements of a channel.
  HOOKSTATS_HD bool channels_are_inner() const {
    return channels > 1 && (count == 1 || channel_stride < inner_stride());
  }

  // Offset of element i of channel 0.
  HOOKSTATS_HD int64_t offset(int64_t i) const {
    int64_t at = 0;
    for (int d = ndim - 1; d > 0; --d) {
      at += i % size[d] * stride[d];
      i /= size[d];
    }
    return ndim ? at + i * stride[0] : 0;
  }

  // Adds a dimension beside the channel; false when there are more than kMaxDims that do not merge.
  bool add(int64_t new_size, int64_t new_stride) {
    count *= new_size;
    if (new_size == 1) return true;
    int at = ndim;
    while (at > 0 && stride[at - 1] < new_stride) --at;
    const bool into_outer = at > 0 && stride[at - 1] == new_size * new_stride;
    const bool into_inner = at < ndim && new_stride == size[at] * stride[at];
    if (into_inner) {
      size[at] *= new_size;
      if (into_outer) {
        size[at - 1] *= size[at];
        stride[at - 1] = stride[at];
        remove(at);
      }
    } else if (into_outer) {
      size[at - 1] *= new_size;
      stride[at - 1] = new_stride;
    } else {
      if (ndim == kMaxDims) return false;
      for (int d = ndim++; d > at; --d) size[d] = size[d - 1], stride[d] = stride[d - 1];
      size[at] = new_size;
      stride[at] = new_stride;
    }
    return true;
  }

 private:
  void remove(int at) {
    for (--ndim; at < ndim; ++at) size[at] = size[at + 1], stride[at] = stride[at + 1];
  }
};

}  // namespace hookstats
