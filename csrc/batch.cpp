// Many tensors at once, the parameters of a model or their gradients: on a GPU one launch for each dtype (and
// another one for those that cannot be read in packs).

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "ops.h"

namespace hookstats {
namespace {

using Tensors = std::vector<std::optional<at::Tensor>>;
using Failures = std::vector<std::tuple<int64_t, std::string>>;

// The sites whose tensors come together. What is known of a tensor is kept from call to call, so that a call with
// tensors like those of the call before only hands over their addresses.
class Batch : public torch::CustomClassHolder {
 public:
  Batch(std::vector<at::Tensor> moments, std::vector<at::Tensor> counters, Tensors histograms,
        std::vector<at::Tensor> active, std::vector<int64_t> channel_dims, double low, double high, int64_t block) {
    const size_t n = moments.size();
    TORCH_CHECK_VALUE(counters.size() == n && histograms.size() == n && active.size() == n && channel_dims.size() == n,
                      "hookstats: Batch: expected lists of one length, got ", n, ", ", counters.size(), ", ",
                      histograms.size(), ", ", active.size(), ", ", channel_dims.size());
    for (size_t i = 0; i < n; ++i) {
      members_.push_back(
          {Site({moments[i], counters[i], histograms[i], active[i], channel_dims[i], low, high, block}), {}, {}});
    }
  }

  // Folds each tensor into its site's state; none, or an empty one: nothing to fold. Returns what could not be folded,
  // by number, and why.
  Failures accumulate(const Tensors& tensors) {
    TORCH_CHECK_VALUE(tensors.size() == members_.size(), "hookstats: Batch: expected ", members_.size(),
                      " tensors, got ", tensors.size());
    const std::lock_guard<std::mutex> lock(mutex_);
    Failures failures;
    std::vector<at::Tensor> arrived(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i] || !tensors[i]->defined()) continue;
      try {
        const at::Tensor x = tensors[i]->is_neg() ? tensors[i]->resolve_neg() : *tensors[i];
        if (x.numel() == 0) continue;
        if (!knows(members_[i], x)) learn(members_[i], x);
        arrived[i] = x;
      } catch (const std::exception& error) {
        failures.emplace_back(i, reason(error));
      }
    }
#if defined(HOOKSTATS_CUDA_KERNELS)
    if (stale_ && !is_capturing()) plan();
    for (Group& group : groups_) launch(group, arrived, failures);
#endif
    for (size_t i = 0; i < arrived.size(); ++i) {
      if (!arrived[i].defined() || members_[i].among_many) continue;
      try {
        hookstats::accumulate(arrived[i], members_[i].site);
      } catch (const std::exception& error) {
        failures.emplace_back(i, reason(error));
      }
    }
    return failures;
  }

 private:
  struct Member {
    Site site;
    // Of the last tensor: what decides how it is read.
    std::optional<std::tuple<at::ScalarType, std::vector<int64_t>, std::vector<int64_t>, uintptr_t>> kind;
    Input input;
    bool among_many = false;  // else it is folded alone
  };

  static constexpr uintptr_t kAlignment = 16;
  static const void* data_of(const at::Tensor& x) {
    return x.layout() == at::kStrided && !has_no_data(x) ? x.const_data_ptr() : nullptr;
  }

  // Whether it is like the tensor before.
  static bool knows(const Member& member, const at::Tensor& x) {
    const void* data = data_of(x);
    if (!member.kind || !data) return false;
    const auto& [dtype, sizes, strides, offset] = *member.kind;
    return dtype == x.scalar_type() && x.sizes() == sizes && x.strides() == strides &&
           offset == reinterpret_cast<uintptr_t>(data) % kAlignment &&
           x.device() == member.site.tensors.moments.device();
  }

  void learn(Member& member, const at::Tensor& x) {
    TORCH_CHECK(!is_captured(member.site.tensors.moments.device()),
                "hookstats: expected a measured step with a tensor like this one before a CUDA graph captures one: "
                "nothing is planned meanwhile");
    const void* data = data_of(x);
    Input input = described(x, member.site);
    TORCH_CHECK_TYPE(data, "hookstats: expected a plain tensor with data, got a wrapper or a mere shape");
    input.data = data;
    member.input = input;  // only now: what cannot be read changes no plan
    stale_ = true;
    member.kind.emplace(x.scalar_type(), x.sizes().vec(), x.strides().vec(),
                        reinterpret_cast<uintptr_t>(data) % kAlignment);
  }

#if defined(HOOKSTATS_CUDA_KERNELS)
  struct Group {
    std::vector<size_t> members;
    cuda::Many many;
    at::Tensor table;  // on the device
    MadeOn stream;
  };

  // Whether a table, which cannot be made then, would become part of a CUDA graph.
  bool is_capturing() const {
    return std::any_of(members_.begin(), members_.end(),
                       [](const Member& member) { return is_captured(member.site.tensors.moments.device()); });
  }

  void plan() {
    std::map<std::tuple<c10::DeviceIndex, Dtype, cuda::AmongMany, HistogramKind>, std::vector<size_t>> groups;
    for (size_t i = 0; i < members_.size(); ++i) {
      Member& member = members_[i];
      const auto device = member.site.tensors.moments.device();
      member.among_many = false;
      if (!member.kind || !runs_cuda_kernels(device) || member.site.state.block) continue;
      const auto how = cuda::among_many(member.input, member.site.state.kind, number_of(device));
      member.among_many = how != cuda::AmongMany::no;
      if (!member.among_many) continue;
      groups[{device.index(), member.input.dtype, how, member.site.state.kind}].push_back(i);
    }
    groups_.clear();
    for (const auto& [key, all] : groups) {
      for (size_t first = 0; first < all.size(); first += cuda::kMany) {
        const size_t last = std::min(first + cuda::kMany, all.size());
        groups_.push_back(group_of({all.begin() + first, all.begin() + last}, std::get<cuda::AmongMany>(key)));
      }
    }
    stale_ = false;
  }

  Group group_of(std::vector<size_t> members, cuda::AmongMany how) {
    std::vector<Input> inputs;
    std::vector<State> states;
    for (const size_t i : members) {
      inputs.push_back(members_[i].input);
      states.push_back(members_[i].site.state);
    }
    const auto device = members_[members[0]].site.tensors.moments.device();
    Group group{std::move(members), cuda::plan_many(inputs, states, how), {}, MadeOn(device)};
    group.table = on_device(group.many.table, device);
    group.stream.written();
    return group;
  }

  void launch(Group& group, const std::vector<at::Tensor>& arrived, Failures& failures) {
    std::vector<const void*> addresses;
    for (const size_t i : group.members) {
      addresses.push_back(arrived[i].defined() ? arrived[i].const_data_ptr() : nullptr);
    }
    const auto is_null = [](const void* address) { return !address; };
    if (std::all_of(addresses.begin(), addresses.end(), is_null)) return;
    const SiteState& site = members_[group.members[0]].site.tensors;
    const auto device = site.moments.device();
    try {
      const c10::DeviceGuard guard(device);
      const auto to = launch_on(device, site.active, group.many.partials, group.many.arrivals);
      if (to.capture) {
        for (const size_t i : group.members) keep_for_graphs(members_[i].site.tensors, {group.table});
      }
      group.stream.used_here({group.table});
      check(cuda::accumulate(group.many, group.table.const_data_ptr(), addresses.data(), to));
    } catch (const std::exception& error) {
      for (const size_t i : group.members) failures.emplace_back(i, reason(error));
    }
  }

  std::vector<Group> groups_;
#endif

  std::mutex mutex_;
  std::vector<Member> members_;
  bool stale_ = true;
};

TORCH_LIBRARY_FRAGMENT(HOOKSTATS_NAMESPACE, m) {
  m.class_<Batch>("Batch")
      .def(torch::init<std::vector<at::Tensor>, std::vector<at::Tensor>, Tensors, std::vector<at::Tensor>,
                       std::vector<int64_t>, double, double, int64_t>())
      .def("accumulate", &Batch::accumulate);
}

}  // namespace
}  // namespace hookstats
