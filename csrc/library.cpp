// The operators as one unit, hookstats/_ops.so, which serves every torch from 2.11 on: nothing of torch is used here
// but its stable ABI. At the end the list of them, and what Python is told.

#include "ops.cpp"

#include "batch.cpp"
#include "copies.cpp"
#include "devices.cpp"
#include "inputs.cpp"
#include "joint.cpp"
#include "samples.cpp"
#include "softmax_rows.cpp"
#include "totals.cpp"

#if defined(HOOKSTATS_CUDA_ON_CPU)
#define HOOKSTATS_NAMESPACE hookstats_cuda_on_cpu
#else
#define HOOKSTATS_NAMESPACE hookstats
#endif
// The macros of torch paste the namespace into names before it is expanded.
#define HOOKSTATS_FRAGMENT(ns, m) STABLE_TORCH_LIBRARY_FRAGMENT(ns, m)
#define HOOKSTATS_IMPL(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)

namespace hookstats {
namespace {

std::string describe();

struct Operator {
  const char* schema;
  void (*run)(StableIValue*, uint64_t, uint64_t);

  std::string name() const { return {schema, strchr(schema, '(')}; }
};

const Operator kOperators[] = {
    {"sample(Tensor[] tensors, Tensor(a!)[] values, Tensor? active, Tensor(b!)[] differences) -> ()",
     TORCH_BOX(&sample)},
    {"softmax_rows(Tensor logits, int top_k=0) -> Tensor", TORCH_BOX(&softmax_rows)},
    {"joint_sums(Tensor[] weights, Tensor?[] gradients, Tensor terms, Tensor places) -> Tensor",
     TORCH_BOX(&joint_sums)},
    {"clear(Tensor(a!)[] blocks) -> ()", TORCH_BOX(&clear)},
    // The following are for Python alone, and of no graph. What they change is not theirs to tell.
    {"make_site(Tensor moments, Tensor counters, Tensor? histogram, Tensor? active, int channel_dim, float low, "
     "float high, int block) -> int",
     TORCH_BOX(&make_site)},
    {"fold(Tensor x, int site, Tensor? rows=None, Tensor? kept=None, bool only_look=False, int every=1, "
     "int phase=0) -> bool",
     TORCH_BOX(&fold_op)},
    {"merge(int site, int other) -> ()", TORCH_BOX(&merge_op)},
    {"make_batch(int[] sites) -> int", TORCH_BOX(&make_batch)},
    {"accumulate_batch(int batch, Tensor?[] tensors) -> Tensor", TORCH_BOX(&accumulate_batch)},
    {"batch_tables(int batch) -> Tensor[]", TORCH_BOX(&batch_tables)},
    {"make_totals(Tensor[] moments, Tensor[] counters) -> int", TORCH_BOX(&make_totals)},
    {"totals_table(int totals) -> Tensor", TORCH_BOX(&totals_table)},
    {"take_totals(int totals, Tensor table, Tensor(a!)[] blocks) -> Tensor", TORCH_BOX(&take_totals)},
    {"make_copies() -> int", TORCH_BOX(&make_copies)},
    {"take_copies(int copies, Tensor(a!)[] blocks, bool clear) -> Tensor[]", TORCH_BOX(&take_copies)},
    {"let_go(int number) -> ()", TORCH_BOX(&let_go)},
    {"part(Tensor memory, int offset, int[] shape, bool is_float64) -> Tensor", TORCH_BOX(&part)},
    {"capture_on(int device) -> int", TORCH_BOX(&capture_on_op)},
    {"begin_closing(int device) -> ()", TORCH_BOX(&begin_closing)},
    {"end_closing(int device) -> ()", TORCH_BOX(&end_closing)},
    {"reserve_scratch(int device=-1) -> int", TORCH_BOX(&reserve_scratch_op)},
    {"describe() -> str", TORCH_BOX(&describe)},
};

// Constants and names: JSON.
std::string describe() {
  std::ostringstream all;
  const auto names = [&](const char* name, const auto& of) {
    const char* before = "";
    all << '"' << name << "\": [";
    for (const auto& each : of) all << std::exchange(before, ", ") << '"' << each << '"';
    all << "], ";
  };
  const auto number = [&](const char* name, int64_t value) { all << '"' << name << "\": " << value << ", "; };
  std::vector<std::string> operators;
  for (const Operator& each : kOperators) operators.push_back(each.name());
  all << '{';
#define HOOKSTATS_NAME(name, ...) #name,
  names("OPERATORS", operators);
  names("FIELDS", std::initializer_list<const char*>{HOOKSTATS_FIELDS(HOOKSTATS_NAME)});
  names("DTYPES", std::initializer_list<const char*>{HOOKSTATS_DTYPES(HOOKSTATS_NAME)});
#undef HOOKSTATS_NAME
  number("COUNTERS", kCounters);
  number("EXPONENT_BINS", kExponentBins);
  number("OCTAVE_BINS", kOctaveBins);
  number("BLOCK_BINS", kBlockBins);
  number("DISTANCE_BINS", kDistanceBins);
  number("FIRST_OCTAVE", kFirstOctave);
  number("DIMS_BY_NDIM", kDimsByNdim);
  number("SOFTMAX_FIELDS", kSoftmaxFields);
  number("MOST_KEPT", kMostKept);
#if defined(HOOKSTATS_CUDA)
  all << "\"HAS_CUDA\": true}";
#else
  all << "\"HAS_CUDA\": false}";
#endif
  return all.str();
}

HOOKSTATS_FRAGMENT(HOOKSTATS_NAMESPACE, m) {
  for (const Operator& each : kOperators) m.def(each.schema);
}

HOOKSTATS_IMPL(HOOKSTATS_NAMESPACE, CompositeExplicitAutograd, m) {
  for (const Operator& each : kOperators) m.impl(each.name().c_str(), each.run);
}

}  // namespace
}  // namespace hookstats
