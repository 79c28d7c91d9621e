// What hook.cpp offers module.cpp.
#pragma once

#include <torch/extension.h>

namespace hookstats {

// The module's Hook, bind, observe and take_failures.
void add_hooks(py::module_& m);

}  // namespace hookstats
