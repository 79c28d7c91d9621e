#include "accumulate.h"

namespace hookstats::cuda {

template cudaError_t accumulate_as<Float16>(const Input&, const State&, const Launch&);
template cudaError_t load_as<Float16>(HistogramKind, int);

}  // namespace hookstats::cuda
