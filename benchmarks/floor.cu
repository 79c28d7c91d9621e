// The floor under every figure: reads a buffer once, and does nothing with it.
#include <cstdint>

namespace {

constexpr int kThreads = 256, kInFlight = 4;

__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, int64_t count, unsigned* out) {
  unsigned all = 0;
  const int64_t step = int64_t(gridDim.x) * kThreads * kInFlight;
  for (int64_t i = int64_t(blockIdx.x) * kThreads * kInFlight + threadIdx.x; i < count; i += step) {
    uint4 x[kInFlight] = {};
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j * kThreads < count) x[j] = data[i + j * kThreads];
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) all ^= x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  if (all == 0x9e3779b9) *out = all;  // or the loads would be left out
}

}  // namespace

// `bytes` is a multiple of 16. Returns a cudaError_t.
extern "C" int read_floor(const void* data, int64_t bytes, void* out, void* stream) {
  const int64_t count = bytes / 16, blocks = (count + kThreads * kInFlight - 1) / (kThreads * kInFlight);
  read_kernel<<<unsigned(blocks < 1056 ? blocks : 1056), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), count, static_cast<unsigned*>(out));
  return cudaGetLastError();
}
