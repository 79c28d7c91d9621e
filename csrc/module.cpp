// The Python module: what hookstats/_native/__init__.py imports besides the operators.

#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/record_function.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/extension.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hook.h"
#include "now.h"
#include "times.h"

namespace hookstats {
namespace {

// A Times::Span for Python's `with`.
struct PythonSpan {
  std::shared_ptr<Times> times;
  int calls;
  std::unique_ptr<Times::Span> running;
};

using TensorPairs = std::vector<std::pair<at::Tensor, at::Tensor>>;

// Rows that have just been written.
std::vector<Counting> written(const TensorPairs& rows) {
  std::vector<Counting> all;
  for (const auto& [row_index, kept] : rows) {
    auto made = std::make_shared<MadeOn>(row_index.device());
    made->written();
    all.push_back({row_index, kept, std::move(made)});
  }
  return all;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("TORCH") = TORCH_VERSION;
  py::class_<Times, std::shared_ptr<Times>>(m, "Times")
      .def(py::init<>())
      .def_property_readonly("calls", &Times::calls)
      .def_property_readonly("host_us", &Times::host_us)
      .def("span",
           [](std::shared_ptr<Times> times, int calls) { return PythonSpan{std::move(times), calls, nullptr}; });
  py::class_<PythonSpan>(m, "Span")
      .def("__enter__",
           [](PythonSpan& span) { span.running = std::make_unique<Times::Span>(span.times.get(), span.calls); })
      .def("__exit__", [](PythonSpan& span, const py::args&) { span.running.reset(); });
  py::class_<Counted, std::shared_ptr<Counted>>(m, "Counted")
      .def(py::init<unsigned long>())
      .def_property_readonly(
          "met", [](const Counted& counted) { return std::make_pair(counted.concerned.load(), counted.others.load()); })
      .def("set_rows", [](Counted& counted, const TensorPairs& rows, const TensorPairs& sampled) {
        counted.rows = written(rows);
        counted.sampled = written(sampled);
      });
  py::class_<Enabled, std::shared_ptr<Enabled>>(m, "Enabled")
      .def(py::init<at::Tensor>())
      .def_property(
          "times", [](const Enabled& enabled) { return enabled.times.load() ? enabled.kept.back() : nullptr; },
          [](Enabled& enabled, std::shared_ptr<Times> times) {
            enabled.times = times.get();
            if (times) enabled.kept.push_back(std::move(times));
          })
      .def_property_readonly("is_open", [](const Enabled& enabled) { return *enabled.is_open != 0; })
      .def_property_readonly("leaves_out", &Enabled::leaves_out)
      .def_property(
          "is_paused", [](const Enabled& enabled) { return enabled.is_paused.load(); },
          [](Enabled& enabled, bool is_paused) { enabled.is_paused = is_paused; })
      .def_property(
          "sampling",
          [](const Enabled& enabled) {
            const Sampling now = enabled.sampling.load();
            return std::make_pair(now.every, now.phase);
          },
          [](Enabled& enabled, std::pair<int32_t, int32_t> now) {
            TORCH_CHECK_VALUE(0 <= now.second && now.second < now.first,
                              "Enabled.sampling: expected (every, phase) with a phase below every, got ", now.first,
                              " and ", now.second);
            enabled.sampling = Sampling{now.first, now.second};
          })
      .def("counts_now", &Enabled::counts_now)
      .def("decide_by", [](Enabled& enabled, py::object root) { enabled.root = root.is_none() ? nullptr : root.ptr(); })
      .def("count",
           [](Enabled& enabled, std::vector<std::shared_ptr<Counted>> all) { enabled.counted = std::move(all); });
  // torch._C._stash_obj_in_tls, which in torch 2.11 takes a reference that it was not given.
  m.def("name_thread", [](py::int_ ident) {
    auto kept = std::make_shared<c10::SafePyObject>(ident.release().ptr(), getPyInterpreter());
    at::impl::ThreadLocalPythonObjects::set(kThreadKey, std::move(kept));
  });
  // The thread, by a number that no other has had; that of the forward whose backward runs here, and its node's number
  // (-1: none runs); and the number that the next node will have.
  m.def("place_in_autograd", [] {
    const auto node = backward_is_running() ? torch::autograd::get_current_node() : nullptr;
    return std::make_tuple(at::RecordFunction::currentThreadId(), node ? node->thread_id() : 0,
                           node ? int64_t(std::min<uint64_t>(node->sequence_nr(), INT64_MAX - 1)) : -1,
                           at::sequence_number::peek());
  });
  m.def("has_no_data", &has_no_data);
  add_hooks(m);
}

}  // namespace hookstats
