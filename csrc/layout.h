// How a strided tensor maps to (channel, element): the elements of a channel are numbered 0 .. count - 1.
// Statistics do not depend on the order of the elements, so the dimensions beside the channel are sorted by stride and
// merged where they are contiguous: any permutation of a dense tensor becomes one or two dimensions.
// Where only some rows count (tokens that are not padding), the dimensions that rows are numbered by come first, in the
// tensor's order, and the row of an element is looked up in a list.
// Host and device code; knows nothing of torch.
#pragma once

#include <cstdint>
#include <utility>

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

  int row_dims = 0;                    // the first dimensions, of which only the rows listed count; 0: all rows count
  const int32_t* row_index = nullptr;  // the numbers of those rows
  const int32_t* kept = nullptr;       // if only the device knows how many there are: then `count` is of all rows

  // Innermost dimension beside the rows; one element where there is none.
  HOOKSTATS_HD int64_t inner_size() const { return ndim > row_dims ? size[ndim - 1] : 1; }
  HOOKSTATS_HD int64_t inner_stride() const { return ndim ? stride[ndim - 1] : 1; }

  // Neighbouring channels lie closer than neighbouring elements of a channel.
  HOOKSTATS_HD bool channels_are_inner() const {
    return channels > 1 && (count == 1 || channel_stride < inner_stride());
  }

  // Elements of one channel in a row.
  HOOKSTATS_HD int64_t row_size() const {
    int64_t elements = 1;
    for (int d = row_dims; d < ndim; ++d) elements *= size[d];
    return elements;
  }

  // Offset of element i of channel 0.
  HOOKSTATS_HD int64_t offset(int64_t i) const {
    int64_t at = 0;
    for (int d = ndim - 1; d > 0; --d) {
      if (d == row_dims - 1) i = row_index[i];
      at += i % size[d] * stride[d];
      i /= size[d];
    }
    if (row_dims == 1) i = row_index[i];
    return ndim ? at + i * stride[0] : 0;
  }

  struct Dim {
    int64_t size, stride;
  };

  // Takes `n` dimensions beside the channel, of which the first `of_rows` are those of listed rows. False if more than
  // kMaxDims are left after merging.
  bool set_dims(const Dim* dims, int n, int of_rows = 0) {
    ndim = 0;
    count = 1;
    if (!add_dims(dims, of_rows)) return false;
    if (of_rows > 0 && ndim == 0) size[ndim++] = 1;  // a single row is looked up, too
    row_dims = ndim;
    return add_dims(dims + of_rows, n - of_rows);
  }

  // Behind those that are there, into which they are not merged.
  bool add_dims(const Dim* dims, int n) {
    const int first = ndim;
    for (const Dim* dim = dims; dim < dims + n; ++dim) {
      count *= dim->size;
      if (dim->size == 1) continue;
      if (ndim > first && stride[ndim - 1] == dim->size * dim->stride) {
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
