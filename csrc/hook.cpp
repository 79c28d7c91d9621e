// The fast hook: one METH_FASTCALL function from a module's output to its kernels, and the Python module.
// It never raises out of a training step: what went wrong is returned, or, inside backward, kept for take_failures().

#include <torch/csrc/autograd/python_variable.h>
#include <torch/extension.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels.h"
#include "ops.h"

namespace hookstats {
namespace {

// The entries of hookstats.state.SiteState, a tuple.
enum Entry : Py_ssize_t {
  k_moments,
  k_state_counters,
  k_histogram,
  k_active,
  k_open,
  k_channel_dim,
  k_site,
  k_strict,
  k_low,
  k_high,
  kEntries
};

// What a site needs in a hook. The tensors are held, so that a gradient that arrives after detach finds them.
struct HookedSite {
  SiteState state;
  at::Tensor open;  // [1] int32 on the CPU: zero while nothing is to be measured
  int64_t site;
  bool strict;

  bool is_open() const { return open.defined() && *open.const_data_ptr<int32_t>() != 0; }
};

std::optional<at::Tensor> optional_tensor(PyObject* object) {
  if (object == Py_None) return std::nullopt;
  return THPVariable_Unpack(object);
}

bool unpack(PyObject* object, HookedSite& hooked) {
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != kEntries) return false;
  const auto entry = [object](Entry i) { return PyTuple_GET_ITEM(object, i); };
  for (const auto i : {k_moments, k_state_counters, k_open}) {
    if (!THPVariable_Check(entry(i))) return false;
  }
  for (const auto i : {k_histogram, k_active}) {
    if (entry(i) != Py_None && !THPVariable_Check(entry(i))) return false;
  }
  hooked.state.moments = THPVariable_Unpack(entry(k_moments));
  hooked.state.counters = THPVariable_Unpack(entry(k_state_counters));
  hooked.state.histogram = optional_tensor(entry(k_histogram));
  hooked.state.active = optional_tensor(entry(k_active));
  hooked.open = THPVariable_Unpack(entry(k_open));
  hooked.state.channel_dim = PyLong_AsLongLong(entry(k_channel_dim));
  hooked.state.low = PyFloat_AsDouble(entry(k_low));
  hooked.state.high = PyFloat_AsDouble(entry(k_high));
  hooked.site = PyLong_AsLongLong(entry(k_site));
  hooked.strict = entry(k_strict) == Py_True;
  return !PyErr_Occurred() && hooked.open.is_cpu() && hooked.open.scalar_type() == at::kInt && hooked.open.numel() == 1;
}

// Failures inside backward, where Python must not be entered: the first of each site, until Python asks.
std::mutex failures_mutex;
std::map<int64_t, std::string> failures;

std::map<int64_t, std::string> take_failures() {
  std::lock_guard<std::mutex> lock(failures_mutex);
  return std::exchange(failures, {});
}

const char* reason(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

void accumulate_gradient(const at::Tensor& gradient, const HookedSite& hooked) {
  if (!gradient.defined() || has_no_data(gradient) || !hooked.is_open()) return;
  try {
    accumulate(gradient, hooked.state);
  } catch (const std::exception& error) {
    if (hooked.strict) throw;
    std::lock_guard<std::mutex> lock(failures_mutex);
    failures.emplace(hooked.site, reason(error));
  }
}

constexpr const char* kObserveDoc =
    "observe(x, output, gradient) -> None | str\n\n"
    "Folds the plain tensor x into the SiteState `output` (unless it is a recomputation) and its gradient, when it\n"
    "comes, into the SiteState `gradient`. Either may be None. Returns None, or why x was not measured.";

PyObject* observe(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  HookedSite output, gradient;
  const bool arguments = nargs == 3 && THPVariable_Check(args[0]) && (args[1] == Py_None || unpack(args[1], output)) &&
                         (args[2] == Py_None || unpack(args[2], gradient));
  if (!arguments) {
    PyErr_Clear();
    PyErr_SetString(PyExc_TypeError, "hookstats: observe: expected (Tensor, SiteState | None, SiteState | None)");
    return nullptr;
  }
  const at::Tensor& x = THPVariable_Unpack(args[0]);
  const bool watch_output = output.is_open();
  const bool watch_gradient = gradient.is_open();
  if (!watch_output && !watch_gradient) Py_RETURN_NONE;
  if (x.layout() != at::kStrided || x.is_nested()) {
    return PyUnicode_FromString("expected a dense strided tensor");
  }
  if (has_no_data(x)) Py_RETURN_NONE;
  if ((watch_output ? output : gradient).state.channel_dim == kUnknownDim) {
    return PyUnicode_FromString("the width of this site is not known yet");
  }
  try {
    if (!watch_output) {
      check_measurable(x, gradient.state);
    } else if (!backward_is_running()) {
      const py::gil_scoped_release release;
      accumulate(x, output.state);
    }
    // A leaf's gradient is its owner's, and a hook on it would outlive the step.
    if (watch_gradient && x.requires_grad() && !x.is_leaf()) {
      x.register_hook([hooked = std::move(gradient)](const at::Tensor& g) { accumulate_gradient(g, hooked); });
    }
  } catch (const std::exception& error) {
    return PyUnicode_FromString(reason(error));
  }
  Py_RETURN_NONE;
}

at::Tensor part(const at::Tensor& memory, int64_t offset, const std::vector<int64_t>& shape, bool is_float64) {
  TORCH_CHECK_TYPE(memory.scalar_type() == at::kLong && memory.is_contiguous(), "part: expected contiguous int64");
  const int64_t size = c10::multiply_integers(shape);
  TORCH_CHECK_INDEX(0 <= offset && offset + size <= memory.numel(), "part: expected words ", offset, " to ",
                    offset + size, " in a memory of ", memory.numel());
  return at::from_blob(
      memory.mutable_data_ptr<int64_t>() + offset, shape, [memory](void*) {},
      memory.options().dtype(is_float64 ? at::kDouble : at::kLong));
}

PyMethodDef observe_method = {"observe", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(observe)),
                              METH_FASTCALL, kObserveDoc};

std::vector<std::string> field_names() {
#define HOOKSTATS_NAME(name) #name,
  return {HOOKSTATS_FIELDS(HOOKSTATS_NAME)};
#undef HOOKSTATS_NAME
}

std::vector<std::string> dtype_names() {
#define HOOKSTATS_NAME(name, type, aten) #name,
  return {HOOKSTATS_DTYPES(HOOKSTATS_NAME)};
#undef HOOKSTATS_NAME
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("FIELDS") = py::tuple(py::cast(field_names()));
  m.attr("DTYPES") = py::tuple(py::cast(dtype_names()));
  m.attr("COUNTERS") = int(kCounters);
  m.attr("EXPONENT_BINS") = kExponentBins;
  m.attr("OCTAVE_BINS") = kOctaveBins;
  m.attr("FIRST_OCTAVE") = kFirstOctave;
#if defined(HOOKSTATS_CUDA)
  m.attr("HAS_CUDA") = true;
#else
  m.attr("HAS_CUDA") = false;
#endif
  m.attr("UNKNOWN_DIM") = kUnknownDim;
  m.attr("DIM_BY_RULE") = kDimByRule;
  m.def("take_failures", &take_failures);
  m.def("has_no_data", &has_no_data);
  m.def("part", &part);
  m.def("reserve_scratch", [](const std::string& device) { reserve_scratch(at::Device(device)); });
  PyObject* function = PyCFunction_NewEx(&observe_method, nullptr, m.attr("__name__").ptr());
  m.attr("observe") = py::reinterpret_steal<py::object>(function);
}

}  // namespace hookstats
