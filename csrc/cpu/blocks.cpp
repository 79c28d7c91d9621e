// Some of a tensor's blocks on the CPU, on the thread that calls.

#include "../blocks.h"

#include "versions.h"

namespace hookstats::cpu {

void count_blocks(const Input& input, const State& state) {
  const KeepSubnormals keep;
  const BlockSample sample(input.matrix, state.block);
  int64_t* const bins = state.histogram + kExponentBins;
  with_dtype(input.dtype, [&](auto value) {
    const auto* data = static_cast<const decltype(value)*>(input.data);
    for (int turn = 0; turn < kSampledBlocks; ++turn) sample.count(data, turn, [&](int bin) { ++bins[bin]; });
  });
}

}  // namespace hookstats::cpu
