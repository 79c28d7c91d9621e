// The kernels as C functions, for hookstats/portable, which is Python and measures beside a torch that there is no glue
// for. Structures are those of kernels.h; portable/library.py has them a second time and compares their sizes.

#include <array>
#include <cstring>
#include <mutex>
#include <string>

#include "../kernels.h"
#include "../sample.h"

namespace hookstats {
namespace {

// A state is written by one thread at a time.
std::array<std::mutex, 64> locks;

std::mutex& lock_of(const State& state) {
  return locks[reinterpret_cast<uintptr_t>(state.counters) / sizeof(int64_t) % locks.size()];
}

class NoKernel {
 public:
  NoKernel() {
    for (std::mutex& lock : locks) lock.lock();
  }
  NoKernel(const NoKernel&) = delete;
  NoKernel& operator=(const NoKernel&) = delete;
  ~NoKernel() {
    for (std::mutex& lock : locks) lock.unlock();
  }
};

// On the thread that calls: torch's own are out of reach here.
void in_turn(int64_t tasks, const std::function<void(int64_t, int64_t)>& body) { body(0, tasks); }

std::string quoted_list(const char* const* names, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += (i ? ", \"" : "\"") + std::string(names[i]) + '"';
  return "[" + all + "]";
}

std::string number(const char* name, int64_t value) {
  return ", \"" + std::string(name) + "\": " + std::to_string(value);
}

std::string description() {
#define HOOKSTATS_NAME(name) #name,
  constexpr const char* fields[] = {HOOKSTATS_FIELDS(HOOKSTATS_NAME)};
#undef HOOKSTATS_NAME
#define HOOKSTATS_NAME(name, type, aten) #name,
  constexpr const char* dtypes[] = {HOOKSTATS_DTYPES(HOOKSTATS_NAME)};
#undef HOOKSTATS_NAME
  std::string all = "{\"FIELDS\": " + quoted_list(fields, std::size(fields));
  all += ", \"DTYPES\": " + quoted_list(dtypes, std::size(dtypes));
  all += number("COUNTERS", kCounters) + number("EXPONENT_BINS", kExponentBins) + number("OCTAVE_BINS", kOctaveBins);
  all += number("BLOCK_BINS", kBlockBins) + number("DISTANCE_BINS", kDistanceBins);
  all += number("FIRST_OCTAVE", kFirstOctave) + number("SOFTMAX_FIELDS", kSoftmaxFields);
  all += number("MOST_KEPT", kMostKept) + number("SAMPLE_SIZE", kSampleSize) + number("MOST_DIMS", Layout::kMaxDims);
  all += ", \"sizes\": {\"Layout\": " + std::to_string(sizeof(Layout)) + number("Input", sizeof(Input));
  all += number("State", sizeof(State)) + number("Sampled", sizeof(Sampled)) + number("Words", sizeof(Words));
  all += number("SoftmaxRows", sizeof(SoftmaxRows)) + number("Launch", sizeof(cuda::Launch));
  all += number("Stream", sizeof(cuda::Stream));
  return all + number("Versions", sizeof(cuda::Versions)) + "}}";
}

}  // namespace

extern "C" {

// Constants, names, and the sizes of structures: JSON.
const char* hookstats_describe() {
  static const std::string all = description();
  return all.c_str();
}

// Of n dimensions beside the channel, sizes and strides, of which the first `of_rows` are those of listed rows; or, in
// the tensor's order, as they are. Whether a layout has room for them.
bool hookstats_lay_out(Layout* layout, const int64_t* sizes_and_strides, int n, int of_rows, bool in_order) {
  std::vector<Layout::Dim> dims(n);
  for (int d = 0; d < n; ++d) dims[d] = {sizes_and_strides[2 * d], sizes_and_strides[2 * d + 1]};
  return in_order ? layout->add_dims(dims.data(), n) : layout->set_dims(dims.data(), n, of_rows);
}

void hookstats_accumulate(const void* data, const Input* like, const State* state) {
  Input input = *like;
  input.data = data;
  const std::lock_guard<std::mutex> lock(lock_of(*state));
  cpu::accumulate(input, *state, in_turn);
  if (state->block) cpu::count_blocks(input, *state);
}

void hookstats_merge(const State* into, const State* from) {
  const std::lock_guard<std::mutex> lock(lock_of(*into));
  cpu::merge(*into, *from);
}

// Of each block of memory a copy, where there is a place for one, and then zeros, if wanted. No kernel comes between,
// nor between these and the totals of states, which come first.
void hookstats_take(const State* states, int64_t n, int64_t* totals, int64_t blocks, void* const* from, void* const* to,
                    const int64_t* bytes, bool clear) {
  const NoKernel none;
  if (n) cpu::totals(states, n, totals, in_turn);
  for (int64_t i = 0; i < blocks; ++i) {
    if (to) memcpy(to[i], from[i], bytes[i]);
    if (clear) memset(from[i], 0, bytes[i]);
  }
}

void hookstats_checksums(const Words* tensors, int64_t n, uint64_t* out) {
  cpu::checksums({tensors, tensors + n}, out, in_turn);
}

void hookstats_softmax_rows(const SoftmaxRows* rows, int dtype, void* out) {
  cpu::softmax_rows(*rows, Dtype(dtype), out, in_turn);
}

void hookstats_sample(const Sampled* tensors, int64_t n) { cpu::sample({tensors, tensors + n}); }

}  // extern "C"

}  // namespace hookstats
