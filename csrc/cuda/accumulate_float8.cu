#include "accumulate.h"

namespace hookstats::cuda {

template void accumulate_as<Float8e4m3fn>(const Input&, const State&, const Launch&);
template void accumulate_as<Float8e5m2>(const Input&, const State&, const Launch&);

}  // namespace hookstats::cuda
