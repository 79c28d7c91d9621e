// Copies of blocks of state on their way to the host, and the memory that they lie in.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "ops.h"

namespace hookstats {

struct HostMemory {
  at::DataPtr data;
  size_t bytes;
};

namespace {

// The system makes fresh memory page by page, when it is first written, which takes longer than copying. Large pages,
// where there are any, are a few hundred times fewer.
std::shared_ptr<HostMemory> allocate(size_t bytes) {
  auto memory = std::make_shared<HostMemory>(HostMemory{c10::GetCPUAllocator()->allocate(bytes), bytes});
#if defined(__linux__)
  constexpr uintptr_t kLargePage = 2 << 20;
  const auto first = reinterpret_cast<uintptr_t>(memory->data.get());
  const uintptr_t begin = (first + kLargePage - 1) / kLargePage * kLargePage;
  const uintptr_t end = (first + bytes) / kLargePage * kLargePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: it may fail
#endif
  return memory;
}

// Calls body(first byte, bytes) for pieces that stay in the cache between a copy and a clear.
template <class Body>
void for_each_piece(int64_t bytes, const Body& body) {
  constexpr int64_t kPiece = 1 << 15;
  at::parallel_for(0, (bytes + kPiece - 1) / kPiece, 16, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * kPiece; at < std::min(end * kPiece, bytes); at += kPiece) {
      body(at, std::min(kPiece, bytes - at));
    }
  });
}

}  // namespace

struct Copies::Spares {
  std::mutex mutex;
  std::vector<std::shared_ptr<HostMemory>> of_block;

  // The spare of a block, in whose place is the other.
  std::shared_ptr<HostMemory> exchange(size_t block, std::shared_ptr<HostMemory> other) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (block >= of_block.size()) of_block.resize(block + 1);
    return std::exchange(of_block[block], std::move(other));
  }
};

Copies::Copies() : spares_(std::make_shared<Spares>()) {}

at::Tensor Copies::tensor_for(const at::Tensor& block, size_t number) {
  auto memory = spares_->exchange(number, nullptr);
  if (!memory || memory->bytes != block.nbytes()) memory = allocate(block.nbytes());
  const auto give_back = [number, memory, all = std::weak_ptr(spares_)](void*) {
    if (const auto spares = all.lock()) spares->exchange(number, memory);
  };
  return at::from_blob(memory->data.get(), block.sizes(), give_back, block.options());
}

std::vector<at::Tensor> Copies::take(const std::vector<at::Tensor>& blocks, bool clear) {
  std::vector<at::Tensor> copies;
  std::optional<Closing> closing;
  if (!blocks.empty()) closing.emplace(blocks[0].device());
  for (const at::Tensor& block : blocks) {
    TORCH_CHECK_TYPE(block.scalar_type() == at::kLong && block.is_contiguous(), "take: expected contiguous int64, got ",
                     block.scalar_type(), " with strides ", block.strides());
    copies.push_back(block.is_cpu() ? tensor_for(block, copies.size()) : at::empty_like(block));
    if (!block.is_cpu()) copies.back().copy_(block, /*non_blocking=*/true);
  }
  if (clear) clear_on_gpu(blocks);
  if (closing) closing->end();
  // No operator in here: one that a Python mode sees would wait for the GIL, and who has that may wait for the lock.
  const NoCpuKernel none;
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].is_cpu()) continue;
    auto* from = static_cast<char*>(blocks[i].mutable_data_ptr());
    auto* to = static_cast<char*>(copies[i].mutable_data_ptr());
    for_each_piece(blocks[i].nbytes(), [&](int64_t at, int64_t bytes) {
      memcpy(to + at, from + at, bytes);
      if (clear) memset(from + at, 0, bytes);
    });
  }
  return copies;
}

void Copies::give_up_spares() { spares_ = std::make_shared<Spares>(); }

void clear_on_cpu(const std::vector<at::Tensor>& blocks, const NoCpuKernel&) {
  for (const at::Tensor& block : blocks) {
    if (!block.is_cpu()) continue;
    auto* words = static_cast<char*>(block.mutable_data_ptr());
    for_each_piece(block.nbytes(), [&](int64_t at, int64_t bytes) { memset(words + at, 0, bytes); });
  }
}

void clear_on_gpu(const std::vector<at::Tensor>& blocks) {
  for (const at::Tensor& block : blocks) {
    if (!block.is_cpu()) block.zero_();
  }
}

void clear(const std::vector<at::Tensor>& blocks) {
  std::optional<Closing> closing;
  if (!blocks.empty()) closing.emplace(blocks[0].device());
  clear_on_gpu(blocks);
  if (closing) closing->end();
  clear_on_cpu(blocks, NoCpuKernel());
}

void set_flags(const std::vector<at::Tensor>& flags, int64_t value) {
  const at::AutoDispatchBelowADInplaceOrView no_version;
  for (const at::Tensor& flag : flags) {
    const Closing closing(flag.device());
    flag.fill_(value);
    closing.end();
  }
}

void give_away(const std::vector<at::Tensor>& blocks) {
  if (blocks.empty()) return;
  const auto device = blocks[0].device();
  const Closing closing(device);
  if (device.is_cpu()) return;
  const auto here = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
  for (const at::Tensor& block : blocks) block.record_stream(here);
}

}  // namespace hookstats
