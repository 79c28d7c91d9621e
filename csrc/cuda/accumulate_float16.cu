#include "accumulate.h"

namespace hookstats::cuda {

template void accumulate_as<Float16>(const Input&, const State&, const Launch&);

}  // namespace hookstats::cuda
