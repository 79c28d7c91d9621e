#include "accumulate.h"

namespace hookstats::cuda {

template cudaError_t accumulate_as<Float8e4m3fn>(const Input&, const State&, const Launch&);
template cudaError_t load_as<Float8e4m3fn>(HistogramKind, int);
template cudaError_t accumulate_as<Float8e5m2>(const Input&, const State&, const Launch&);
template cudaError_t load_as<Float8e5m2>(HistogramKind, int);

}  // namespace hookstats::cuda
