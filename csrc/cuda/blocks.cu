// One launch counts how far each value lies below the largest of its block (bins.h). It reads the tensor again, right
// behind the launch that folds it, so what fits into the L2 cache comes from there. A thread reads a whole block: it
// asks no other thread, and any layout will do.

#include <algorithm>

#include "feed.h"
#include "histogram.h"
#include "plan.h"

namespace hookstats::cuda {
namespace {

constexpr int64_t kMostBlocks = 8;  // of a multiprocessor, which has four or two at a time

struct BlocksJob {
  Layout matrix;
  bool whole;  // along the last dimension: each block that is not short lies side by side, on 16 bytes
  bool line;   // the other dimensions are one, of which no rows are listed
};

// Reads the magnitudes of a block twice, the second time from the cache.
template <int kAtOnce, class F>
__device__ void count_block(unsigned* counts, int n, const F& magnitude) {
  uint32_t largest = 0;
#pragma unroll kAtOnce
  for (int k = 0; k < n; ++k) {
    const uint32_t each = magnitude(k);
    largest = each > largest ? each : largest;
  }
  largest >>= 23;
  atomicAdd(&counts[kDistanceBins + largest], 1u);
  if (largest == 255) return;
#pragma unroll kAtOnce
  for (int k = 0; k < n; ++k) atomicAdd(&counts[distance_bin(largest, magnitude(k))], 1u);
}

template <class scalar_t, int kBlock, bool kAlongRows>
__global__ void __launch_bounds__(kThreads, sizeof(scalar_t) == 8 ? 2 : 4)
    blocks_kernel(const scalar_t* data, const BlocksJob job, int64_t* bins, const int32_t* active) {
  HOOKSTATS_SHARED(unsigned, counts, kBlockBins);
  HOOKSTATS_SHARED(int, on, 1);
  static_assert(kBlockBins % 4 == 0);
  const int thread = threadIdx.x;
  clear_words(counts, kBlockBins, thread);
  if (thread == 0) on[0] = !active || *static_cast<const volatile int32_t*>(active) != 0;
  __syncthreads();
  if (!on[0]) return;

  const Layout& matrix = job.matrix;
  const int64_t rows = matrix.kept ? *matrix.kept * matrix.row_size() : matrix.count, width = matrix.channels;
  const int64_t across = kAlongRows ? width : divide_up(width, kBlock);
  const int64_t all = across * (kAlongRows ? divide_up(rows, kBlock) : rows);
  for (int64_t i = int64_t(blockIdx.x) * kThreads + thread; i < all; i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / across * (kAlongRows ? kBlock : 1), column = i % across * (kAlongRows ? 1 : kBlock);
    const int64_t left = kAlongRows ? rows - row : width - column;
    const scalar_t* from = data + column * matrix.channel_stride;
    if (!kAlongRows || job.line) from += matrix.offset(row);
    if (!kAlongRows && job.whole && left >= kBlock) {
      uint32_t largest = 0;
      constexpr int kPack = 16 / int(sizeof(scalar_t));
      using Load = Pack<scalar_t, kPack>;
      Load packs[kBlock / kPack];
      uint32_t magnitudes[kBlock];
#pragma unroll
      for (int p = 0; p < kBlock / kPack; ++p) packs[p] = reinterpret_cast<const Load*>(from)[p];
#pragma unroll
      for (int k = 0; k < kBlock; ++k) {
        magnitudes[k] = magnitude_of(widen(packs[k / kPack].value[k % kPack]));
        largest = magnitudes[k] > largest ? magnitudes[k] : largest;
      }
      largest >>= 23;
      atomicAdd(&counts[kDistanceBins + largest], 1u);
      if (largest == 255) continue;
#pragma unroll
      for (int k = 0; k < kBlock; ++k) atomicAdd(&counts[distance_bin(largest, magnitudes[k])], 1u);
      continue;
    }
    const int n = left < kBlock ? int(left) : kBlock;
    if (!kAlongRows || job.line) {
      const int64_t step = kAlongRows ? matrix.inner_stride() : matrix.channel_stride;
      count_block<4>(counts, n, [&](int k) { return magnitude_of(widen(from[k * step])); });
    } else {
      count_block<1>(counts, n, [&](int k) { return magnitude_of(widen(from[matrix.offset(row + k)])); });
    }
  }
  __syncthreads();
  for (int i = thread; i < kBlockBins; i += kThreads) {
    if (counts[i] != 0) add_to_bin(&bins[i], counts[i]);
  }
}

template <class scalar_t>
cudaError_t count_as(const Input& input, const State& state, const Launch& to) {
  BlocksJob job{input.matrix, false, false};
  const Layout& matrix = job.matrix;
  const bool along_rows = state.block < 0;
  const int block = along_rows ? -state.block : state.block;
  const auto on_packs = [](int64_t elements) { return elements * int64_t(sizeof(scalar_t)) % 16 == 0; };
  job.whole = matrix.channel_stride == 1 && is_aligned(input.data, 16);
  for (int d = 0; d < matrix.ndim; ++d) job.whole &= on_packs(matrix.stride[d]);
  job.line = matrix.ndim <= 1 && matrix.row_dims == 0;
  const int64_t all =
      along_rows ? divide_up(matrix.count, block) * matrix.channels : divide_up(matrix.channels, block) * matrix.count;
  const int64_t grid = std::min(divide_up(all, kThreads), kMostBlocks * facts_of(to.device).multiprocessors);
  const auto kernel = block == 16
                          ? (along_rows ? blocks_kernel<scalar_t, 16, true> : blocks_kernel<scalar_t, 16, false>)
                          : (along_rows ? blocks_kernel<scalar_t, 32, true> : blocks_kernel<scalar_t, 32, false>);
  return launch(kernel, dim3(unsigned(grid)), dim3(kThreads), 0, static_cast<cudaStream_t>(to.stream),
                static_cast<const scalar_t*>(input.data), job, state.histogram + kExponentBins, to.active);
}

}  // namespace

const char* count_blocks(const Input& input, const State& state, const Launch& to) {
  if (input.matrix.channels * input.matrix.count == 0) return nullptr;
  if (const auto error = cudaSetDevice(to.device)) return message(error);
  return with_dtype(input.dtype,
                    [&](auto value) { return message(launched(count_as<decltype(value)>(input, state, to), to)); });
}

const char* load_blocks(Dtype dtype) {
  return with_dtype(dtype, [&](auto value) {
    using scalar_t = decltype(value);
    for (const auto error :
         {load_kernel(blocks_kernel<scalar_t, 16, true>), load_kernel(blocks_kernel<scalar_t, 16, false>),
          load_kernel(blocks_kernel<scalar_t, 32, true>), load_kernel(blocks_kernel<scalar_t, 32, false>)}) {
      if (error != cudaSuccess) return message(error);
    }
    return message(cudaSuccess);
  });
}

}  // namespace hookstats::cuda
