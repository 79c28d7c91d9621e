#include "accumulate.h"

namespace hookstats::cuda {

template void accumulate_as<BFloat16>(const Input&, const State&, const Launch&);

}  // namespace hookstats::cuda
