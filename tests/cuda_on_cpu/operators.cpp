// The operators of csrc as one unit: torch's headers take most of the time of each file, and are read once.

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
