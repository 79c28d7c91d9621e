// The fast hook: one METH_FASTCALL function from a module's output to its kernels, and the Python module.
// It never raises out of a training step: what went wrong is returned, or, inside backward, kept for take_failures().

#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/TracerMode.h>
#include <ATen/record_function.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels.h"
#include "ops.h"
#include "times.h"

namespace hookstats {
namespace {

// The entries of hookstats.state.SiteState, a tuple.
enum Entry : Py_ssize_t {
  k_moments,
  k_state_counters,
  k_histogram,
  k_active,
  k_enabled,
  k_channel_dim,
  k_site,
  k_strict,
  k_low,
  k_high,
  k_whole,
  k_channels,
  k_per_channel,
  kEntries
};

// Where Python leaves the identity of a thread that ignores rows, for the threads of its backward.
constexpr const char* kThreadKey = "hookstats.thread";

// What counts of the tensors that a thread measures, where it has rows ignored: for each device.
struct Counted {
  const unsigned long thread;  // threading.get_ident()
  std::vector<Rows> rows;
  std::atomic<int64_t> concerned{0}, others{0};  // tensors that met these rows: whether they are about them

  explicit Counted(unsigned long ident) : thread(ident) {}

  std::optional<Rows> on(at::Device device) const {
    for (const Rows& each : rows) {
      if (each.row_index.device() == device) return each;
    }
    return std::nullopt;
  }
};

// What all hooks of a monitor share: whether and what they measure. Changed and read under the GIL, but for `is_open`
// and `times`, which backward reads.
struct Enabled {
  at::Tensor open;  // [1] int32 on the CPU: zero while nothing is to be measured
  const int32_t* is_open;
  PyObject* root =
      nullptr;  // the module whose `training` decides, borrowed: Python takes it away before it dies; or null
  std::vector<std::shared_ptr<Counted>> counted;  // of all threads; the innermost last
  std::atomic<Times*> times{nullptr};             // of the open step, if it is timed
  std::vector<std::shared_ptr<Times>> kept;       // a backward on another thread may still use them

  // Whether a forward that runs now is measured. A recomputation belongs to a forward that was.
  bool measures_now() const { return *is_open && (!leaves_out() || backward_is_running()); }

  // Whether a forward that runs now is evaluation, which is not measured.
  bool leaves_out() const { return root && !is_training(); }

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

// What compiled graphs look at before they run, in guards: whether the program that measures is to run or the bare one,
// and which rows count. All monitors share it, so that of many there are no more programs than of one: what else is
// different between them is decided on the device.
//
// Activation checkpointing around a compiled block calls it again in backward, and must get the program that its
// forward was, or it refuses the backward: the two save different tensors. So each answer is kept with the number that
// the next node of the graph will have, and in a backward the running node tells which one was given when its forward
// ran. Entered under the GIL alone.
class Now {
 public:
  // always: as if it were always open.
  void add(const std::shared_ptr<const Enabled>& monitor, bool always) { monitors_.push_back({monitor, always}); }

  void remove(const std::shared_ptr<const Enabled>& monitor) {
    const auto gone = std::remove_if(monitors_.begin(), monitors_.end(),
                                     [&](const Monitor& each) { return each.enabled == monitor; });
    monitors_.erase(gone, monitors_.end());
    if (monitors_.empty()) answers_.clear();
  }

  // The rows that count of what a thread measures for a monitor; None: all.
  void set_rows(unsigned long thread, int64_t number, const py::object& rows) {
    const py::object before = rows_of(thread);
    py::dict after = before.attr("copy")();  // an answer may hold the one before
    if (rows.is_none()) {
      after.attr("pop")(number, py::none());
    } else {
      after[py::int_(number)] = rows;
    }
    if (after.empty()) {
      rows_.erase(thread);
    } else {
      rows_[thread] = after;
    }
  }

  // Whether any monitor measures.
  bool measured() { return answer().measured; }

  // Whether any does, but not this one, for which it is evaluation.
  bool leaves_out(const Enabled& monitor) {
    const auto& left_out = answer().left_out;
    return std::find(left_out.begin(), left_out.end(), &monitor) != left_out.end();
  }

  // By Ignoring.number.
  py::dict rows() { return answer().rows; }
  size_t monitors() const { return monitors_.size(); }

 private:
  struct Monitor {
    std::shared_ptr<const Enabled> enabled;
    bool always;
  };
  struct Answer {
    uint64_t thread, node;  // where it was given first, and the number of the next node there
    bool measured;
    std::vector<const Enabled*> left_out;
    py::dict rows;

    bool is_like(const Answer& other) const {
      return thread == other.thread && measured == other.measured && left_out == other.left_out && rows.is(other.rows);
    }
  };
  static constexpr size_t kKept = 32;  // forwards in different states whose backward is still to come

  py::dict rows_of(unsigned long thread) const {
    const auto found = rows_.find(thread);
    return found == rows_.end() ? none_ : found->second;
  }

  Answer answer() {
    const auto node = backward_is_running() ? torch::autograd::get_current_node() : nullptr;
    if (node) {
      // A reentrant checkpoint's node comes just before what its forward asks.
      const auto given = std::find_if(answers_.rbegin(), answers_.rend(), [&](const Answer& each) {
        return each.thread == node->thread_id() && each.node <= node->sequence_nr() + 1;
      });
      if (given != answers_.rend()) return *given;
    }
    Answer now{at::RecordFunction::currentThreadId(), at::sequence_number::peek(), false, {}, none_};
    for (const Monitor& each : monitors_) {
      if (!each.always && !*each.enabled->is_open) continue;
      if (each.enabled->leaves_out()) {
        now.left_out.push_back(each.enabled.get());
      } else {
        now.measured = true;
      }
    }
    if (now.measured) {
      now.rows = rows_of(PyThread_get_thread_ident());
    } else {
      now.left_out.clear();
    }
    if (node) return now;
    const auto before =
        std::find_if(answers_.rbegin(), answers_.rend(), [&](const Answer& each) { return each.thread == now.thread; });
    if (before != answers_.rend() && before->is_like(now)) return *before;
    answers_.push_back(now);
    if (answers_.size() > kKept) answers_.pop_front();
    return now;
  }

  std::vector<Monitor> monitors_;
  std::map<unsigned long, py::dict> rows_;  // by thread; never changed, as answers hold them
  std::deque<Answer> answers_;              // the oldest first
  py::dict none_;
};

// One monitor's part of it, as an object of its own, because guards look at attributes.
struct Part {
  Now& now;
  std::shared_ptr<const Enabled> enabled;

  bool left_out() const { return now.leaves_out(*enabled); }
  void remove() const { now.remove(enabled); }
};

// What a module's hook hands over: the sites of its output and of the output's gradient. The tensors are held, so that
// a gradient that arrives after detach finds them.
struct Observed {
  struct Half {
    Site site;
    int64_t number;
    bool strict;
  };
  std::optional<Half> output, gradient;
  std::shared_ptr<const Enabled> enabled;
  std::optional<c10::SafePyObject> in_graph;  // callable: what compiled autograd is to trace for a gradient
};
using Shared = std::shared_ptr<const Observed>;

// The part of a hookstats.hooks.Hook that is ours.
struct HookObject {
  PyObject_HEAD Shared observed;
};

PyTypeObject* hook_type = nullptr;

HookObject* hook_of(PyObject* object) {
  if (!PyObject_TypeCheck(object, hook_type)) {
    PyErr_Format(PyExc_TypeError, "hookstats: expected a hook, got %s", Py_TYPE(object)->tp_name);
    return nullptr;
  }
  return reinterpret_cast<HookObject*>(object);
}

PyObject* new_hook(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* hook = type->tp_alloc(type, 0);
  if (hook) new (&reinterpret_cast<HookObject*>(hook)->observed) Shared();
  return hook;
}

void delete_hook(PyObject* hook) {
  PyTypeObject* type = Py_TYPE(hook);
  reinterpret_cast<HookObject*>(hook)->observed.~Shared();
  type->tp_free(hook);
  Py_DECREF(type);
}

PyType_Slot hook_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_hook)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(delete_hook)},
                            {0, nullptr}};
PyType_Spec hook_spec = {"hookstats._C.Hook", sizeof(HookObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                         hook_slots};

at::Tensor tensor_of(PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "bind: expected a tensor, got ", Py_TYPE(object)->tp_name);
  return THPVariable_Unpack(object);
}

std::optional<at::Tensor> optional_tensor(PyObject* object) {
  if (object == Py_None) return std::nullopt;
  return tensor_of(object);
}

std::optional<Observed::Half> half_of(PyObject* state, std::shared_ptr<const Enabled>& enabled) {
  if (state == Py_None) return std::nullopt;
  TORCH_CHECK_TYPE(PyTuple_Check(state) && PyTuple_GET_SIZE(state) == kEntries, "bind: expected a SiteState, got ",
                   Py_TYPE(state)->tp_name);
  const auto entry = [state](Entry i) { return PyTuple_GET_ITEM(state, i); };
  SiteState tensors{
      tensor_of(entry(k_moments)),      tensor_of(entry(k_state_counters)),      optional_tensor(entry(k_histogram)),
      optional_tensor(entry(k_active)), PyLong_AsLongLong(entry(k_channel_dim)), PyFloat_AsDouble(entry(k_low)),
      PyFloat_AsDouble(entry(k_high))};
  enabled = py::cast<std::shared_ptr<Enabled>>(py::handle(entry(k_enabled)));
  const int64_t number = PyLong_AsLongLong(entry(k_site));
  if (PyErr_Occurred()) throw py::error_already_set();
  return Observed::Half{Site(std::move(tensors)), number, entry(k_strict) == Py_True};
}

constexpr const char* kBindDoc =
    "bind(hook, output, gradient, in_graph)\n\n"
    "From now on `observe` folds into these SiteStates, of a module's output and of its gradient; either may be None.\n"
    "in_graph: a callable that compiled autograd can trace, which does with a gradient what `observe` arranges.";

void bind(py::object hook, py::object output, py::object gradient, py::object in_graph) {
  HookObject* own = hook_of(hook.ptr());
  if (!own) throw py::error_already_set();
  if (output.is_none() && gradient.is_none()) return own->observed.reset();
  auto made = std::make_shared<Observed>();
  made->output = half_of(output.ptr(), made->enabled);
  made->gradient = half_of(gradient.ptr(), made->enabled);
  made->in_graph.emplace(in_graph.release().ptr(), getPyInterpreter());
  own->observed = std::move(made);
}

// Failures inside backward, where Python must not be entered: of each site the first reason and how many there were,
// until Python asks.
using Failures = std::map<int64_t, std::pair<std::string, int64_t>>;
std::mutex failures_mutex;
Failures failures;

Failures take_failures() {
  std::lock_guard<std::mutex> lock(failures_mutex);
  return std::exchange(failures, {});
}

void accumulate_gradient(const at::Tensor& gradient, const Observed& observed, const std::optional<Rows>& rows) {
  if (!gradient.defined() || !*observed.enabled->is_open || has_no_data(gradient)) return;
  const Times::Span span(observed.enabled->times.load(), gradient.device());
  try {
    accumulate(gradient, observed.gradient->site, rows ? &*rows : nullptr);
  } catch (const std::exception& error) {
    if (observed.gradient->strict) throw;
    std::lock_guard<std::mutex> lock(failures_mutex);
    ++failures.try_emplace(observed.gradient->number, reason(error), 0).first->second.second;
  }
}

// On the gradient of an output, of which it is input number `index_` of a node of the graph.
class GradientHook : public torch::autograd::FunctionPreHook {
 public:
  // rows: those that counted in the forward.
  GradientHook(Shared observed, size_t index, std::optional<Rows> rows)
      : observed_(std::move(observed)), index_(index), rows_(std::move(rows)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    accumulate_gradient(gradients[index_], *observed_, rows_);
    return gradients;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    auto call = py::reinterpret_borrow<py::object>(observed_->in_graph->ptr(getPyInterpreter()));
    if (rows_) {
      const auto partial = py::module_::import("functools").attr("partial");
      call = partial(call, py::arg("rows") = py::make_tuple(rows_->row_index, rows_->kept));
    }
    args.add_tensor_pre_hook(c10::SafePyObject(call.release().ptr(), getPyInterpreter()), int(index_));
  }

 private:
  Shared observed_;
  size_t index_;
  std::optional<Rows> rows_;
};

constexpr const char* kObserveDoc =
    "observe(x, hook) -> None | str | NotImplemented\n\n"
    "Folds the tensor x into the site of the output (unless it is a recomputation) and its gradient, when it comes,\n"
    "into the gradient's. Returns None, or why x was not measured; NotImplemented for a container or a wrapper.\n"
    "The sites are those that the hook was given.";

PyObject* observe(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2) {
    PyErr_Format(PyExc_TypeError, "observe: expected (x, hook), got %zd arguments", nargs);
    return nullptr;
  }
  const HookObject* hook = hook_of(args[1]);
  if (!hook) return nullptr;
  if (!hook->observed || !hook->observed->enabled->measures_now()) Py_RETURN_NONE;
  const Shared kept = hook->observed;  // another thread may give the hook other states while the GIL is released
  const Observed& observed = *kept;
  if (!THPVariable_Check(args[0])) Py_RETURN_NOTIMPLEMENTED;
  const at::Tensor& x = THPVariable_Unpack(args[0]);
  if (x.key_set().has(c10::DispatchKey::Python)) Py_RETURN_NOTIMPLEMENTED;
  if (x.layout() != at::kStrided || x.is_nested()) {
    return PyUnicode_FromString("expected a dense strided tensor");
  }
  if (has_no_data(x) || at::tracer::impl::is_dispatch_enabled()) Py_RETURN_NONE;
  const Site& site = (observed.output ? observed.output : observed.gradient)->site;
  if (!channel_dim_for(site.tensors.channel_dim, x.dim())) {
    return PyUnicode_FromString("the channel dimension of such a tensor is not known yet");
  }
  const Times::Span span(observed.enabled->times.load(), x.device(), 1);
  const auto counted = observed.enabled->counted_here();
  const std::optional<Rows> rows = counted ? counted->on(x.device()) : std::nullopt;
  const Rows* counting = rows ? &*rows : nullptr;
  try {
    if (!observed.output) {
      const bool concerned = described(x, site, counting).layout.row_dims > 0;  // throws what accumulate would
      if (counting) ++(concerned ? counted->concerned : counted->others);
    } else if (!backward_is_running()) {
      // Only where it takes longer than getting the GIL back: a launch does not, nor does a small tensor.
      constexpr int64_t kLong = 1 << 15;
      std::optional<py::gil_scoped_release> release;
      if (x.is_cpu() && x.numel() >= kLong) release.emplace();
      const bool concerned = accumulate(x, site, counting);
      if (counting) ++(concerned ? counted->concerned : counted->others);
    }
    // A leaf's gradient is its owner's, and a hook on it would outlive the step.
    if (observed.gradient && x.requires_grad()) {
      if (const auto& node = x.grad_fn()) {
        node->add_tensor_pre_hook(std::make_unique<GradientHook>(kept, x.output_nr(), rows));
      }
    }
  } catch (const std::exception& error) {
    return PyUnicode_FromString(reason(error));
  }
  Py_RETURN_NONE;
}

at::Tensor part(const at::Tensor& memory, int64_t offset, const std::vector<int64_t>& shape, bool is_float64) {
  TORCH_CHECK_TYPE(memory.scalar_type() == at::kLong && memory.is_contiguous(), "part: expected contiguous int64, got ",
                   memory.scalar_type(), " with strides ", memory.strides());
  const int64_t size = c10::multiply_integers(shape);
  TORCH_CHECK_INDEX(0 <= offset && offset + size <= memory.numel(), "part: expected words ", offset, " to ",
                    offset + size, " in a memory of ", memory.numel());
  return at::from_blob(
      memory.mutable_data_ptr<int64_t>() + offset, shape, [memory](void*) {},
      memory.options().dtype(is_float64 ? at::kDouble : at::kLong));
}

// A Times::Span for Python's `with`.
struct PythonSpan {
  std::shared_ptr<Times> times;
  at::Device device;
  int calls;
  std::unique_ptr<Times::Span> running;
};

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
  m.attr("DIMS_BY_NDIM") = kDimsByNdim;
  py::class_<Times, std::shared_ptr<Times>>(m, "Times")
      .def(py::init<>())
      .def_property_readonly("calls", &Times::calls)
      .def_property_readonly("host_us", &Times::host_us)
      .def_property_readonly("device_us", &Times::device_us)
      .def("span", [](std::shared_ptr<Times> times, const std::string& device, int calls) {
        return PythonSpan{std::move(times), at::Device(device), calls, nullptr};
      });
  py::class_<PythonSpan>(m, "Span")
      .def("__enter__",
           [](PythonSpan& span) {
             span.running = std::make_unique<Times::Span>(span.times.get(), span.device, span.calls);
           })
      .def("__exit__", [](PythonSpan& span, const py::args&) { span.running.reset(); });
  py::class_<Counted, std::shared_ptr<Counted>>(m, "Counted")
      .def(py::init<unsigned long>())
      .def_property_readonly(
          "met", [](const Counted& counted) { return std::make_pair(counted.concerned.load(), counted.others.load()); })
      .def("set_rows", [](Counted& counted, const std::vector<std::pair<at::Tensor, at::Tensor>>& rows) {
        counted.rows.clear();
        for (const auto& [row_index, kept] : rows) counted.rows.push_back({row_index, kept});
      });
  py::class_<Enabled, std::shared_ptr<Enabled>>(m, "Enabled")
      .def(py::init<at::Tensor>())
      .def_property(
          "times", [](const Enabled& enabled) { return enabled.times.load() ? enabled.kept.back() : nullptr; },
          [](Enabled& enabled, std::shared_ptr<Times> times) {
            enabled.times = times.get();
            if (times) enabled.kept.push_back(std::move(times));
          })
      .def_property_readonly("leaves_out", &Enabled::leaves_out)
      .def("measures_now", &Enabled::measures_now)
      .def("decide_by", [](Enabled& enabled, py::object root) { enabled.root = root.is_none() ? nullptr : root.ptr(); })
      .def("count",
           [](Enabled& enabled, std::vector<std::shared_ptr<Counted>> all) { enabled.counted = std::move(all); });
  py::class_<Part>(m, "Part").def_property_readonly("left_out", &Part::left_out).def("remove", &Part::remove);
  py::class_<Now>(m, "Now")
      .def(py::init<>())
      .def(
          "add",
          [](Now& now, std::shared_ptr<Enabled> enabled, bool always) {
            now.add(enabled, always);
            return Part{now, std::move(enabled)};
          },
          py::keep_alive<0, 1>())
      .def("set_rows", &Now::set_rows)
      .def_property_readonly("measured", &Now::measured)
      .def_property_readonly("rows", &Now::rows)
      .def_property_readonly("monitors", &Now::monitors);
  // torch._C._stash_obj_in_tls, which in torch 2.11 takes a reference that it was not given.
  m.def("name_thread", [](py::int_ ident) {
    auto kept = std::make_shared<c10::SafePyObject>(ident.release().ptr(), getPyInterpreter());
    at::impl::ThreadLocalPythonObjects::set(kThreadKey, std::move(kept));
  });
  m.def("take_failures", &take_failures);
  m.def("bind", &bind, kBindDoc);
  m.def("has_no_data", &has_no_data);
  m.def("part", &part);
  py::class_<Copies>(m, "Copies")
      .def(py::init<>())
      .def("take", &Copies::take, py::call_guard<py::gil_scoped_release>())
      .def("give_up_spares", &Copies::give_up_spares);
  m.def("clear", &clear, py::call_guard<py::gil_scoped_release>());
  m.def("reserve_scratch", [](const std::string& device) { reserve_scratch(at::Device(device)); });
  hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
  if (!hook_type) throw py::error_already_set();
  m.attr("Hook") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(hook_type));
  PyObject* function = PyCFunction_NewEx(&observe_method, nullptr, m.attr("__name__").ptr());
  m.attr("observe") = py::reinterpret_steal<py::object>(function);
}

}  // namespace hookstats
