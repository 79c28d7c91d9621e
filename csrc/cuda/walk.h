// The addresses of a thread's packs, one after the other, in each kind of layout.
#pragma once

#include "device.h"

namespace hookstats::cuda {

// The addresses of the packs first, first + step, ... of a channel, in one dimension.
template <class scalar_t>
struct LineWalker {
  static constexpr bool kKnowsLists = false, kAligned = true;
  const scalar_t* at;
  int64_t step_at;

  HOOKSTATS_HD LineWalker(const scalar_t* data, const Layout& layout, int64_t first, int64_t step)
      : at(data + first * layout.inner_stride()), step_at(step * layout.inner_stride()) {}
  HOOKSTATS_HD const scalar_t* next() {
    const scalar_t* here = at;
    at += step_at;
    return here;
  }
};

// The same where packs lie at any address.
template <class scalar_t>
struct UnalignedLineWalker : LineWalker<scalar_t> {
  static constexpr bool kAligned = false;
  using LineWalker<scalar_t>::LineWalker;
};

// The same in up to two dimensions, without a division; the inner one has less than 2^30 packs, or is the only one.
template <class scalar_t>
struct NearWalker {
  static constexpr bool kKnowsLists = false, kAligned = true;
  const scalar_t* at;
  int64_t step_at, wrap;
  int inner, inner_size, step_inner;

  HOOKSTATS_HD NearWalker(const scalar_t* data, const Layout& layout, int64_t first, int64_t step) {
    const int64_t stride = layout.inner_stride();
    if (layout.ndim < 2) {
      at = data + first * stride;
      step_at = step * stride;
      inner = step_inner = 0;
      inner_size = 1;
      wrap = 0;
      return;
    }
    const int64_t size = layout.inner_size(), outer_stride = layout.stride[0];
    at = data + first / size * outer_stride + first % size * stride;
    step_at = step / size * outer_stride + step % size * stride;
    wrap = outer_stride - size * stride;
    inner = int(first % size);
    step_inner = int(step % size);
    inner_size = int(size);
  }
  HOOKSTATS_HD const scalar_t* next() {
    const scalar_t* here = at;
    at += step_at;
    inner += step_inner;
    if (inner >= inner_size) {
      inner -= inner_size;
      at += wrap;
    }
    return here;
  }
};

// The same where packs lie at any address.
template <class scalar_t>
struct UnalignedNearWalker : NearWalker<scalar_t> {
  static constexpr bool kAligned = false;
  using NearWalker<scalar_t>::NearWalker;
};

// The same of listed rows: one dimension of them, and up to one within a row, with strides of less than 2^31. Rows are
// looked up through the layout, in the kernel's parameters: in members they would cost registers.
template <class scalar_t>
struct ListedWalker {
  static constexpr bool kKnowsLists = true, kAligned = true;
  const scalar_t* data;
  const Layout* layout;
  unsigned inner_size, row, inner, step_row, step_inner;

  __device__ ListedWalker(const scalar_t* data, const Layout& layout, int64_t first, int64_t step)
      : data(data), layout(&layout), inner_size(unsigned(layout.inner_size())) {
    row = unsigned(first / inner_size);
    inner = unsigned(first % inner_size);
    step_row = unsigned(step / inner_size);
    step_inner = unsigned(step % inner_size);
  }
  __device__ const scalar_t* next() {
    const uint64_t listed = unsigned(load_constant(layout->row_index + row)), within = inner;
    const scalar_t* here = data + (listed * unsigned(layout->stride[0]) + within * unsigned(layout->stride[1]));
    row += step_row;
    inner += step_inner;
    if (inner >= inner_size) {
      inner -= inner_size;
      ++row;
    }
    return here;
  }
};

// The same in any number of dimensions, of all rows or of listed ones.
template <class scalar_t>
struct FarWalker {
  static constexpr bool kKnowsLists = true, kAligned = true;
  const scalar_t* data;
  const Layout& layout;
  int64_t i, step;

  HOOKSTATS_HD FarWalker(const scalar_t* data, const Layout& layout, int64_t first, int64_t step)
      : data(data), layout(layout), i(first), step(step) {}
  HOOKSTATS_HD const scalar_t* next() {
    const scalar_t* here = data + layout.offset(i);
    i += step;
    return here;
  }
};

}  // namespace hookstats::cuda
