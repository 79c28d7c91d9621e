// How a strided tensor maps to (channel, element): the elements of a channel are numbered 0 .. count - 1.
// Statistics do not depend on the order of the elements, so the dimensions beside the channel are sorted by stride and
// merged where they are contiguous: any permutation of a dense tensor becomes one or two dimensions.
// Host and device code; knows nothing of torch.
#pragma once

#include <algorithm>
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

  struct Dim {
    int64_t size, stride;
  };

  // Takes `n` dimensions beside the channel, which are reordered; false if more than kMaxDims are left after merging.
  bool set_dims(Dim* dims, int n) {
    std::stable_sort(dims, dims + n, [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
    ndim = 0;
    count = 1;
    for (const Dim* dim = dims; dim < dims + n; ++dim) {
      count *= dim->size;
      if (dim->size == 1) continue;
      if (ndim > 0 && stride[ndim - 1] == dim->size * dim->stride) {
        size[ndim - 1] *= dim->size;
        stride[ndim - 1] = dim->stride;
      } else {
        if (ndim == kMaxDims) return false;
        size[ndim] = dim->size;
        stride[ndim++] = dim->stride;
      }
    }
    return true;
  }
};

}  // namespace hookstats
