#include "accumulate.h"

namespace hookstats::cuda {

template void accumulate_as<double>(const Input&, const State&, const Launch&);

}  // namespace hookstats::cuda
