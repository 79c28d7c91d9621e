#include "accumulate.h"

namespace hookstats::cuda {

template cudaError_t accumulate_as<BFloat16>(const Input&, const State&, const Launch&);
template cudaError_t load_as<BFloat16>(HistogramKind, int);

}  // namespace hookstats::cuda
