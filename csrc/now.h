// Whether anything is measured now, and what counts of it: what hooks and compiled graphs ask before they measure.
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/record_function.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
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

// What compiled graphs look at before they run, in guards: whether the program that measures is to run or the bare one,
// and which rows count. All monitors share it, so that of many there are no more programs than of one: what else is
// different between them is decided on the device.
//
// Activation checkpointing around a compiled block calls it again in backward, and must get the program that its
// forward was, or it refuses the backward: the two save different tensors. So each answer is kept with the number that
// the next node of the graph will have, and in a backward the running node tells which one was given when its forward
// ran. Entered under the GIL alone.
class __attribute__((visibility("hidden"))) Now {
 public:
  void add(const std::shared_ptr<const Enabled>& monitor) { monitors_.push_back(monitor); }

  void remove(const std::shared_ptr<const Enabled>& monitor) {
    const auto gone = std::remove(monitors_.begin(), monitors_.end(), monitor);
    monitors_.erase(gone, monitors_.end());
    if (monitors_.empty()) answers_.clear();
  }

  // The rows that count of what a thread measures for a monitor, just written; none: all.
  void set_rows(unsigned long thread, const std::string& monitor,
                const std::vector<std::pair<at::Tensor, at::Tensor>>& rows) {
    auto after = std::make_shared<AllRows>(*rows_of(thread));  // an answer may hold the one before
    after->by_monitor = after->by_monitor.attr("copy")();
    after->made.erase(monitor);
    after->by_monitor.attr("pop")(monitor, py::none());
    for (const auto& [row_index, kept] : rows) {
      auto made = std::make_shared<MadeOn>(row_index.device());
      made->written();
      after->made[monitor].push_back({row_index, kept, std::move(made)});
    }
    if (!rows.empty()) after->by_monitor[py::str(monitor)] = py::tuple(py::cast(rows));
    if (after->made.empty()) {
      rows_.erase(thread);
    } else {
      rows_[thread] = std::move(after);
    }
  }

  // Whether any monitor measures.
  bool measured() { return answer().measured; }

  // Whether any does, but not this one, for which it is evaluation.
  bool leaves_out(const Enabled& monitor) {
    const auto& left_out = answer().left_out;
    return std::find(left_out.begin(), left_out.end(), &monitor) != left_out.end();
  }

  // By Flags.monitor. Whoever asks goes on to use them on the current stream, where they come behind their writing.
  py::dict rows() {
    const auto all = answer().rows;
    for (const auto& [monitor, made] : all->made) {
      for (const Counting& each : made) each.used_here();
    }
    return all->by_monitor;
  }
  size_t monitors() const { return monitors_.size(); }

 private:
  struct AllRows {  // never changed, as answers hold it
    py::dict by_monitor;
    std::map<std::string, std::vector<Counting>> made;
  };
  using Kept = std::shared_ptr<const AllRows>;
  struct Answer {
    uint64_t thread, node;  // where it was given first, and the number of the next node there
    bool measured;
    std::vector<const Enabled*> left_out;
    Kept rows;

    bool is_like(const Answer& other) const {
      return thread == other.thread && measured == other.measured && left_out == other.left_out && rows == other.rows;
    }
  };
  static constexpr size_t kMost = 32;  // forwards in different states whose backward is still to come

  Kept rows_of(unsigned long thread) const {
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
    for (const auto& each : monitors_) {
      if (!*each->is_open) continue;
      if (each->leaves_out()) {
        now.left_out.push_back(each.get());
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
    if (answers_.size() > kMost) answers_.pop_front();
    return now;
  }

  std::vector<std::shared_ptr<const Enabled>> monitors_;
  std::map<unsigned long, Kept> rows_;  // by thread
  std::deque<Answer> answers_;          // the oldest first
  Kept none_ = std::make_shared<AllRows>();
};

// One monitor's part of it, as an object of its own, because guards look at attributes.
struct __attribute__((visibility("hidden"))) Part {
  Now& now;
  std::shared_ptr<const Enabled> enabled;

  bool left_out() const { return now.leaves_out(*enabled); }
  void remove() const { now.remove(enabled); }
};

}  // namespace hookstats
