// Joint sums of tensors and their gradients on the CPU: a tile of each is widened, then multiplied.

#include <algorithm>

#include "../kernels.h"
#include "versions.h"

namespace hookstats::cpu {
namespace {

constexpr int kTile = 128;    // elements of a place: short, so that places which share cache lines find them again
constexpr int kTogether = 4;  // places of a task
constexpr int64_t kSerialElements = 1 << 15;

template <class scalar_t>
inline __attribute__((always_inline)) void load_in(const scalar_t* data, int64_t stride, int count, double* into) {
  if (stride == 1) {
    for (int i = 0; i < count; ++i) into[i] = widen(data[i]);
  } else {
    for (int i = 0; i < count; ++i) into[i] = widen(data[i * stride]);
  }
}

inline __attribute__((always_inline)) void add_in(const double* w, const double* g, double offset, int count,
                                                  double* sums) {
  double all[kJointSums] = {};
#pragma omp simd reduction(+ : all)
  for (int i = 0; i < count; ++i) add_joint(w[i], g[i], offset, all);
  for (int i = 0; i < kJointSums; ++i) sums[i] += all[i];
}

#define HOOKSTATS_VERSION(target, bytes, type) \
  target void load(const type* data, int64_t stride, int count, double* into) { load_in(data, stride, count, into); }
#define HOOKSTATS_VERSIONS_OF(name, type, aten) HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, type)
HOOKSTATS_DTYPES(HOOKSTATS_VERSIONS_OF)
#undef HOOKSTATS_VERSIONS_OF
#undef HOOKSTATS_VERSION
#define HOOKSTATS_VERSION(target, bytes, type)                                        \
  target void add(const type* w, const type* g, type offset, int count, type* sums) { \
    add_in(w, g, offset, count, sums);                                                \
  }
HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, double)
#undef HOOKSTATS_VERSION

// A tile of a tensor, which may not be there.
void load_some(const void* data, Dtype dtype, int64_t first, int64_t stride, int count, double* into) {
  if (!data) {
    std::fill_n(into, count, 0.);
    return;
  }
  with_dtype(dtype, [&](auto value) { load(static_cast<const decltype(value)*>(data) + first, stride, count, into); });
}

// Some places of a term.
void sum_places(const JointTerm& term, int64_t first, int64_t end) {
  alignas(64) double w[kTile], g[kTile];
  const int64_t by = term.weight_stride, gradient_by = term.gradient_stride;
  for (unsigned run = 0; run < term.runs; ++run) {
    for (int64_t begin = 0; begin < term.run; begin += kTile) {
      const int count = int(std::min<int64_t>(kTile, term.run - begin));
      for (int64_t i = first; i < end; ++i) {
        const int64_t at = term.places[i] - term.begin;
        if (at < 0 || at >= term.size) continue;
        int64_t in_weight, in_gradient;
        term.find_run(run, at, in_weight, in_gradient);
        load_some(term.weight, term.weight_dtype, in_weight + begin * by, by, count, w);
        load_some(term.gradient, term.gradient_dtype, in_gradient + begin * gradient_by, gradient_by, count, g);
        add(w, g, term.offset, count, term.out + i * kJointSums);
      }
    }
  }
}

struct Task {
  const JointTerm* term;
  int64_t first, end;
};

}  // namespace

void joint_sums(const std::vector<JointTerm>& terms, ParallelFor parallel_for) {
  std::vector<Task> tasks;
  int64_t elements = 0;
  for (const JointTerm& term : terms) {
    elements += term.count * term.runs * term.run;
    for (int64_t i = 0; i < term.count; i += kTogether) {
      tasks.push_back({&term, i, std::min(i + kTogether, term.count)});
    }
  }
  const auto some = [&](int64_t begin, int64_t end) {
    const KeepSubnormals keep;
    for (int64_t i = begin; i < end; ++i) {
      const auto& [term, first, last] = tasks[i];
      sum_places(*term, first, last);
    }
  };
  const int64_t count = tasks.size();
  elements < kSerialElements ? some(0, count) : parallel_for(count, some);
}

}  // namespace hookstats::cpu
