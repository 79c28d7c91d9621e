// Sums over tensors and their gradients together: on a GPU one launch for many.

#include <algorithm>

#include "stable.h"

namespace hookstats {
namespace {

// Columns of the table of terms: the number of a tensor; along which of its dimensions places lie, and which of these
// is its first one; which numbers of `places` are meant; what is added to w.
enum JointColumn : int { k_tensor, k_dim, k_begin, k_first_place, k_end_place, k_offset, kJointColumns };

// How all dimensions but that of the places are walked through, in both tensors alike.
void lay_out(JointTerm& term, const View& weight, const View& gradient, int64_t dim) {
  struct Dim {
    int64_t size, in_weight, in_gradient;
  };
  std::vector<Dim> dims, merged;
  for (int64_t d = 0; d < weight.dim(); ++d) {
    if (d != dim && weight.sizes[d] != 1) dims.push_back({weight.sizes[d], weight.strides[d], gradient.strides[d]});
  }
  std::stable_sort(dims.begin(), dims.end(), [](auto& a, auto& b) { return a.in_weight > b.in_weight; });
  for (const Dim& each : dims) {
    Dim* last = merged.empty() ? nullptr : &merged.back();
    if (last && last->in_weight == each.size * each.in_weight && last->in_gradient == each.size * each.in_gradient) {
      *last = {last->size * each.size, each.in_weight, each.in_gradient};
    } else {
      merged.push_back(each);
    }
  }
  if (merged.empty()) merged.push_back({1, 0, 0});
  if (merged.size() > size_t(JointTerm::kMaxDims)) {
    refuse("hookstats: joint_sums: expected at most ", JointTerm::kMaxDims,
           " dimensions that do not merge beside the channels, got strides ", weight.strides, " and ", gradient.strides,
           " for shape ", weight.sizes);
  }
  std::swap(*std::max_element(merged.begin(), merged.end(), [](auto& a, auto& b) { return a.size < b.size; }),
            merged.back());
  term.run = merged.back().size;
  term.weight_stride = merged.back().in_weight;
  term.gradient_stride = merged.back().in_gradient;
  merged.pop_back();
  term.runs = 1;
  for (const Dim& each : merged) {
    term.runs *= unsigned(each.size);
    term.extent[term.ndim] = unsigned(each.size);
    term.run_in_weight[term.ndim] = each.in_weight;
    term.run_in_gradient[term.ndim++] = each.in_gradient;
  }
  term.size = weight.sizes[dim];
  term.weight_step = weight.strides[dim];
  term.gradient_step = gradient.strides[dim];
}

JointTerm joint_term(const int64_t* row, const View& weight, const std::optional<View>& of_gradient, Device device) {
  const View& gradient = of_gradient ? *of_gradient : weight;
  for (const View* x : {&weight, &gradient}) {
    if (!x->is_strided || (!x->data && x->numel() > 0) || x->device != device) {
      refuse("hookstats: joint_sums: expected plain tensors with data on ", device,
             ", got a wrapper, a mere shape, another layout or a tensor on ", x->device);
    }
  }
  if (!(weight.sizes == gradient.sizes) || row[k_dim] < 0 || row[k_dim] >= weight.dim()) {
    refuse("hookstats: joint_sums: expected a gradient as large as its tensor, and one of their dimensions; got ",
           gradient.sizes, " for ", weight.sizes, " and dimension ", row[k_dim]);
  }
  JointTerm term{};
  lay_out(term, weight, gradient, row[k_dim]);
  term.weight = weight.data;
  term.gradient = of_gradient ? gradient.data : nullptr;
  term.weight_dtype = dtype_of(weight.dtype);
  term.gradient_dtype = dtype_of(gradient.dtype);
  term.begin = row[k_begin];
  term.count = row[k_end_place] - row[k_first_place];
  term.offset = double(row[k_offset]);
  return term;
}

// Of each of `places` (int64) the sums of kernels.h by the term that names it, and 0 where none does: float64 [places,
// kJointSums]. terms: the table, int64 on the CPU. No gradient: it is 0. All else lies on the device of the places.
Tensor joint_sums(Tensors weights, MaybeTensors gradients, const Tensor& terms, const Tensor& places) {
  const View table = view_of(terms), all = view_of(places);
  if (table.dtype != ScalarType::Long || table.dim() != 2 || table.sizes[1] != kJointColumns ||
      !table.is_contiguous() || !table.device.is_cpu() || all.dtype != ScalarType::Long || all.dim() != 1 ||
      !all.is_contiguous() || weights.size() != gradients.size()) {
    refuse("hookstats: joint_sums: expected int64 terms [n, ", int(kJointColumns),
           "] on the CPU, int64 places [m], and ", "as many gradients as weights; got ", table.dtype, " ", table.sizes,
           " on ", table.device, ", ", all.dtype, " ", all.sizes, ", ", weights.size(), " weights and ",
           gradients.size(), " gradients");
  }
  const Device device = all.device;
  check_device(device);
  std::vector<JointTerm> given;
  Tensor out = empty({all.numel(), kJointSums}, ScalarType::Double, device);
  for (int64_t i = 0; i < table.sizes[0]; ++i) {
    const int64_t* row = table.as<const int64_t>() + i * kJointColumns;
    const int64_t number = row[k_tensor], first = row[k_first_place], end = row[k_end_place];
    if (number < 0 || number >= int64_t(weights.size()) || first < 0 || end < first || end > all.numel()) {
      refuse("hookstats: joint_sums: expected one of ", weights.size(), " tensors and places among ", all.numel(),
             ", got ", number, " and ", first, " to ", end);
    }
    JointTerm term = joint_term(row, view_of(weights[number]), view_of(gradients[number]), device);
    term.places = all.as<const int64_t>() + first;
    term.out = static_cast<double*>(out.mutable_data_ptr()) + first * kJointSums;
    if (term.count > 0) given.push_back(term);
  }
  const OnDevice here(device);
  stable::zero_(out);
  runs_cuda_kernels(device) ? cuda::joint_sums(given, current_stream(device)) : cpu::joint_sums(given, parallel_for);
  return out;
}

}  // namespace
}  // namespace hookstats
