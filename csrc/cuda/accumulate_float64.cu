#include "accumulate.h"

namespace hookstats::cuda {

template cudaError_t accumulate_as<double>(const Input&, const State&, const Launch&);
template cudaError_t load_as<double>(HistogramKind, int);

}  // namespace hookstats::cuda
