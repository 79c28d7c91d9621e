// Joint sums of tensors and their gradients on the CPU: a tile of each is widened, then multiplied.

#include <algorithm>
#include <cstring>

#include "../kernels.h"
#include "versions.h"

namespace hookstats::cpu {
namespace {

constexpr int kPlaces = 16;            // of a task: what lies in one page of memory is read at one time
constexpr int kTogether = 4;           // places that may lie side by side: a strip
constexpr int kTile = 256;             // elements of a place, or of a strip
constexpr int kLanes = 2 * kTogether;  // sums over every kLanes-th element of a tile

struct Lanes {
  alignas(64) double of[kJointSums][kLanes] = {};
};

constexpr int64_t kSerialElements = 1 << 15;

// Of each of `rows` rows an element, or kTogether side by side.
template <class scalar_t>
inline __attribute__((always_inline)) void load_in(const scalar_t* data, int64_t stride, int rows, bool together,
                                                   double* into) {
  if (together) {
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < kTogether; ++j) into[i * kTogether + j] = widen(data[i * stride + j]);
    }
  } else if (stride == 1) {
    for (int i = 0; i < rows; ++i) into[i] = widen(data[i]);
  } else {
    for (int i = 0; i < rows; ++i) into[i] = widen(data[i * stride]);
  }
}

// count: a multiple of kLanes.
template <int kBytes>
inline __attribute__((always_inline)) void add_in(const double* w, const double* g, double offset, int count,
                                                  Lanes& lanes) {
  typedef double Vector __attribute__((vector_size(kBytes)));
  constexpr int kSize = kBytes / sizeof(double), kVectors = kLanes / kSize;
  Vector sums[kVectors][kJointSums];
  for (int v = 0; v < kVectors; ++v) {
    for (int k = 0; k < kJointSums; ++k) std::memcpy(&sums[v][k], lanes.of[k] + v * kSize, kBytes);
  }
  for (int i = 0; i < count; i += kLanes) {
    for (int v = 0; v < kVectors; ++v) {
      Vector one, other;
      std::memcpy(&one, w + i + v * kSize, kBytes);
      std::memcpy(&other, g + i + v * kSize, kBytes);
      const Vector product = (one + offset) * other;  // as add_joint
      sums[v][0] += product;
      sums[v][1] += product * product;
      sums[v][2] += one * one;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    for (int k = 0; k < kJointSums; ++k) std::memcpy(lanes.of[k] + v * kSize, &sums[v][k], kBytes);
  }
}

#define HOOKSTATS_VERSION(target, bytes, type)                                                \
  target void load(const type* data, int64_t stride, int rows, bool together, double* into) { \
    load_in(data, stride, rows, together, into);                                              \
  }
#define HOOKSTATS_VERSIONS_OF(name, type, aten) HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, type)
HOOKSTATS_DTYPES(HOOKSTATS_VERSIONS_OF)
#undef HOOKSTATS_VERSIONS_OF
#undef HOOKSTATS_VERSION
#define HOOKSTATS_VERSION(target, bytes, type)                                          \
  target void add(const type* w, const type* g, type offset, int count, Lanes& lanes) { \
    add_in<bytes>(w, g, offset, count, lanes);                                          \
  }
HOOKSTATS_VERSIONS(HOOKSTATS_VERSION, double)
#undef HOOKSTATS_VERSION

int round_up(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// Whether places from a first one on lie side by side in both tensors, and their elements do not.
bool is_strip(const JointTerm& term, int64_t first, int64_t end) {
  if (end - first < kTogether || term.weight_step != 1 || term.gradient_step != 1 || term.run == 1) return false;
  for (int i = 1; i < kTogether; ++i) {
    if (term.places[first + i] != term.places[first] + i) return false;
  }
  const int64_t at = term.places[first] - term.begin;
  return at >= 0 && at + kTogether <= term.size;
}

// Some places of a term, strips together.
void sum_places(const JointTerm& term, int64_t first, int64_t end) {
  struct Part {
    int64_t place;
    int together;
    Lanes lanes;
  };
  alignas(64) double w[kTile], g[kTile];
  Part parts[kPlaces];
  int count = 0;
  for (int64_t i = first; i < end; i += parts[count++].together) {
    parts[count].place = i;
    parts[count].together = is_strip(term, i, end) ? kTogether : 1;
  }
  // With zeros behind, or where there is no tensor.
  const auto load_tile = [](const void* data, Dtype dtype, int64_t at, int64_t stride, int rows, int together,
                            double* into) {
    std::fill(into + (data ? rows * together : 0), into + round_up(rows * together), 0.);
    if (!data) return;
    with_dtype(dtype, [&](auto value) {
      load(static_cast<const decltype(value)*>(data) + at, stride, rows, together > 1, into);
    });
  };
  const int64_t by = term.weight_stride, gradient_by = term.gradient_stride;
  const int most = count < end - first ? kTile / kTogether : kTile;
  for (unsigned run = 0; run < term.runs; ++run) {
    for (int64_t begin = 0; begin < term.run; begin += most) {
      const int rows = int(std::min<int64_t>(most, term.run - begin));
      for (int i = 0; i < count; ++i) {
        const auto [place, together] = std::pair(parts[i].place, parts[i].together);
        const int64_t at = term.places[place] - term.begin;
        if (at < 0 || at >= term.size) continue;
        int64_t in_weight, in_gradient;
        term.find_run(run, at, in_weight, in_gradient);
        load_tile(term.weight, term.weight_dtype, in_weight + begin * by, by, rows, together, w);
        load_tile(term.gradient, term.gradient_dtype, in_gradient + begin * gradient_by, gradient_by, rows, together,
                  g);
        add(w, g, term.offset, round_up(rows * together), parts[i].lanes);
      }
    }
  }
  for (int i = 0; i < count; ++i) {
    for (int j = 0; j < kLanes; ++j) {
      double* sums = term.out + (parts[i].place + j % parts[i].together) * kJointSums;
      for (int k = 0; k < kJointSums; ++k) sums[k] += parts[i].lanes.of[k][j];
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
    for (int64_t i = 0; i < term.count; i += kPlaces) {
      tasks.push_back({&term, i, std::min(i + kPlaces, term.count)});
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
