#include "accumulate.h"

namespace hookstats::cuda {

template cudaError_t accumulate_as<float>(const Input&, const State&, const Launch&);
template cudaError_t load_as<float>(HistogramKind, int);

}  // namespace hookstats::cuda
