// The operators as one unit, hookstats/_ops.so, which serves every torch from 2.11 on: nothing of torch is used here
// but its stable ABI.

#include "ops.cpp"

#include "batch.cpp"
#include "copies.cpp"
#include "devices.cpp"
#include "inputs.cpp"
#include "joint.cpp"
#include "samples.cpp"
#include "softmax_rows.cpp"
#include "totals.cpp"
