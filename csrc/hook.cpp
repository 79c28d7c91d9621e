// The fast hook: one C function from a module's output to its kernels, which a hook calls as its vectorcall; and the
// operator that does the same in a compiled graph, where a slot, an input of the graph, tells which hook it stands for.
// Neither raises out of a training step: Python is told what went wrong, or, inside backward, asks take_failures().

#include "hook.h"

#include <ATen/TracerMode.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "now.h"
#include "slots.h"
#include "times.h"

namespace hookstats {

// What a module's hook hands over: the sites of its output and of the output's gradient. The tensors are held, so that
// a gradient that arrives after detach finds them.
struct __attribute__((visibility("hidden"))) Observed {
  struct Half {
    Site site;
    int64_t number;
    bool strict;
  };
  std::optional<Half> output, gradient;
  std::shared_ptr<const Enabled> enabled;
  std::optional<c10::SafePyObject> in_graph;  // callable: what compiled autograd is to trace for a gradient
  bool is_sampled = false;                    // some rows alone are read, where the monitor says so
  bool is_table = false;                      // may return a table, of which as many rows as a mask has mean nothing

  const Site& site() const { return (output ? output : gradient)->site; }
  bool measures_now() const { return enabled->is_open_on(site().device) && enabled->counts_now(); }
  Sampling sampling() const { return is_sampled ? enabled->sampling.load() : Sampling(); }
};

namespace {

using Shared = std::shared_ptr<const Observed>;

// What went wrong, in a line.
const char* reason(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error ? torch_error->what_without_backtrace() : error.what();
}

// The part of a hookstats.watch.hooks.SiteHook that is ours.
struct HookObject {
  PyObject_HEAD vectorcallfunc call;  // of the types that `call_in_c` was given
  int64_t number;
  Shared observed;
};

auto* const slots = new Slots;  // never destroyed: a backward may still run when the process ends

PyTypeObject* hook_type = nullptr;

HookObject* hook_of(PyObject* object) {
  if (!PyObject_TypeCheck(object, hook_type)) {
    PyErr_Format(PyExc_TypeError, "hookstats: expected a hook, got %s", Py_TYPE(object)->tp_name);
    return nullptr;
  }
  return reinterpret_cast<HookObject*>(object);
}

PyObject* call_hook(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names);

PyObject* new_hook(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* hook = type->tp_alloc(type, 0);
  if (!hook) return nullptr;
  reinterpret_cast<HookObject*>(hook)->call = call_hook;
  new (&reinterpret_cast<HookObject*>(hook)->observed) Shared();
  reinterpret_cast<HookObject*>(hook)->number = slots->add(hook);
  return hook;
}

void delete_hook(PyObject* hook) {
  PyTypeObject* type = Py_TYPE(hook);
  slots->remove(reinterpret_cast<HookObject*>(hook)->number);
  reinterpret_cast<HookObject*>(hook)->observed.~Shared();
  type->tp_free(hook);
  Py_DECREF(type);
}

PyType_Slot hook_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_hook)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(delete_hook)},
                            {0, nullptr}};
PyType_Spec hook_spec = {"hookstats._native._C.Hook", sizeof(HookObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
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
  const auto entry = [state](const char* name) { return py::handle(state).attr(name); };  // of a SiteState, by name
  const auto tensor = [&entry](const char* name) { return tensor_of(py::object(entry(name)).ptr()); };
  const auto optional = [&entry](const char* name) { return optional_tensor(py::object(entry(name)).ptr()); };
  const at::Tensor moments = tensor("moments"), counters = tensor("counters");
  const auto histogram = optional("histogram"), active = optional("active");
  Site site(view_of(moments), view_of(counters), histogram ? std::optional(view_of(*histogram)) : std::nullopt,
            active ? std::optional(view_of(*active)) : std::nullopt, entry("channel_dim").cast<int64_t>(),
            entry("low").cast<double>(), entry("high").cast<double>(), entry("block").cast<int64_t>(),
            memory_of({moments, counters, histogram.value_or(at::Tensor()), active.value_or(at::Tensor())}));
  enabled = entry("enabled").cast<std::shared_ptr<Enabled>>();
  return Observed::Half{std::move(site), entry("site").cast<int64_t>(), entry("strict").cast<bool>()};
}

constexpr const char* kBindDoc =
    "bind(hook, output, gradient, in_graph, is_table)\n\n"
    "From now on `observe` folds into these SiteStates, of a module's output and of its gradient; either may be None.\n"
    "in_graph: a callable that compiled autograd can trace, which does with a gradient what `observe` arranges.\n"
    "is_table: of an embedding, whose output has the rows of a mask only where it has their dimensions.";

void bind(py::object hook, py::object output, py::object gradient, py::object in_graph, bool is_table) {
  HookObject* own = hook_of(hook.ptr());
  if (!own) throw py::error_already_set();
  if (output.is_none() && gradient.is_none()) {
    own->observed.reset();
    slots->set_observed(own->number, nullptr);
    return;
  }
  auto made = std::make_shared<Observed>();
  made->output = half_of(output.ptr(), made->enabled);
  made->gradient = half_of(gradient.ptr(), made->enabled);
  made->is_sampled = (output.is_none() ? gradient : output).attr("is_sampled").cast<bool>();
  made->in_graph.emplace(in_graph.release().ptr(), getPyInterpreter());
  made->is_table = is_table;
  slots->set_observed(own->number, made);
  own->observed = std::move(made);
}

constexpr const char* kSlotsDoc =
    "lay_slots(hook, output, gradient)\n\n"
    "From now on these tensors, int64 [1], are what a graph gives to the operator `observe` in the hook's place.";

void lay_slots(const py::object& hook, at::Tensor output, at::Tensor gradient) {
  const HookObject* own = hook_of(hook.ptr());
  if (!own) throw py::error_already_set();
  int64_t number = 2 * own->number;
  for (at::Tensor& slot : {std::ref(output), std::ref(gradient)}) {
    slot.fill_(number);
    if (!slot.is_cpu()) slots->set_address(own->number, slot, number);
    ++number;
  }
}

constexpr const char* kPartDoc =
    "set_part(hook, path, part)\n\n"
    "What graphs meet at a path of a hook's container is another hook's.";

void set_part(const py::object& whole, std::string path, const py::object& part) {
  const HookObject* own = hook_of(whole.ptr());
  const HookObject* other = own ? hook_of(part.ptr()) : nullptr;
  if (!other) throw py::error_already_set();
  slots->set_part(own->number, std::move(path), other->number);
}

// Failures inside backward, where Python must not be entered: of each site the first reason and how many there were,
// until Python asks.
using Failures = std::map<int64_t, std::pair<std::string, int64_t>>;
std::mutex failures_mutex;
auto* const failures = new Failures;  // never destroyed: a backward may still run when the process ends

Failures take_failures() {
  std::lock_guard<std::mutex> lock(failures_mutex);
  return std::exchange(*failures, {});
}

// Folds a tensor; or, where its site is merely to fit, refuses what could not be folded. Returns whether there are rows
// and they are about it.
bool measure(const at::Tensor& x, const Site& site, const Counting* rows, Sampling sampling, bool only_look = false) {
  if (x.is_neg()) return measure(x.resolve_neg(), site, rows, sampling, only_look);
  const std::optional<Rows> counting = rows ? std::optional(rows->views()) : std::nullopt;
  const Rows* const given = counting ? &*counting : nullptr;
  if (only_look) return described(view_of(x), site, given).layout.row_dims > 0;
  if (rows) rows->used_here();
  return accumulate(view_of(x), site, given, sampling);
}

void accumulate_gradient(const at::Tensor& gradient, const Observed& observed, const std::optional<Counting>& rows) {
  if (!gradient.defined() || has_no_data(gradient)) return;
  const Site& site = observed.gradient->site;
  if (!observed.enabled->is_open_on(site.device)) return;
  const Times::Span span(observed.enabled->times.load());
  try {
    measure(gradient, site, rows ? &*rows : nullptr, observed.sampling());
  } catch (const std::exception& error) {
    if (observed.gradient->strict) throw;
    std::lock_guard<std::mutex> lock(failures_mutex);
    ++failures->try_emplace(observed.gradient->number, reason(error), 0).first->second.second;
  }
}

// What a compiled graph calls for a tensor: its site is found as the graph runs, and made or fitted as in eager mode.
// path: in a container. note: how this tensor is part of another one, or why it is none (watch/graphs.py).
void observe_in_graph(const at::Tensor& x, const at::Tensor& slot, const std::string& path, const std::string& note,
                      const std::optional<at::Tensor>& row_index, const std::optional<at::Tensor>& kept) {
  if (has_no_data(x) || has_no_data(slot)) return;
  const Slots::Found found = slots->find(slot, path);
  if (!found.observed || (found.is_output && backward_is_running())) return;
  const Observed& observed = *found.observed;
  if (!observed.enabled->is_open_on(observed.site().device)) return;
  TORCH_CHECK(row_index.has_value() == kept.has_value(), "observe: expected both rows and kept or neither");
  const std::optional<Counting> rows = row_index ? std::optional(Counting{*row_index, *kept}) : std::nullopt;
  const auto& half = found.is_output ? observed.output : observed.gradient;  // none: the site is merely to fit
  const Site& site = half ? half->site : observed.site();
  if (!found.is_new && note.empty() && channel_dim_for(site.channel_dim, x.dim())) {
    try {
      measure(x, site, rows && half ? &*rows : nullptr, observed.sampling(), !half);
      return;
    } catch (const std::exception&) {  // it may fit a site that is made anew; else Python meets the same
    }
  }
  const py::gil_scoped_acquire gil;
  const py::object hook = slots->hook(found.hook);
  if (hook.is_none()) return;
  const py::object counting = rows ? py::cast(std::make_pair(rows->row_index, rows->kept)) : py::none();
  const py::object observe = hook.attr("binder").attr("measure_by_slot");
  const py::object refused = observe(hook, x, found.is_output, path, note, counting);
  TORCH_CHECK(refused.is_none(), std::string(py::str(refused)));
}

void observe_op(const at::Tensor& x, at::Tensor slot) { observe_in_graph(x, slot, "", "", {}, {}); }

void observe_rows_op(const at::Tensor& x, at::Tensor slot, const at::Tensor& rows, const at::Tensor& kept) {
  observe_in_graph(x, slot, "", "", rows, kept);
}

void observe_part_op(const at::Tensor& x, at::Tensor slot, std::string path, std::string note,
                     const std::optional<at::Tensor>& rows, const std::optional<at::Tensor>& kept) {
  observe_in_graph(x, slot, path, note, rows, kept);
}

// No gradient flows through it, and none is stopped. Of few arguments, since inductor's code spells them out.
void do_nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

TORCH_LIBRARY_FRAGMENT(hookstats, m) {
  m.def("observe(Tensor x, Tensor(a!) slot) -> ()");
  m.def("observe.rows(Tensor x, Tensor(a!) slot, Tensor rows, Tensor kept) -> ()");
  m.def("observe.part(Tensor x, Tensor(a!) slot, str path, str note, Tensor? rows, Tensor? kept) -> ()");
  const auto add = [&m](const char* name, auto* run) {
    m.impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, run));
    m.impl(name, torch::dispatch(c10::DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
    // In a vmap there is no one piece of data to read.
    m.impl(name, torch::dispatch(c10::DispatchKey::FuncTorchBatched,
                                 torch::CppFunction::makeFromBoxedFunction<&do_nothing>()));
  };
  add("observe", observe_op);
  add("observe.rows", observe_rows_op);
  add("observe.part", observe_part_op);
}

// On the gradient of an output, of which it is input number `index_` of a node of the graph.
class GradientHook : public torch::autograd::FunctionPreHook {
 public:
  // rows: those that counted in the forward.
  GradientHook(Shared observed, size_t index, std::optional<Counting> rows)
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
  std::optional<Counting> rows_;
};

constexpr const char* kObserveDoc =
    "observe(x, hook) -> None | str | NotImplemented\n\n"
    "Folds the tensor x into the site of the output (unless it is a recomputation) and its gradient, when it comes,\n"
    "into the gradient's. Returns None, or why x was not measured; NotImplemented for a container or a wrapper.\n"
    "The sites are those that the hook was given.";

PyObject* observe_by(const HookObject* hook, PyObject* value) {
  try {
    if (!hook->observed || !hook->observed->measures_now()) Py_RETURN_NONE;
    Shared kept = hook->observed;  // another thread may give the hook other states while the GIL is released
    const Observed& observed = *kept;
    const Site& site = observed.site();
    if (!THPVariable_Check(value)) Py_RETURN_NOTIMPLEMENTED;
    const at::Tensor& x = THPVariable_Unpack(value);
    if (x.key_set().has(c10::DispatchKey::Python)) Py_RETURN_NOTIMPLEMENTED;
    if (x.layout() != at::kStrided || x.is_nested()) {
      return PyUnicode_FromString("expected a dense strided tensor");
    }
    if (has_no_data(x) || at::tracer::impl::is_dispatch_enabled()) Py_RETURN_NONE;
    if (!channel_dim_for(site.channel_dim, x.dim())) {
      return PyUnicode_FromString("the channel dimension of such a tensor is not known yet");
    }
    const Times::Span span(observed.enabled->times.load(), 1);
    const auto counted = observed.enabled->counted_here();
    std::optional<Counting> rows = counted ? counted->on(x.device(), observed.is_sampled) : std::nullopt;
    if (rows && observed.is_table && !view_of(x).begins_with(view_of(rows->row_index))) rows.reset();
    const Counting* counting = rows ? &*rows : nullptr;
    if (!observed.output) {
      const bool concerned = measure(x, site, counting, {}, /*only_look=*/true);
      if (counting) ++(concerned ? counted->concerned : counted->others);
    } else if (!backward_is_running()) {
      // Only where it takes longer than getting the GIL back: a launch does not, nor does a small tensor.
      constexpr int64_t kLong = 1 << 15;
      std::optional<py::gil_scoped_release> release;
      if (x.is_cpu() && x.numel() >= kLong) release.emplace();
      const bool concerned = measure(x, site, counting, observed.sampling());
      if (counting) ++(concerned ? counted->concerned : counted->others);
    }
    // A leaf's gradient is its owner's, and a hook on it would outlive the step.
    if (observed.gradient && x.requires_grad()) {
      if (const auto& node = x.grad_fn()) {
        node->add_tensor_pre_hook(std::make_unique<GradientHook>(std::move(kept), x.output_nr(), rows));
      }
    }
  } catch (const std::exception& error) {
    return PyUnicode_FromString(reason(error));
  }
  Py_RETURN_NONE;
}

PyObject* observe(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2) {
    PyErr_Format(PyExc_TypeError, "observe: expected (x, hook), got %zd arguments", nargs);
    return nullptr;
  }
  const HookObject* hook = hook_of(args[1]);
  return hook ? observe_by(hook, args[0]) : nullptr;
}

// hook(module, args, output): what Hook.__call__ does in Python.
PyObject* call_hook(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  const Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
  if (nargs != 3 || (names && PyTuple_GET_SIZE(names) > 0)) {
    PyErr_Format(PyExc_TypeError, "hook: expected (module, args, output), got %zd arguments and %zd by name", nargs,
                 names ? PyTuple_GET_SIZE(names) : 0);
    return nullptr;
  }
  PyObject* problem = observe_by(reinterpret_cast<const HookObject*>(self), args[2]);
  if (!problem || problem == Py_None) return problem;
  PyObject* binder = PyObject_GetAttrString(self, "binder");
  PyObject* result = binder ? PyObject_CallMethod(binder, "rebind", "OOO", self, args[2], problem) : nullptr;
  Py_XDECREF(binder);
  Py_DECREF(problem);
  if (!result) return nullptr;
  Py_DECREF(result);  // the module would take it for its output
  Py_RETURN_NONE;
}

constexpr const char* kCallInCDoc =
    "call_in_c(type)\n\n"
    "Calls of a hook of this class no longer go through its __call__, which is for the compiler and for subclasses. "
    "To\n"
    "be called once; what is then assigned to __call__ may not be seen.";

void call_in_c(py::handle type) {
  TORCH_CHECK_TYPE(PyType_Check(type.ptr()) && PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()), hook_type),
                   "call_in_c: expected a class of hooks");
  auto* of_hooks = reinterpret_cast<PyTypeObject*>(type.ptr());
  of_hooks->tp_call = PyVectorcall_Call;
  of_hooks->tp_vectorcall_offset = offsetof(HookObject, call);
  of_hooks->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  PyType_Modified(of_hooks);
}

PyMethodDef observe_method = {"observe", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(observe)),
                              METH_FASTCALL, kObserveDoc};

}  // namespace

void add_hooks(py::module_& m) {
  m.def("take_failures", &take_failures);
  m.def("bind", &bind, kBindDoc);
  m.def("lay_slots", &lay_slots, kSlotsDoc);
  m.def("set_part", &set_part, kPartDoc);
  m.def("call_in_c", &call_in_c, kCallInCDoc);
  hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&hook_spec));
  if (!hook_type) throw py::error_already_set();
  m.attr("Hook") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(hook_type));
  PyObject* function = PyCFunction_NewEx(&observe_method, nullptr, m.attr("__name__").ptr());
  m.attr("observe") = py::reinterpret_steal<py::object>(function);
}

}  // namespace hookstats
