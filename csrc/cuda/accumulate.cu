// One launch folds a tensor into a state, by the kernels of its dtype: accumulate.h.

#include "device.h"

namespace hookstats::cuda {

template <class scalar_t>
void accumulate_as(const Input& input, const State& state, const Launch& to);

void accumulate(const Input& input, const State& state, const Launch& to) {
  const void* site = state.counters;
  launch_in_turn(to, &site, 1, [&] {
    with_dtype(input.dtype, [&](auto value) { accumulate_as<decltype(value)>(input, state, to); });
  });
}

}  // namespace hookstats::cuda
