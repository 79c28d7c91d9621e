// One launch folds a tensor into a state, by the kernels of its dtype: accumulate.h.

#include "device.h"

namespace hookstats::cuda {

template <class scalar_t>
cudaError_t accumulate_as(const Input& input, const State& state, const Launch& to);
template <class scalar_t>
cudaError_t load_as(HistogramKind kind, int device);

const char* accumulate(const Input& input, const State& state, const Launch& to) {
  if (const auto error = cudaSetDevice(to.device)) return message(error);
  const void* site = state.counters;
  const InTurn turn(to, &site, 1);
  if (turn.problem) return turn.problem;
  return with_dtype(
      input.dtype, [&](auto value) { return message(launched(accumulate_as<decltype(value)>(input, state, to), to)); });
}

const char* load_accumulate(Dtype dtype, HistogramKind kind, int device) {
  return with_dtype(dtype, [&](auto value) { return message(load_as<decltype(value)>(kind, device)); });
}

}  // namespace hookstats::cuda
