// Copies of blocks of state on their way to the host, and the memory that they lie in.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "stable.h"

namespace hookstats {
namespace {

// The system makes fresh memory page by page, when it is first written, which takes longer than copying. Large pages,
// where there are any, are a few hundred times fewer.
Tensor host_memory(int64_t bytes) {
  Tensor memory = empty({bytes}, ScalarType::Byte, {});
#if defined(__linux__)
  constexpr uintptr_t kLargePage = 2 << 20;
  const auto first = reinterpret_cast<uintptr_t>(memory.mutable_data_ptr());
  const uintptr_t begin = (first + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (first + bytes) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: it may fail
#endif
  return memory;
}

// Of each block the memory of one copy that nobody holds any more.
struct Spares {
  std::mutex mutex;
  std::vector<std::optional<Tensor>> of_block;

  // The spare of a block, in whose place is the other.
  std::optional<Tensor> exchange(size_t block, std::optional<Tensor> other) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (block >= of_block.size()) of_block.resize(block + 1);
    return std::exchange(of_block[block], std::move(other));
  }
};

// Copies of the blocks of a store. Memory that a copy uses is freed when nobody holds it any more.
struct Copies : Held {
  std::shared_ptr<Spares> spares = std::make_shared<Spares>();
};

int64_t size_of(const View& block) { return block.numel() * int64_t(sizeof(int64_t)); }

// Calls body(first byte, bytes) for pieces that stay in the cache between a copy and a clear.
template <class Body>
void for_each_piece(int64_t bytes, const Body& body) {
  constexpr int64_t kPiece = 1 << 15;
  stable::parallel_for(0, (bytes + kPiece - 1) / kPiece, 16, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * kPiece; at < std::min(end * kPiece, bytes); at += kPiece) {
      body(at, std::min(kPiece, bytes - at));
    }
  });
}

Tensor tensor_for(const std::shared_ptr<Spares>& all, const Tensor& block, size_t number) {
  const View view = view_of(block);
  auto memory = all->exchange(number, std::nullopt);
  if (!memory || memory->numel() != size_of(view)) memory = host_memory(size_of(view));
  const auto give_back = [number, memory, of = std::weak_ptr(all)](void*) {
    if (const auto spares = of.lock()) spares->exchange(number, memory);
  };
  return stable::from_blob(memory->mutable_data_ptr(), block.sizes(), block.strides(), block.device(), ScalarType::Long,
                           give_back);
}

int64_t make_copies() { return hold(std::make_unique<Copies>()); }

// Copies of these blocks, int64, all on one device, as they are between two kernels; then (clear) the blocks are zero.
// On a GPU in the order of the current stream.
Tensors take_copies(int64_t number, Tensors blocks, bool clear) {
  Tensors made;
  std::optional<Closing> closing;
  if (!blocks.empty()) closing.emplace(device_of(blocks[0]));
  for (const Tensor& block : blocks) {
    const View view = view_of(block);
    if (view.dtype != ScalarType::Long || !view.is_contiguous()) {
      refuse("take: expected contiguous int64, got ", view.dtype, " with strides ", view.strides);
    }
    made.push_back(view.device.is_cpu() ? tensor_for(held<Copies>(number).spares, block, made.size())
                                        : stable::empty_like(block));
    if (!view.device.is_cpu()) stable::copy_(made.back(), block, /*non_blocking=*/true);
  }
  if (clear) clear_on_gpu(blocks);
  if (closing) closing->end();
  // No operator in here: one that a Python mode sees would wait for the GIL, and who has that may wait for the lock.
  const NoCpuKernel none;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].is_cpu()) continue;
    auto* from = static_cast<char*>(blocks[i].mutable_data_ptr());
    auto* to = static_cast<char*>(made[i].mutable_data_ptr());
    for_each_piece(size_of(view_of(blocks[i])), [&](int64_t at, int64_t bytes) {
      memcpy(to + at, from + at, bytes);
      if (clear) memset(from + at, 0, bytes);
    });
  }
  return made;
}

// Makes blocks of state, all on one device, zero between two kernels.
void clear(Tensors blocks) {
  std::optional<Closing> closing;
  if (!blocks.empty()) closing.emplace(device_of(blocks[0]));
  clear_on_gpu(blocks);
  if (closing) closing->end();
  clear_on_cpu(blocks, NoCpuKernel());
}

}  // namespace

void clear_on_cpu(const Tensors& blocks, const NoCpuKernel&) {
  for (const Tensor& block : blocks) {
    if (!block.is_cpu()) continue;
    auto* words = static_cast<char*>(block.mutable_data_ptr());
    for_each_piece(size_of(view_of(block)), [&](int64_t at, int64_t bytes) { memset(words + at, 0, bytes); });
  }
}

void clear_on_gpu(const Tensors& blocks) {
  for (Tensor block : blocks) {
    if (!block.is_cpu()) stable::zero_(block);
  }
}

}  // namespace hookstats
