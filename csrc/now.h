// Whether anything is measured now, and what counts of it: what hooks ask before they measure.
#pragma once

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tensors.h"
#include "times.h"

namespace hookstats {

// What is hidden here is what pybind11 makes classes of: its own are.

// Where Python leaves the identity of a thread that ignores rows, for the threads of its backward.
inline constexpr const char* kThreadKey = "hookstats.thread";

// What counts of the tensors that a thread measures, where it has rows ignored: for each device.
struct __attribute__((visibility("hidden"))) Counted {
  const unsigned long thread;                    // threading.get_ident()
  std::vector<Counting> rows, sampled;           // sampled: some of the rows, for what is read in part
  std::atomic<int64_t> concerned{0}, others{0};  // tensors that met these rows: whether they are about them

  explicit Counted(unsigned long ident) : thread(ident) {}

  std::optional<Counting> on(at::Device device, bool is_sampled) const {
    for (const Counting& each : is_sampled ? sampled : rows) {
      if (each.row_index.device() == device) return each;
    }
    return std::nullopt;
  }
};

// What all hooks of a monitor share: whether and what they measure. Changed and read under the GIL, but for `is_open`,
// `is_paused`, `sampling` and `times`, which backward reads.
struct __attribute__((visibility("hidden"))) Enabled {
  at::Tensor open;  // [1] int32 on the CPU: zero while nothing is to be measured
  const int32_t* is_open;
  std::atomic<bool> is_paused{false};  // not only for this step, but by the user; or nothing is watched any more
  std::atomic<Sampling> sampling{Sampling()};  // of the open step: which rows of activations and gradients are read
  PyObject* root =
      nullptr;  // the module whose `training` decides, borrowed: Python takes it away before it dies; or null
  std::vector<std::shared_ptr<Counted>> counted;  // of all threads; the innermost last
  std::atomic<Times*> times{nullptr};             // of the open step, if it is timed
  std::vector<std::shared_ptr<Times>> kept;       // a backward on another thread may still use them

  // Whether a forward that runs now is evaluation, which is not measured.
  bool leaves_out() const { return root && !is_training(); }

  // Whether what runs now on a device is measured. What a CUDA graph captures is in every step: in each
  // replay the flag on the device decides.
  bool is_open_on(Device device) const { return *is_open || (!is_paused && capture_on(device) != 0); }

  // Whether a forward that runs now counts where something is measured. A recomputation belongs to a forward that did.
  bool counts_now() const { return !leaves_out() || backward_is_running(); }

  // The innermost of this thread; in a backward that another thread called, of that one. Null: all counts.
  std::shared_ptr<Counted> counted_here() const {
    if (counted.empty()) return nullptr;
    if (auto own = innermost(PyThread_get_thread_ident())) return own;
    using Stash = at::impl::ThreadLocalPythonObjects;  // autograd hands it on to its threads
    if (!backward_is_running() || !Stash::contains(kThreadKey)) return nullptr;
    return innermost(PyLong_AsUnsignedLong(Stash::get(kThreadKey)->ptr(getPyInterpreter())));
  }

  explicit Enabled(at::Tensor flag) : open(std::move(flag)) {
    TORCH_CHECK_TYPE(open.is_cpu() && open.scalar_type() == at::kInt && open.numel() == 1,
                     "Enabled: expected one int32 on the CPU that says whether anything is measured, got ",
                     open.scalar_type(), " ", open.sizes(), " on ", open.device());
    is_open = open.const_data_ptr<int32_t>();
  }

 private:
  std::shared_ptr<Counted> innermost(unsigned long thread) const {
    const auto found =
        std::find_if(counted.rbegin(), counted.rend(), [thread](const auto& each) { return each->thread == thread; });
    return found == counted.rend() ? nullptr : *found;
  }

  // root.training, without the look-ups by which a module finds its parameters.
  bool is_training() const {
    static PyObject* const name = PyUnicode_InternFromString("training");
    PyObject* attributes = PyObject_GenericGetDict(root, nullptr);
    const PyObject* training = attributes ? PyDict_GetItemWithError(attributes, name) : nullptr;
    const bool result = training != Py_False;
    Py_XDECREF(attributes);
    PyErr_Clear();
    return result;
  }
};

}  // namespace hookstats
