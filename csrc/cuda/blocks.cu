// One launch counts some of a tensor's blocks, of which a thread reads one, whatever the layout. Threads are spread
// over multiprocessors, since each waits for memory several times; 30,000 counts go straight to the state.

#include "../blocks.h"

#include "device.h"

namespace hookstats::cuda {
namespace {

constexpr int kBlocksThreads = 32;

template <class scalar_t>
__global__ void __launch_bounds__(kBlocksThreads)
    blocks_kernel(const scalar_t* data, const __grid_constant__ Layout matrix, int block, int64_t* bins,
                  const int32_t* active) {
  if (active && *static_cast<const volatile int32_t*>(active) == 0) return;
  BlockSample(matrix, block).count(data, int(blockIdx.x * kBlocksThreads + threadIdx.x), [&](int bin) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&bins[bin]), 1ull);
  });
}

}  // namespace

void count_blocks(const Input& input, const State& state, const Launch& to) {
  launch_in_turn(to, nullptr, 0, [&] {
    with_dtype(input.dtype, [&](auto value) {
      using scalar_t = decltype(value);
      launch<blocks_kernel<scalar_t>>(dim3(kSampledBlocks / kBlocksThreads), kBlocksThreads, 0, to.stream,
                                      static_cast<const scalar_t*>(input.data), input.matrix, state.block,
                                      state.histogram + kExponentBins, to.active);
    });
  });
}

}  // namespace hookstats::cuda
