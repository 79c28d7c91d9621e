// The CUDA kernels as C functions: see cpu/interface.cpp. What returns text returns null, or what the CUDA runtime
// said.

#include <algorithm>

#include "../kernels.h"

namespace hookstats {
namespace {

// Copies a plan's table where there is room for it. Returns its size in bytes.
int64_t copied(const std::vector<unsigned char>& table, unsigned char* out, int64_t room) {
  const int64_t bytes = int64_t(table.size());
  if (bytes <= room) std::copy(table.begin(), table.end(), out);
  return bytes;
}

}  // namespace

extern "C" {

unsigned long long hookstats_cuda_capture_on(void* stream) { return cuda::capture_on(stream); }

const char* hookstats_cuda_launch_on(cuda::Launch* launch, const cuda::Stream* stream, const int32_t* active,
                                     bool has_parts) {
  return has_parts ? cuda::launch_on(*launch, *stream, active) : cuda::launch_on(*launch, *stream, active, 0, 0);
}

int64_t hookstats_cuda_scratch_bytes(int device) { return cuda::scratch_bytes(device); }

const char* hookstats_cuda_begin_closing(const cuda::Stream* stream) { return cuda::begin_closing(*stream); }

const char* hookstats_cuda_end_closing(const cuda::Stream* stream) { return cuda::end_closing(*stream); }

const char* hookstats_cuda_load(int dtype, int kind, int device) {
  return cuda::load(Dtype(dtype), HistogramKind(kind), device);
}

const char* hookstats_cuda_ask(cuda::Versions* versions, int device) { return cuda::ask(*versions, device); }

const char* hookstats_cuda_accumulate(const void* data, const Input* like, const State* state,
                                      const cuda::Launch* launch) {
  Input input = *like;
  input.data = data;
  const char* problem = cuda::accumulate(input, *state, *launch);
  return problem || !state->block ? problem : cuda::count_blocks(input, *state, *launch);
}

const char* hookstats_cuda_merge(const State* into, const State* from, const cuda::Launch* launch) {
  return cuda::merge(*into, *from, *launch);
}

// `blocks_and_scratch`: [2].
int64_t hookstats_cuda_plan_totals(const State* states, int64_t n, unsigned char* table, int64_t room,
                                   int64_t* blocks_and_scratch) {
  const auto plan = cuda::plan_totals({states, states + n});
  blocks_and_scratch[0] = plan.blocks;
  blocks_and_scratch[1] = plan.scratch;
  return copied(plan.table, table, room);
}

const char* hookstats_cuda_totals(int64_t states, int64_t blocks, const void* table, int64_t* scratch, int64_t* out,
                                  const cuda::Launch* launch) {
  cuda::TotalsPlan plan{states};
  plan.blocks = blocks;
  return cuda::totals(plan, table, scratch, out, *launch);
}

int64_t hookstats_cuda_plan_checksums(const Words* tensors, int64_t n, unsigned char* table, int64_t room,
                                      int64_t* blocks) {
  const auto plan = cuda::plan_checksums({tensors, tensors + n});
  *blocks = plan.blocks;
  return copied(plan.table, table, room);
}

const char* hookstats_cuda_checksums(int64_t tensors, int64_t blocks, const void* table, uint64_t* out,
                                     const cuda::Launch* launch) {
  cuda::Checksums plan{tensors};
  plan.blocks = blocks;
  return cuda::checksums(plan, table, out, launch->stream, launch->device);
}

const char* hookstats_cuda_softmax_rows(const SoftmaxRows* rows, int dtype, void* out, const cuda::Launch* launch) {
  return cuda::softmax_rows(*rows, Dtype(dtype), out, launch->stream, launch->device);
}

const char* hookstats_cuda_sample(const Sampled* tensors, int64_t n, const cuda::Launch* launch) {
  return cuda::sample({tensors, tensors + n}, *launch);
}

}  // extern "C"

}  // namespace hookstats
