// One launch counts how far each value lies below the largest of its block (bins.h). It reads the tensor again, right
// behind the launch that folds it, so what fits into the L2 cache comes from there. A thread reads a whole block: no
// other one is asked, and any layout will do.

#include <algorithm>

#include "feed.h"
#include "histogram.h"
#include "plan.h"

namespace hookstats::cuda {
namespace {

constexpr int64_t kMostGrid = 4 * 264;  // as accumulate.cu, whose waves have two blocks on a multiprocessor

struct BlocksJob {
  Layout matrix;
  bool along_rows;
  bool whole;  // each block that is not short lies side by side, on 16 bytes
};

template <class scalar_t, int kBlock>
__global__ void __launch_bounds__(kThreads)
    blocks_kernel(const scalar_t* data, const BlocksJob job, int64_t* bins, const int32_t* active) {
  HOOKSTATS_SHARED(unsigned, counts, kBlockBins);
  HOOKSTATS_SHARED(bool, on, 1);
  static_assert(kBlockBins % 4 == 0);
  const int thread = threadIdx.x;
  clear_words(counts, kBlockBins, thread);
  if (thread == 0) on[0] = !active || *static_cast<const volatile int32_t*>(active) != 0;
  __syncthreads();
  if (!on[0]) return;

  const Layout& matrix = job.matrix;
  const int64_t rows = matrix.kept ? *matrix.kept * matrix.row_size() : matrix.count, width = matrix.channels;
  const int64_t across = job.along_rows ? width : divide_up(width, kBlock);
  const int64_t all = across * (job.along_rows ? divide_up(rows, kBlock) : rows);
  for (int64_t i = int64_t(blockIdx.x) * kThreads + thread; i < all; i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / across * (job.along_rows ? kBlock : 1);
    const int64_t column = i % across * (job.along_rows ? 1 : kBlock);
    const int64_t left = job.along_rows ? rows - row : width - column;
    const int n = left < kBlock ? int(left) : kBlock;
    const scalar_t* from = data + column * matrix.channel_stride;
    scalar_t x[kBlock];
    if (job.along_rows) {
      for (int k = 0; k < kBlock; ++k) x[k] = k < n ? from[matrix.offset(row + k)] : scalar_t{};
    } else {
      from += matrix.offset(row);
      if (job.whole && n == kBlock) {
        constexpr int kPack = 16 / int(sizeof(scalar_t));
        using Load = Pack<scalar_t, kPack>;
#pragma unroll
        for (int k = 0; k < kBlock; k += kPack) {
          const Load pack = *reinterpret_cast<const Load*>(from + k);
#pragma unroll
          for (int j = 0; j < kPack; ++j) x[k + j] = pack.value[j];
        }
      } else {
        for (int k = 0; k < kBlock; ++k) x[k] = k < n ? from[k * matrix.channel_stride] : scalar_t{};
      }
    }
    int largest = 0;
#pragma unroll
    for (int k = 0; k < kBlock; ++k) {
      const int exponent = magnitude_exponent(widen(x[k]));
      largest = exponent > largest ? exponent : largest;
    }
    atomicAdd(&counts[kDistanceBins + largest], 1u);
    if (largest == 255) continue;
#pragma unroll
    for (int k = 0; k < kBlock; ++k) {
      if (k < n) atomicAdd(&counts[distance_bin(largest, exponent_below(widen(x[k])))], 1u);
    }
  }
  __syncthreads();
  for (int i = thread; i < kBlockBins; i += kThreads) {
    if (counts[i] != 0) add_to_bin(&bins[i], counts[i]);
  }
}

template <class scalar_t>
cudaError_t count_as(const Input& input, const State& state, const Launch& to) {
  BlocksJob job{input.matrix, state.block < 0, false};
  Layout& matrix = job.matrix;
  const int block = job.along_rows ? -state.block : state.block;
  const auto on_packs = [](int64_t elements) { return elements * int64_t(sizeof(scalar_t)) % 16 == 0; };
  job.whole = matrix.channel_stride == 1 && is_aligned(input.data, 16);
  for (int d = 0; d < matrix.ndim; ++d) job.whole &= on_packs(matrix.stride[d]);
  const int64_t all = job.along_rows ? divide_up(matrix.count, block) * matrix.channels
                                     : divide_up(matrix.channels, block) * matrix.count;
  const int64_t grid = std::min(divide_up(all, kThreads), kMostGrid);
  const auto kernel = block == 16 ? blocks_kernel<scalar_t, 16> : blocks_kernel<scalar_t, 32>;
  return launch(kernel, dim3(unsigned(grid)), dim3(kThreads), 0, static_cast<cudaStream_t>(to.stream),
                static_cast<const scalar_t*>(input.data), job, state.histogram + kExponentBins, to.active);
}

}  // namespace

const char* count_blocks(const Input& input, const State& state, const Launch& to) {
  if (input.matrix.channels * input.matrix.count == 0) return nullptr;
  if (const auto error = cudaSetDevice(to.device)) return message(error);
  return with_dtype(input.dtype, [&](auto value) { return message(count_as<decltype(value)>(input, state, to)); });
}

}  // namespace hookstats::cuda
