// Which hook a slot of a compiled graph stands for.
#pragma once

#include <torch/extension.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hookstats {

struct Observed;  // hook.cpp: what a hook measures into

// The hooks that there are, for graphs. A slot is an int64 tensor of one element: twice a hook's number, and 1 more for
// the gradient. It lies where the hook's tensors do. On a GPU nobody waits to read one: its address is looked up.
class __attribute__((visibility("hidden"))) Slots {
 public:
  struct Found {
    int64_t hook = 0;  // its number; 0: it is no more
    bool is_output = false;
    std::shared_ptr<const Observed> observed = nullptr;  // null: nothing is measured
    bool is_new = false;  // what lies at this path has no hook yet; `observed` is the container's
  };

  // Returns its number.
  int64_t add(PyObject* hook) {
    PyObject* reference = PyWeakref_NewRef(hook, nullptr);
    if (!reference) PyErr_Clear();  // of a class without room for one: its hooks are not found
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks_[++last_].reference = reference;
    return last_;
  }

  // What is let go, here and below, is destroyed when the lock is free: it may be the last that holds an object.
  void remove(int64_t hook) {
    Known gone;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      gone = std::exchange(hooks_[hook], Known());
      for (const at::Tensor& slot : gone.slots) slot_at_[slot.const_data_ptr()] = 0;
      hooks_.erase(hook);
    }
    Py_XDECREF(gone.reference);
  }

  std::shared_ptr<const Observed> set_observed(int64_t hook, std::shared_ptr<const Observed> observed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(hooks_[hook].observed, std::move(observed));
  }

  void set_part(int64_t whole, std::string path, int64_t part) {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks_[whole].parts[std::move(path)] = part;
  }

  // On a GPU. It is kept as long as the hook, so that nothing else comes to its address meanwhile.
  void set_address(int64_t hook, const at::Tensor& slot, int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    hooks_[hook].slots.push_back(slot);
    slot_at_[slot.const_data_ptr()] = number;
  }

  // path: in a container.
  Found find(const at::Tensor& slot, const std::string& path) {
    TORCH_CHECK_TYPE(slot.scalar_type() == at::kLong && slot.numel() == 1, "observe: slot: expected one int64, got ",
                     slot.scalar_type(), " ", slot.sizes());
    const auto* memory = slot.const_data_ptr<int64_t>();
    const std::optional<int64_t> told = slot.is_cpu() ? *memory : slot_at(memory);
    if (!told) {
      TORCH_WARN_ONCE("hookstats: not measured: a compiled graph copies its inputs on a GPU, and so does not tell ",
                      "which module it runs; backend=\"inductor\" copies none");
    }
    const int64_t number = told.value_or(0);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto known = hooks_.find(number >> 1);
    if (known == hooks_.end()) return {};
    Found found{number >> 1, number % 2 == 0, known->second.observed};
    if (path.empty()) return found;
    const auto part = known->second.parts.find(path);
    found.is_new = part == known->second.parts.end();
    if (found.is_new) return found;
    known = hooks_.find(part->second);
    found.observed = known == hooks_.end() ? nullptr : known->second.observed;
    return found;
  }

  // A new reference, or None. Under the GIL. By way of a weak one, as Python may already be taking a hook apart.
  py::object hook(int64_t number) {
    py::object reference;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto known = hooks_.find(number);
      if (known == hooks_.end() || !known->second.reference) return py::none();
      reference = py::reinterpret_borrow<py::object>(known->second.reference);
    }
    return reference();
  }

 private:
  std::optional<int64_t> slot_at(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = slot_at_.find(address);
    return known == slot_at_.end() ? std::nullopt : std::optional(known->second);
  }

  struct Known {
    PyObject* reference = nullptr;  // a weak one
    std::shared_ptr<const Observed> observed = nullptr;
    std::map<std::string, int64_t> parts = {};
    std::vector<at::Tensor> slots = {};  // on GPUs
  };

  std::mutex mutex_;
  int64_t last_ = 0;
  std::unordered_map<int64_t, Known> hooks_;
  std::unordered_map<const void*, int64_t> slot_at_;  // 0: of a hook that is no more
};

}  // namespace hookstats
