// One launch takes the checksums of many tensors of any dtypes.

#include "fold.h"
#include "plan.h"

namespace hookstats::cuda {
namespace {

constexpr int kWordsInFlight = 8;                // words of a thread
constexpr int64_t kBlockWords = 128 * kThreads;  // words of a block, at most
static_assert(kBlockWords % (kWordsInFlight * kThreads) == 0);

struct ChecksumTask {
  Words words;
  unsigned first_block;
  bool whole;  // its words can be read as they lie
};

// The table: the tasks, and behind them the task of each block. Blocks add up in any order: the sum is modulo 2^64.
__global__ void __launch_bounds__(kThreads, 4)
    checksum_kernel(const ChecksumTask* tasks, const unsigned* task_of, unsigned long long* out) {
  HOOKSTATS_SHARED(uint64_t, sums, kThreads);
  const unsigned number = task_of[blockIdx.x];
  const ChecksumTask& task = tasks[number];
  const int thread = threadIdx.x;
  const int64_t first = (blockIdx.x - task.first_block) * kBlockWords, count = task.words.count();
  const int64_t last = first + kBlockWords < count ? first + kBlockWords : count;
  int64_t i = first + thread;
  uint64_t sum = 0;
  if (task.whole) {
    const auto* words = static_cast<const uint64_t*>(task.words.data);
    const int64_t filled = task.words.bytes() / 8 < last ? task.words.bytes() / 8 : last;
    for (; i + (kWordsInFlight - 1) * kThreads < filled; i += kWordsInFlight * kThreads) {
      uint64_t bits[kWordsInFlight];
#pragma unroll
      for (int k = 0; k < kWordsInFlight; ++k) bits[k] = load_constant(words + i + k * kThreads);
      const uint64_t place = place_of(i);
#pragma unroll
      for (int k = 0; k < kWordsInFlight; ++k) sum += mixed(bits[k] + (place + k * kThreads * kPlaceStep));
    }
    for (; i < filled; i += kThreads) sum += mixed(load_constant(words + i) + place_of(i));
  }
  for (; i < last; i += kThreads) sum += mixed(task.words.gathered(i) + place_of(i));
  sums[thread] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread == 0) atomicAdd(out + number, static_cast<unsigned long long>(sums[0]));
}

}  // namespace

Checksums plan_checksums(const std::vector<Words>& tensors) {
  Checksums plan{int64_t(tensors.size())};
  std::vector<ChecksumTask> tasks;
  std::vector<unsigned> task_of_block;
  for (const Words& words : tensors) {
    const bool whole = words.are_contiguous() && is_aligned(words.data, sizeof(uint64_t));
    const auto number = unsigned(tasks.size());
    tasks.push_back({words, unsigned(task_of_block.size()), whole});
    task_of_block.insert(task_of_block.end(), size_t(divide_up(words.count(), kBlockWords)), number);
  }
  plan.blocks = int64_t(task_of_block.size());
  const auto append = [&](const auto& items) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(items.data());
    plan.table.insert(plan.table.end(), bytes, bytes + items.size() * sizeof(items[0]));
  };
  append(tasks);
  append(task_of_block);
  return plan;
}

const char* checksums(const Checksums& plan, const void* table, uint64_t* out, void* stream, int device) {
  if (const auto error = cudaSetDevice(device)) return message(error);
  const auto* tasks = static_cast<const ChecksumTask*>(table);
  const auto* task_of = reinterpret_cast<const unsigned*>(tasks + plan.tensors);
  return message(launch(checksum_kernel, dim3(unsigned(plan.blocks)), dim3(kThreads), 0,
                        static_cast<cudaStream_t>(stream), tasks, task_of, reinterpret_cast<unsigned long long*>(out)));
}

const char* load_checksum() { return message(load_kernel(checksum_kernel)); }

}  // namespace hookstats::cuda
