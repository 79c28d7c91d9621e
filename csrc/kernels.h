// The C boundary between tensors and kernels: what a kernel is given, the dtypes, one signature per operation.
// Kernels see a layout, a state, scratch and a stream; nothing of torch.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include "bins.h"
#include "layout.h"
#include "softmax.h"
#include "stats.h"

namespace hookstats {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Float8e4m3fn {
  uint8_t bits;
};
struct Float8e5m2 {
  uint8_t bits;
};

// X(name, type in the kernels, name in ATen)
#define HOOKSTATS_DTYPES(X)                     \
  X(float32, float, Float)                      \
  X(float16, Float16, Half)                     \
  X(bfloat16, BFloat16, BFloat16)               \
  X(float64, double, Double)                    \
  X(float8_e4m3fn, Float8e4m3fn, Float8_e4m3fn) \
  X(float8_e5m2, Float8e5m2, Float8_e5m2)

enum class Dtype : int {
#define HOOKSTATS_ENUM(name, type, aten) name,
  HOOKSTATS_DTYPES(HOOKSTATS_ENUM)
#undef HOOKSTATS_ENUM
};

HOOKSTATS_HD inline float widen(float x) { return x; }
HOOKSTATS_HD inline double widen(double x) { return x; }

HOOKSTATS_HD inline float widen(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Exponent and mantissa are moved to float32's places; the multiplication by 2^112 corrects the exponent's bias, for
// subnormals too. It needs float32 subnormals: never build with flush-to-zero.
HOOKSTATS_HD inline float widen(Float16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float value;
  memcpy(&value, &magnitude, sizeof value);
  value *= 5.192296858534828e33f;
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  bits |= uint32_t(x.bits & 0x8000) << 16;
  if ((x.bits & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The upper half of a float16.
HOOKSTATS_HD inline float widen(Float8e5m2 x) { return widen(Float16{uint16_t(x.bits << 8)}); }

// As float16, with 4 bits of exponent: times 2^120. No infinity; NaN is all ones.
HOOKSTATS_HD inline float widen(Float8e4m3fn x) {
  uint32_t bits = uint32_t(x.bits & 0x7f) << 20;
  float value;
  memcpy(&value, &bits, sizeof value);
  value *= 1.329227995784916e36f;
  memcpy(&bits, &value, sizeof bits);
  bits |= uint32_t(x.bits & 0x80) << 24;
  if ((x.bits & 0x7f) == 0x7f) bits |= 0x7fc00000;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class scalar_t>
using acc_of = decltype(widen(scalar_t{}));

// Calls f(a value of the type in the kernels).
template <class F>
auto with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
#define HOOKSTATS_CASE(name, type, aten) \
  case Dtype::name:                      \
    return f(type{});
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
  }
  __builtin_unreachable();
}

// Exponents per tensor, octaves per channel (bins.h), or linear bins, either way.
enum class HistogramKind : int { none, per_tensor, per_channel, linear };

struct Input {
  const void* data;
  Dtype dtype;
  Layout layout;
  Layout matrix = {};  // where blocks are counted: the last dimension as channels, the others in the tensor's order
};

// A tensor whose sample (sample.h) is taken: `values` and `differences` are of acc_of its dtype. Null differences:
// none.
struct Sampled {
  const void* data;
  void* values;
  void* differences;
  int64_t count;  // of the tensor's elements, which lie side by side
  Dtype dtype;
};

// A tensor and its gradient, read together at some places along one dimension: a term of an identity. Of each place
// there are kJointSums numbers, sums over its elements: of w g, of (w g)^2, and of w^2.
constexpr int kJointSums = 3;
struct JointTerm {
  static constexpr int kMaxDims = 4;  // beside that of the places, where they do not merge

  const void *weight, *gradient;  // null gradient: it is 0
  Dtype weight_dtype, gradient_dtype;
  const int64_t* places;  // [count]; those from `begin` on, `size` of them, are here, and the sums of others are 0
  double* out;            // [count, kJointSums]
  int64_t count, begin, size;
  double offset;                       // what is added to w before it is multiplied by g
  int64_t weight_step, gradient_step;  // from one place to the next
  // The elements of a place are `runs` runs of `run`, along its longest dimension. The others are short.
  int64_t run, weight_stride, gradient_stride;
  unsigned runs;
  int ndim;
  unsigned extent[kMaxDims - 1];
  int64_t run_in_weight[kMaxDims - 1], run_in_gradient[kMaxDims - 1];

  // Where a run of the place at `at` begins.
  HOOKSTATS_HD void find_run(unsigned number, int64_t at, int64_t& in_weight, int64_t& in_gradient) const {
    in_weight = at * weight_step;
    in_gradient = at * gradient_step;
    for (int d = 0; d < ndim; ++d) {
      const unsigned i = number % extent[d];
      in_weight += i * run_in_weight[d];
      in_gradient += i * run_in_gradient[d];
      number /= extent[d];
    }
  }
};

HOOKSTATS_HD inline void add_joint(double w, double g, double offset, double* sums) {
  const double product = (w + offset) * g;
  sums[0] += product;
  sums[1] += product * product;
  sums[2] += w * w;
}

// A site's state. `moments` is [kFields, channels], its rows `row_stride` doubles apart.
struct State {
  double* moments;
  int64_t row_stride;
  int64_t channels;
  int64_t* counters;   // [kCounters]
  int64_t* histogram;  // [channels, bins] if by_channel, else [bins]
  HistogramKind kind;
  bool by_channel;
  int bins;
  int block;         // values of a block (bins.h), 16 or 32 along the last dimension, or -16 or -32 along the others,
                     // which then are one; 0: none are counted
  double low, high;  // of linear bins

  HOOKSTATS_HD int64_t all_bins() const { return by_channel ? channels * bins : bins; }
};

// Counters of a site: tensors folded in since it was cleared, and the place of the first of them in the order of
// execution on its device (1, 2, ...; 0: none yet).
enum Counter : int { k_calls, k_first, kCounters };

// The totals of a site are 8-byte words, as a state of one channel has them: the fields, then the counters.
constexpr int kTotalsWords = int(kFields) + int(kCounters);

namespace cpu {

// Calls body(begin, end) on disjoint ranges that cover 0 .. tasks - 1, perhaps on several threads.
using ParallelFor = void (*)(int64_t tasks, const std::function<void(int64_t, int64_t)>& body);

void accumulate(const Input& input, const State& state, ParallelFor parallel_for);
void count_blocks(const Input& input, const State& state);  // where state.block is not 0
void merge(const State& into, const State& from);

// `out` is [states, kTotalsWords]: all channels of each state together.
void totals(const State* states, int64_t count, int64_t* out, ParallelFor parallel_for);

// `out` is [kSoftmaxFields, and 1 for a margin, rows] of acc_of the dtype: see softmax.h.
void softmax_rows(const SoftmaxRows& rows, Dtype dtype, void* out, ParallelFor parallel_for);

void sample(const std::vector<Sampled>& tensors);

void joint_sums(const std::vector<JointTerm>& terms, ParallelFor parallel_for);

}  // namespace cpu

namespace cuda {

// Memory that the parts of a tensor meet in: see scratch.cu.
constexpr int64_t kBlocks = 1056;  // at most, where a channel is in several
constexpr int64_t kScratchDoubles = kBlocks * 64 * kMoments;
constexpr int64_t kScratchCounters = 2 * kBlocks;

// Where a kernel runs, and in which memory.
struct Launch {
  void* stream;
  int device;
  double* partials;            // [kScratchDoubles], or as many as were asked for
  unsigned* arrivals;          // [kScratchCounters], likewise; between launches each is zero
  unsigned long long* clock;   // of the device: counts the sites that have met a tensor
  const int32_t* active;       // on the device; null or non-zero: measure, zero: return at once
  unsigned long long capture;  // as capture_on
  void* launched;              // a CUDA event that is recorded behind the launch; null: none is needed
};

// A stream as scratch.cu is told of it. `stays`: nobody destroys it.
struct Stream {
  void* handle;
  int device;
  bool stays;
};

// These functions throw std::runtime_error with what the CUDA runtime said, and change the thread's current device.

// A launch on a stream, whose scratch no launch of another CUDA graph has, and none on another stream at the same time.
// The first time it makes that; it waits for no other work.
Launch launch_on(const Stream& stream, const int32_t* active, int64_t doubles = kScratchDoubles,
                 int64_t counters = kScratchCounters);

int64_t scratch_bytes(int device);  // that is made so far

// Around what reads, clears, switches on or gives away the memory of monitors on a stream: it comes behind the launches
// on all streams so far and behind all closings before, and later launches and closings come behind it.
void begin_closing(const Stream& stream);
void end_closing(const Stream& stream);

// Loads all kernels, for a driver that loads none while a CUDA graph is captured.
void load_kernels(int device);

// Tensors of one launch at most. Their addresses travel with it, 8 KB whether there are fewer, which takes less time
// than a second launch; few models have more parameters of one dtype.
constexpr int kMany = 1024;

// The plan of one launch over many tensors, whose addresses alone may change from launch to launch.
struct Many {
  Dtype dtype;
  HistogramKind kind;
  bool packed;
  int64_t tensors, blocks = 0;
  std::vector<unsigned char> table = {};  // the caller puts a copy into the device's memory
  std::vector<const void*> sites = {};    // the State.counters of each
  int64_t partials = 0, arrivals = 0;     // of the scratch of its launch
};

// The plan of one launch that takes the totals of many states, of which large ones are cut.
struct TotalsPlan {
  int64_t states, blocks = 0, scratch = 0;
  std::vector<unsigned char> table = {};
};
TotalsPlan plan_totals(const std::vector<State>& states);

// Whether a tensor can be read so; those in packs and those value by value are read by launches of their own.
enum class AmongMany : int { no, in_packs, by_value };

// The number of the capture into a CUDA graph that a stream is in, from 1; 0: none.
unsigned long long capture_on(void* stream);

struct Versions {
  int runtime = 0, driver = 0;  // of CUDA: 12010 is 12.1; a driver that is too old for this runtime may say 0
  int capability = 0;           // of the device: 86 is 8.6
};
Versions versions_of(int device);

// Each starts exactly one kernel.
void accumulate(const Input& input, const State& state, const Launch& launch);
void count_blocks(const Input& input, const State& state, const Launch& launch);  // where state.block is not 0
void accumulate(const Many& many, const void* table, const void* const* data, const Launch& launch);
void merge(const State& into, const State& from, const Launch& launch);

// `table` is a copy of the plan's on the device, `scratch` plan.scratch words there, all zero; `out` as on the CPU.
void totals(const TotalsPlan& plan, const void* table, int64_t* scratch, int64_t* out, const Launch& launch);

// Of at most kMany tensors of one dtype and one way of reading, and states with one kind of histogram. In the launch, a
// tensor whose address is null is left out.
AmongMany among_many(const Input& input, HistogramKind kind, int device);
Many plan_many(const std::vector<Input>& inputs, const std::vector<State>& states, AmongMany how);

constexpr int kSamples = 96;  // tensors of one launch: the table of them travels with it

// One launch for each kSamples tensors, none where all are empty.
void sample(const std::vector<Sampled>& tensors, const Launch& launch);

constexpr int kJointTerms = 128;  // of one launch, with which they travel

// One launch for each kJointTerms terms, each of which has at least one place.
void joint_sums(const std::vector<JointTerm>& terms, const Stream& stream);

// At least one row; `out` as on the CPU.
void softmax_rows(const SoftmaxRows& rows, Dtype dtype, void* out, const Stream& stream);

}  // namespace cuda
}  // namespace hookstats
