// Many tensors at once, the parameters of a model or their gradients: on a GPU one launch for each dtype (and
// another one for those that cannot be read in packs).

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "stable.h"

namespace hookstats {
namespace {

using Failures = std::vector<std::pair<int64_t, std::string>>;

// The sites whose tensors come together. What is known of a tensor is kept from call to call, so that a call with
// tensors like those of the call before only hands over their addresses.
class Batch : public Held {
 public:
  explicit Batch(std::vector<Site> sites) {
    for (Site& site : sites) members_.push_back({std::move(site), {}, {}});
  }

  // Folds each tensor into its site's state; none, or an empty one: nothing to fold. Returns what could not be folded,
  // by number, and why.
  Failures accumulate(const MaybeTensors& tensors) {
    if (tensors.size() != members_.size()) {
      refuse("hookstats: Batch: expected ", members_.size(), " tensors, got ", tensors.size());
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    Failures failures;
    std::vector<std::optional<View>> arrived(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i] || !tensors[i]->defined()) continue;
      try {
        const View x = view_of(*tensors[i]);
        if (x.is_strided && x.numel() == 0) continue;
        if (!members_[i].knows(x)) learn(members_[i], x);
        arrived[i] = x;
      } catch (const std::exception& error) {
        failures.emplace_back(i, error.what());
      }
    }
    if (kHasCudaKernels) {
      if (stale_ && !is_capturing()) plan();
      for (Group& group : groups_) launch(group, arrived, failures);
    }
    for (size_t i = 0; i < arrived.size(); ++i) {
      if (!arrived[i] || members_[i].among_many) continue;
      try {
        hookstats::accumulate(*arrived[i], members_[i].site);
      } catch (const std::exception& error) {
        failures.emplace_back(i, error.what());
      }
    }
    return failures;
  }

  // Of the plans, on their devices: whoever launches on other streams than before is to say so to torch.
  Tensors tables() const {
    Tensors all;
    for (const Group& group : groups_) all.push_back(group.table);
    return all;
  }

 private:
  struct Member {
    Site site;
    // Of the last tensor: what decides how it is read.
    std::optional<std::tuple<ScalarType, std::vector<int64_t>, std::vector<int64_t>, uintptr_t>> kind;
    Input input;
    bool among_many = false;  // else it is folded alone

    // Whether it is like the tensor before.
    bool knows(const View& x) const {
      if (!kind || !x.data || x.device != site.device) return false;
      const auto& [dtype, sizes, strides, offset] = *kind;
      return dtype == x.dtype && x.sizes == Numbers{sizes.data(), int64_t(sizes.size())} &&
             x.strides == Numbers{strides.data(), int64_t(strides.size())} && offset == offset_of(x);
    }
  };

  static uintptr_t offset_of(const View& x) {
    constexpr uintptr_t kAlignment = 16;
    return reinterpret_cast<uintptr_t>(x.data) % kAlignment;
  }

  void learn(Member& member, const View& x) {
    if (capture_on(member.site.device)) {
      refuse(
          "hookstats: expected a measured step with a tensor like this one before a CUDA graph captures one: "
          "nothing is planned meanwhile");
    }
    Input input = described(x, member.site);
    if (!x.data) refuse("hookstats: expected a plain tensor with data, got a wrapper or a mere shape");
    input.data = x.data;
    member.input = input;  // only now: what cannot be read changes no plan
    stale_ = true;
    member.kind.emplace(x.dtype, std::vector<int64_t>(x.sizes.data, x.sizes.data + x.dim()),
                        std::vector<int64_t>(x.strides.data, x.strides.data + x.dim()), offset_of(x));
  }

  struct Group {
    std::vector<size_t> members;
    cuda::Many many;
    Tensor table;  // on the device, and written
  };

  // Whether a table, which cannot be made then, would become part of a CUDA graph.
  bool is_capturing() const {
    return std::any_of(members_.begin(), members_.end(),
                       [](const Member& member) { return capture_on(member.site.device) != 0; });
  }

  void plan() {
    std::map<std::tuple<int, Dtype, cuda::AmongMany, HistogramKind>, std::vector<size_t>> groups;
    for (size_t i = 0; i < members_.size(); ++i) {
      Member& member = members_[i];
      const Device device = member.site.device;
      member.among_many = false;
      if (!member.kind || !runs_cuda_kernels(device) || member.site.state.block) continue;
      const auto how = cuda::among_many(member.input, member.site.state.kind, number_of(device));
      member.among_many = how != cuda::AmongMany::no;
      if (!member.among_many) continue;
      groups[{device.index, member.input.dtype, how, member.site.state.kind}].push_back(i);
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
    const Device device = members_[members[0]].site.device;
    auto many = cuda::plan_many(inputs, states, how);
    Tensor table = on_device(many.table, device);
    return {std::move(members), std::move(many), std::move(table)};
  }

  void launch(Group& group, const std::vector<std::optional<View>>& arrived, Failures& failures) {
    std::vector<const void*> addresses;
    for (const size_t i : group.members) addresses.push_back(arrived[i] ? arrived[i]->data : nullptr);
    const auto is_null = [](const void* address) { return !address; };
    if (std::all_of(addresses.begin(), addresses.end(), is_null)) return;
    const Site& site = members_[group.members[0]].site;
    try {
      const OnDevice here(site.device);
      const auto to = launch_on(site.device, site.active, group.many.partials, group.many.arrivals);
      if (to.capture) {
        keep_for_graphs({memory_of(group.table)});
        for (const size_t i : group.members) keep_for_graphs(members_[i].site.memory);
      }
      cuda::accumulate(group.many, group.table.const_data_ptr(), addresses.data(), to);
    } catch (const std::exception& error) {
      for (const size_t i : group.members) failures.emplace_back(i, error.what());
    }
  }

  std::vector<Group> groups_;

  std::mutex mutex_;
  std::vector<Member> members_;
  bool stale_ = true;
};

int64_t make_batch(std::vector<int64_t> numbers) {
  std::vector<Site> sites;
  for (const int64_t number : numbers) sites.push_back(held<HeldSite>(number).site);
  return hold(std::make_unique<Batch>(std::move(sites)));
}

// What could not be folded: each number and why, with a blank between, ended by a character that no message has. As
// bytes, because torch does not free a string that is returned (seen up to 2.13).
Tensor accumulate_batch(int64_t number, MaybeTensors tensors) {
  std::string said;
  for (const auto& [i, why] : held<Batch>(number).accumulate(tensors)) said += std::to_string(i) + " " + why + "\x1e";
  return bytes_of(said.data(), said.size());
}

Tensors batch_tables(int64_t number) { return held<Batch>(number).tables(); }

}  // namespace
}  // namespace hookstats
