#include "accumulate.h"

namespace hookstats::cuda {

template void accumulate_as<float>(const Input&, const State&, const Launch&);

}  // namespace hookstats::cuda
