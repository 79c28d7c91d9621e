// One launch folds many tensors of one dtype into their states: the parameters of a model, or their gradients.

#include "block.h"

namespace hookstats::cuda {
namespace {

constexpr int64_t kPartBytes = 512 << 10;  // tensors are many: only a large one is worth cutting

struct Task {
  Job job;
  unsigned first_block;
};

// In the kernel's parameters, all of which are copied at each launch.
struct Addresses {
  const void* of[kMany];
};

// The blocks of a task have consecutive numbers.
struct TaskPlace {
  unsigned block, groups;
  __device__ unsigned group() const { return block % groups; }
  __device__ unsigned part() const { return block / groups; }
};

// The table: the tasks, and behind them the task of each block.
template <class scalar_t, int kPack, template <class> class Walker, HistogramKind kind>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<scalar_t, kind, true>)
    many_kernel(const __grid_constant__ Addresses addresses, const Task* tasks, const unsigned* task_of,
                const Launch launch) {
  const unsigned i = task_of[blockIdx.x];
  const auto* data = static_cast<const scalar_t*>(addresses.of[i]);
  if (!data) return;
  // Near at hand: in registers it would crowd out what is read. As words, since shared memory runs no constructor.
  HOOKSTATS_SHARED(uint64_t, words, sizeof(Task) / sizeof(uint64_t));
  static_assert(sizeof(Task) % sizeof(uint64_t) == 0 && alignof(Task) == alignof(uint64_t));
  for (unsigned w = threadIdx.x; w < sizeof(Task) / sizeof(uint64_t); w += kThreads) {
    words[w] = reinterpret_cast<const uint64_t*>(&tasks[i])[w];
  }
  __syncthreads();
  const Task& task = *reinterpret_cast<const Task*>(words);
  const TaskPlace place{blockIdx.x - task.first_block, task.job.groups};
  run_block<scalar_t, kPack, 1, Walker, kind, kUsualFlight>(data, task.job, launch, place);
}

// Threads for each channel of a matrix that is stored channel by channel: as few as still read neighbouring memory
// together, so that a block has enough to read; all of them where channels are long.
int plane_groups(const Layout& layout) {
  if (layout.channels == 1 || layout.count >= 64 * kThreads) return kThreads;
  int groups = 32;  // 8 of a warp's threads read 64 bytes of 16-bit values at once
  while (groups > 8 && layout.count < 64 * groups) groups /= 2;
  return groups;
}

template <class scalar_t>
Access access_among_many(Layout& layout, const void* data, bool may_pack) {
  const Layout before = layout;
  Access how = access<scalar_t>(layout, is_aligned(data, kPackOf<scalar_t> * sizeof(scalar_t)));
  if (how.packed &&
      (!may_pack || !how.aligned || how.rows || layout.ndim > 1)) {  // rare among parameters: value by value
    how.packed = false;
    layout = before;
  }
  return how;
}

template <class scalar_t>
Job job_among_many(const Input& input, const State& state, bool packed) {
  Layout layout = input.layout;
  const Access how = access_among_many<scalar_t>(layout, input.data, packed);
  Job job = job_of(layout, state, how.rows, 1, plane_groups(layout));
  const int64_t values = layout.count * (how.packed ? kPackOf<scalar_t> : 1) * job.geometry.lanes;
  const int64_t parts = divide_up(values * int64_t(sizeof(scalar_t)), kPartBytes);
  cut(job, parts < kMostParts ? parts : kMostParts);
  return job;
}

template <class scalar_t, int kPack, template <class> class Walker>
void launch_many(const Many& many, const void* table, const void* const* data, const Launch& to) {
  Addresses addresses;  // those behind the last are never read
  std::copy(data, data + many.tensors, addresses.of);
  const auto* tasks = static_cast<const Task*>(table);
  const auto* task_of = reinterpret_cast<const unsigned*>(tasks + many.tensors);
  with_kind(many.kind, [&](auto kind) {
    constexpr HistogramKind k = decltype(kind)::value;
    static_assert(!kHasLean<scalar_t, kPack, 1, Walker, k>);
    constexpr int kBytes = Shared<scalar_t, kPack, 1, Walker, k, kUsualFlight>::kBytes;
    constexpr auto kernel = many_kernel<scalar_t, kPack, Walker, k>;
    (void)blocks_at_once<kernel>(kThreads, kBytes, to.device);  // which lets it have them
    launch<kernel>(dim3(unsigned(many.blocks)), kThreads, kBytes, to.stream, addresses, tasks, task_of, to);
  });
}

}  // namespace

AmongMany among_many(const Input& input, HistogramKind kind, int device) {
  if (!is_near(input.layout)) return AmongMany::no;
  const int most = facts_of(device).shared_memory;
  return with_dtype(input.dtype, [&](auto value) {
    using scalar_t = decltype(value);
    Layout layout = input.layout;
    const bool may_pack = packs_fit<scalar_t, 1>(kind, most);
    return access_among_many<scalar_t>(layout, input.data, may_pack).packed ? AmongMany::in_packs : AmongMany::by_value;
  });
}

Many plan_many(const std::vector<Input>& inputs, const std::vector<State>& states, AmongMany how) {
  Many many{inputs[0].dtype, states[0].kind, how == AmongMany::in_packs, int64_t(inputs.size())};
  std::vector<Task> tasks;
  std::vector<unsigned> task_of_block;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Task task{};
    Job& job = task.job;
    with_dtype(many.dtype,
               [&](auto value) { job = job_among_many<decltype(value)>(inputs[i], states[i], many.packed); });
    task.first_block = unsigned(task_of_block.size());
    task_of_block.insert(task_of_block.end(), size_t(job.groups) * job.parts, unsigned(i));
    job.first_partial = many.partials;
    job.first_arrival = many.arrivals;
    many.partials += job.partials();
    many.arrivals += job.arrivals();
    tasks.push_back(task);
    many.sites.push_back(states[i].counters);
  }
  many.blocks = int64_t(task_of_block.size());
  append(many.table, tasks);
  append(many.table, task_of_block);
  return many;
}

void accumulate(const Many& many, const void* table, const void* const* data, const Launch& to) {
  launch_in_turn(to, many.sites.data(), many.sites.size(), [&] {
    with_dtype(many.dtype, [&](auto value) {
      using scalar_t = decltype(value);
      if constexpr (kPackOf<scalar_t> > 1) {
        if (many.packed) return launch_many<scalar_t, kPackOf<scalar_t>, LineWalker>(many, table, data, to);
      }
      launch_many<scalar_t, 1, NearWalker>(many, table, data, to);
    });
  });
}

}  // namespace hookstats::cuda
