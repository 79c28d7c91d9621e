// Blocks of a kernel's threads, run on a CPU.
//
// Every CUDA thread is a fiber. Blocks run one after another; in a block, fibers run one after another from barrier to
// barrier, in index order or, under a seed, both blocks and fibers in shuffled order, of which each lets others go on
// when its copies have come: what then changes was ordered by nothing. It fails on a barrier that not every thread of
// the block reaches, on a write past a shared array, and on a block that takes more shared memory than the GPU has;
// shared memory starts out as garbage, and each array of it is aligned to what it asks for and to no more. An
// asynchronous copy is done when it is waited for, which must be before its block ends, and must be aligned. Another
// access that is not ends the process (tests/conftest.py), and so does what is read or written outside of a tensor
// (tests/guarded.py). It says nothing about speed, or memory ordering between running blocks.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_on_cpu {

// The GPU that is imitated, and what its driver says.
struct Gpu {
  int shared_memory = 227 << 10;
  int capability = 90, driver = 13000, runtime = 13000;
  int multiprocessors = 132;

  auto all() const { return std::tie(shared_memory, capability, driver, runtime, multiprocessors); }
};
inline Gpu gpu;

inline unsigned shuffle_seed = 0;         // 0: in order
inline int64_t launches = 0, blocks = 0;  // so far
inline int dynamic_shared_bytes = 0;
inline std::function<void(uint64_t)> before_block;  // given the number of blocks that have run

// A thread's asynchronous copies, and where groups of them end.
class Copies {
 public:
  void add(void* to, const void* from, size_t bytes) { copies_.push_back({to, from, bytes}); }
  void end_group() { ends_.push_back(copies_.size()); }
  void wait_for_all_but(size_t groups) {
    if (ends_.size() <= groups) return;
    for (const size_t end = ends_[ends_.size() - 1 - groups]; done_ < end; ++done_) {
      const Copy& copy = copies_[done_];
      memcpy(copy.to, copy.from, copy.bytes);
    }
  }
  bool are_done() const { return done_ == copies_.size(); }
  void clear() {
    copies_.clear();
    ends_.clear();
    done_ = 0;
  }

 private:
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  std::vector<Copy> copies_;
  std::vector<size_t> ends_;
  size_t done_ = 0;
};

// A place in what a stack's functions do. One goes from place to place without a call of the system, which swapcontext
// makes each time.
class Context {
 public:
  void begin(char* stack, size_t bytes, void (*function)()) {
    getcontext(&first_);
    first_.uc_stack.ss_sp = stack;
    first_.uc_stack.ss_size = bytes;
    first_.uc_link = nullptr;
    makecontext(&first_, function, 0);
    is_new_ = true;
  }
  // Returns when somebody goes here.
  void go_to(Context& other) {
    if (_setjmp(place_)) return;
    if (other.is_new_) {
      other.is_new_ = false;
      setcontext(&other.first_);
    }
    _longjmp(other.place_, 1);
  }

 private:
  ucontext_t first_;
  jmp_buf place_;
  bool is_new_ = false;
};

struct Fiber {
  static constexpr size_t kStackBytes = 128 << 10;
  Context context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  dim3 index;
  bool finished = true;
  bool pauses;  // it is at no barrier, and goes on before any thread passes the next one
  int barrier_line;
  int64_t barriers;  // reached so far
  size_t shared_arrays;
  Copies copies;

  explicit Fiber(void (*run)()) { context.begin(stack.get(), kStackBytes, run); }
  void start() {
    finished = pauses = false;
    barrier_line = 0;
    barriers = 0;
    shared_arrays = 0;
    copies.clear();
  }
};
inline std::vector<std::unique_ptr<Fiber>> idle;  // those whose threads have ended, for the next blocks

class Block {
 public:
  Block(dim3 block, const std::function<void()>& kernel) : kernel_(kernel) {
    const size_t threads = size_t(block.x) * block.y * block.z;
    while (idle.size() < threads) idle.push_back(std::make_unique<Fiber>(run_threads));
    for (size_t i = 0; i < threads; ++i) {
      fibers_.push_back(std::move(idle.back()));
      idle.pop_back();
      fibers_.back()->index = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y);
    }
  }
  ~Block() {
    for (auto& fiber : fibers_) {
      if (fiber->finished) idle.push_back(std::move(fiber));
    }
  }

  void run(dim3 index, std::mt19937& random) {
    index_ = index;
    arrays_ = 0;
    shared_bytes_ = 0;
    for (auto& fiber : fibers_) fiber->start();
    while (!fibers_[0]->finished) go_on(random);
    end();
  }

  void barrier(int line) {
    current_->barrier_line = line;
    ++current_->barriers;
    current_->context.go_to(scheduler_);
  }

  Copies& copies() { return current_->copies; }
  void wait_for_all_but(size_t groups) {
    current_->copies.wait_for_all_but(groups);
    if (!shuffle_seed) return;
    current_->pauses = true;  // what others copy meanwhile must be elsewhere
    current_->context.go_to(scheduler_);
    current_->pauses = false;
  }

  // The same array for every thread of the block: threads ask in the same order.
  void* shared_array(size_t bytes, size_t alignment) {
    const size_t i = current_->shared_arrays++;
    if (i == arrays_) {  // the first thread
      if (i == shared_.size()) shared_.push_back(std::make_unique<SharedArray>());
      shared_[arrays_++]->begin(bytes, alignment);
      shared_bytes_ += bytes;
      if (shared_bytes_ > size_t(gpu.shared_memory)) {
        problem_ = "cuda_on_cpu: a block takes " + std::to_string(shared_bytes_) + " bytes of shared memory of " +
                   std::to_string(gpu.shared_memory);
      }
    }
    return shared_[i]->first;
  }

  static inline Block* current = nullptr;

 private:
  struct SharedArray {
    static constexpr size_t kGuard = 64;
    std::vector<unsigned char> memory;
    unsigned char *first, *end;
    void begin(size_t bytes, size_t alignment) {
      memory.assign(2 * alignment + bytes + kGuard, 0xA5);
      first = memory.data() + (alignment - reinterpret_cast<uintptr_t>(memory.data())) % (2 * alignment);
      end = first + bytes;
    }
    void check() const {
      const auto broken = [](unsigned char c) { return c != 0xA5; };
      if (std::any_of(end, end + kGuard, broken)) {
        throw std::runtime_error("cuda_on_cpu: a write past the end of a shared array");
      }
    }
  };

  // On to the next barrier, or to the end.
  void go_on(std::mt19937& random) {
    std::vector<size_t> order(fibers_.size());
    std::iota(order.begin(), order.end(), 0);
    while (!order.empty()) {
      if (shuffle_seed) std::shuffle(order.begin(), order.end(), random);
      for (const size_t i : order) resume(*fibers_[i]);
      const auto arrived = [&](size_t i) { return !fibers_[i]->pauses; };
      order.erase(std::remove_if(order.begin(), order.end(), arrived), order.end());
    }
    check_barrier(std::count_if(fibers_.begin(), fibers_.end(), [](const auto& fiber) { return fiber->finished; }));
  }

  void end() {
    for (size_t i = 0; i < arrays_; ++i) shared_[i]->check();
    for (const auto& fiber : fibers_) {
      if (!fiber->copies.are_done()) throw std::runtime_error("cuda_on_cpu: a block ends before its copies have");
    }
    if (!problem_.empty()) throw std::runtime_error(problem_);
  }

  // What a fiber does: the threads of one block after the other.
  static void run_threads() {
    for (;;) {
      Block& block = *current;
      block.kernel_();
      Fiber& fiber = *block.current_;
      fiber.finished = true;
      fiber.context.go_to(block.scheduler_);
    }
  }

  void resume(Fiber& fiber) {
    if (fiber.finished) return;
    current = this;
    current_ = &fiber;
    threadIdx = fiber.index;
    blockIdx = index_;
    scheduler_.go_to(fiber.context);
  }

  void check_barrier(size_t finished) const {
    if (finished == fibers_.size()) return;
    const auto running = [](const auto& fiber) { return !fiber->finished; };
    const Fiber& one = **std::find_if(fibers_.begin(), fibers_.end(), running);
    for (const auto& fiber : fibers_) {
      if (running(fiber) && fiber->barrier_line == one.barrier_line && fiber->barriers == one.barriers) continue;
      throw std::runtime_error("cuda_on_cpu: not every thread of the block reaches the barrier in line " +
                               std::to_string(one.barrier_line) + " (" + std::to_string(finished) + " of " +
                               std::to_string(fibers_.size()) + " have returned)");
    }
  }

  const std::function<void()>& kernel_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::unique_ptr<SharedArray>> shared_;  // of this block the first arrays_, of others before it the rest
  size_t arrays_ = 0, shared_bytes_ = 0;
  std::string problem_;
  dim3 index_;
  Fiber* current_ = nullptr;
  Context scheduler_;
};

inline void run(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || block.x * block.y * block.z > 1024) {
    throw std::runtime_error("cuda_on_cpu: invalid launch configuration");
  }
  ++launches;
  blocks += int64_t(grid.x) * grid.y * grid.z;
  gridDim = grid;
  blockDim = block;
  std::mt19937 random(shuffle_seed);
  std::vector<uint64_t> order(uint64_t(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), 0);
  if (shuffle_seed) std::shuffle(order.begin(), order.end(), random);
  Block one(block, kernel);
  uint64_t begun = 0;
  for (const uint64_t i : order) {
    if (before_block) before_block(begun++);
    one.run(dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y), random);
  }
}

}  // namespace cuda_on_cpu
