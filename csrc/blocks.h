// Blocks of neighbouring values, for formats that scale each by its largest |x| (bins.h): which of a tensor's are
// counted, and how one is.
// Host and device code; knows nothing of torch.
#pragma once

#include "kernels.h"

namespace hookstats {

constexpr int kSampledBlocks = 1024;  // of a tensor; all of a smaller one

class BlockSample {
 public:
  // block: as State.block. Blocks are numbered along the rows of the matrix or, if it is negative, along its columns.
  HOOKSTATS_HD BlockSample(const Layout& matrix, int block)
      : matrix_(matrix), along_rows_(block < 0), size_(along_rows_ ? -block : block) {
    const int64_t rows = matrix.kept ? *matrix.kept * matrix.row_size() : matrix.count;
    length_ = along_rows_ ? rows : matrix.channels;
    of_line_ = (length_ + size_ - 1) / size_;
    all_ = of_line_ * (along_rows_ ? matrix.channels : rows);
  }

  // Calls add(bin) for the largest of the `turn`-th of the blocks that are counted, and for each of its values, which
  // it reads twice, the second time from the cache.
  template <class scalar_t, class Add>
  HOOKSTATS_HD void count(const scalar_t* data, int turn, const Add& add) const {
    if (turn >= all_) return;
    const int64_t number = all_ > kSampledBlocks ? choose(turn) : turn;
    const int64_t line = number / of_line_, first = number % of_line_ * size_;
    const int n = length_ - first < size_ ? int(length_ - first) : size_;
    const scalar_t* from = data + (along_rows_ ? line : first) * matrix_.channel_stride;
    if (!along_rows_) from += matrix_.offset(line);
    const auto magnitude = [&](int k) {
      return magnitude_of(widen(from[along_rows_ ? matrix_.offset(first + k) : k * matrix_.channel_stride]));
    };
    uint32_t largest = 0;
    for (int k = 0; k < n; ++k) {
      const uint32_t each = magnitude(k);
      largest = each > largest ? each : largest;
    }
    largest >>= 23;
    add(kBlockGroups * kDistanceBins + int(largest));
    if (largest == 255) return;
    // Mixed, so that no group is the same part of each line; each has as many blocks.
    const int group = (turn ^ turn >> 3 ^ turn >> 6 ^ turn >> 9) % kBlockGroups * kDistanceBins;
    for (int k = 0; k < n; ++k) add(group + int(distance_bin(largest, magnitude(k))));
  }

 private:
  // One block of each 1,024th part of all. Where it lies in its part follows the golden ratio, so that what is
  // periodic, such as the first token of each sequence, is not met each time, or never.
  HOOKSTATS_HD int64_t choose(int turn) const {
    const int64_t begin = all_ * turn / kSampledBlocks, end = all_ * (turn + 1) / kSampledBlocks;
    return begin + ((uint32_t(turn) * 2654435769u >> 16) * (end - begin) >> 16);
  }

  const Layout& matrix_;
  bool along_rows_;
  int size_;
  int64_t length_, of_line_, all_;  // values of a line; blocks of a line; of all lines
};

}  // namespace hookstats
