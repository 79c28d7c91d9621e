// All between tensors and kernels as one unit: torch's headers take most of the time of each file, and are read once.
// Beside it are compiled the hook and the Python module.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wstringop-overflow"  // a false one of GCC 12, in torch's intrusive_ptr
#endif

#include "ops.cpp"

#include "batch.cpp"
#include "checksums.cpp"
#include "copies.cpp"
#include "inputs.cpp"
#include "samples.cpp"
#include "scratch.cpp"
#include "softmax_rows.cpp"
#include "streams.cpp"
#include "totals.cpp"
