// One launch takes the samples of many tensors of any dtypes.

#include "../sample.h"
#include "device.h"

namespace hookstats::cuda {
namespace {

constexpr int kSampleThreads = 256;
constexpr int kSampleParts = 4;  // blocks of a tensor

struct SampleTable {
  Sampled of[kSamples];
};

template <class scalar_t>
__device__ void sample_as(const Sampled& tensor, int first) {
  const auto* data = static_cast<const scalar_t*>(tensor.data);
  auto* values = static_cast<acc_of<scalar_t>*>(tensor.values);
  auto* differences = static_cast<acc_of<scalar_t>*>(tensor.differences);
  const int64_t size = sample_size(tensor.count);
  for (int64_t i = first; i < size; i += kSampleParts * kSampleThreads) {
    take_sample(data[sample_place(tensor.count, i)], i, values, differences);
  }
}

__global__ void __launch_bounds__(kSampleThreads, 4)
    sample_kernel(const __grid_constant__ SampleTable table, const int32_t* active) {
  if (active && *static_cast<const volatile int32_t*>(active) == 0) return;
  const Sampled& tensor = table.of[blockIdx.x];
  const int first = int(blockIdx.y * kSampleThreads + threadIdx.x);
  switch (tensor.dtype) {
#define HOOKSTATS_CASE(name, type, aten) \
  case Dtype::name:                      \
    return sample_as<type>(tensor, first);
    HOOKSTATS_DTYPES(HOOKSTATS_CASE)
#undef HOOKSTATS_CASE
  }
}

}  // namespace

void sample(const std::vector<Sampled>& tensors, const Launch& to) {
  launch_in_turn(to, nullptr, 0, [&] {
    for (size_t first = 0; first < tensors.size(); first += kSamples) {
      const size_t count = tensors.size() - first < size_t(kSamples) ? tensors.size() - first : size_t(kSamples);
      SampleTable table{};
      for (size_t i = 0; i < count; ++i) table.of[i] = tensors[first + i];
      launch<sample_kernel>(dim3(unsigned(count), kSampleParts), kSampleThreads, 0, to.stream, table, to.active);
    }
  });
}

}  // namespace hookstats::cuda
