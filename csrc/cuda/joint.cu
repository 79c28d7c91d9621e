// Joint sums of tensors and their gradients: one launch for many terms, a block for some places of a term.

#include "device.h"

namespace hookstats::cuda {
namespace {

constexpr int kJointThreads = 256;
constexpr int kTogether = 4;  // places of a block, so that those which lie side by side are read by whole sectors
constexpr int kMembers = kJointThreads / kTogether;  // threads of a place
constexpr int kAhead = 4;                            // loads of a thread at once

struct JointTable {
  JointTerm of[kJointTerms];
};

// A thread's next elements, `stride` apart, as far as there are such: of its run, kMembers threads have `left`.
template <class scalar_t>
__device__ void load_ahead(const void* data, int64_t stride, int64_t left, double (&into)[kAhead]) {
  const auto* at = static_cast<const scalar_t*>(data);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    into[i] = i * kMembers < left ? double(widen(*at)) : 0;
    at += stride;
  }
}

// The dtype is the same for all threads of a block. offset: in elements.
__device__ void load_any(const void* data, Dtype dtype, int64_t offset, int64_t stride, int64_t left,
                         double (&into)[kAhead]) {
  switch (dtype) {
#define HOOKSTATS_CASE(name, type, aten) \
  case Dtype::name:                      \
    return load_ahead<type>(static_cast<const type*>(data) + offset, stride, left, into);
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
  }
}

// Of the place that a thread is one of kMembers of.
__device__ void sum_place(const JointTerm& term, int64_t at, int member, double (&sums)[kJointSums]) {
  const int64_t by = kMembers * term.weight_stride, gradient_by = kMembers * term.gradient_stride;
  for (unsigned run = 0; run < term.runs; ++run) {
    int64_t in_weight, in_gradient;
    term.find_run(run, at, in_weight, in_gradient);
    in_weight += member * term.weight_stride;
    in_gradient += member * term.gradient_stride;
    for (int64_t left = term.run - member; left > 0; left -= kAhead * kMembers) {
      double w[kAhead], g[kAhead] = {};
      load_any(term.weight, term.weight_dtype, in_weight, by, left, w);
      if (term.gradient) load_any(term.gradient, term.gradient_dtype, in_gradient, gradient_by, left, g);
      in_weight += kAhead * by;
      in_gradient += kAhead * gradient_by;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) add_joint(w[i], g[i], term.offset, sums);
    }
  }
}

// A row of the grid for each term.
__global__ void __launch_bounds__(kJointThreads, 3) joint_kernel(const __grid_constant__ JointTable table) {
  HOOKSTATS_SHARED(double, shared, kJointSums* kJointThreads);
  const JointTerm& term = table.of[blockIdx.y];
  const int64_t first = int64_t(blockIdx.x) * kTogether;
  if (first >= term.count) return;
  // Neighbouring threads read what lies side by side: several places, or elements of one.
  const bool places_first = term.weight_step < term.weight_stride || term.run == 1;
  const int thread = threadIdx.x;
  const int place = places_first ? thread % kTogether : thread / kMembers;
  const int member = places_first ? thread / kTogether : thread % kMembers;
  double sums[kJointSums] = {};
  if (first + place < term.count) {
    const int64_t at = term.places[first + place] - term.begin;
    if (0 <= at && at < term.size) sum_place(term, at, member, sums);
  }
  double* own = shared + place * kMembers + member;
#pragma unroll
  for (int i = 0; i < kJointSums; ++i) own[i * kJointThreads] = sums[i];
  for (int half = kMembers / 2; half > 0; half /= 2) {
    __syncthreads();
    if (member < half) {
#pragma unroll
      for (int i = 0; i < kJointSums; ++i) own[i * kJointThreads] += own[i * kJointThreads + half];
    }
  }
  if (member == 0 && first + place < term.count) {
#pragma unroll
    for (int i = 0; i < kJointSums; ++i) term.out[(first + place) * kJointSums + i] = own[i * kJointThreads];
  }
}

}  // namespace

void joint_sums(const std::vector<JointTerm>& terms, const Stream& stream) {
  check(cudaSetDevice(stream.device));
  for (size_t first = 0; first < terms.size(); first += kJointTerms) {
    const size_t count = terms.size() - first < size_t(kJointTerms) ? terms.size() - first : size_t(kJointTerms);
    JointTable table{};
    int64_t most = 0;
    for (size_t i = 0; i < count; ++i) {
      table.of[i] = terms[first + i];
      most = most < table.of[i].count ? table.of[i].count : most;
    }
    const dim3 grid(unsigned((most + kTogether - 1) / kTogether), unsigned(count));
    launch<joint_kernel>(grid, kJointThreads, 0, stream.handle, table);
  }
}

}  // namespace hookstats::cuda
