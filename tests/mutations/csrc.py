"""Faults of the kernels: those of csrc/cuda run on the CPU, by tests/cuda_on_cpu."""

from __future__ import annotations

from tests.mutations import Mutant

KERNELS = "tests/kernels/test_kernels.py"
ON_CPU = "-k 'not cuda_on_cpu and ({})'"
ON_GPU = "-k 'cuda_on_cpu and ({})'"

MUTANTS = [
    # What host and device share.
    Mutant(
        "no value is the largest of none",
        "csrc/stats.h",
        "all.max = -kInfinity;",
        "all.max = 0;",
        f"{KERNELS} {ON_CPU.format('hard')}",
    ),
    Mutant(
        "the least of two parts is the larger",
        "csrc/stats.h",
        "all.min = least(all.min, other.min);",
        "all.min = largest(all.min, other.min);",
        f"{KERNELS} {ON_CPU.format('every_layout and rows')}",
    ),
    Mutant(
        "merged parts lack what lies between their means",
        "csrc/stats.h",
        "m2 += other.m2 + delta * (delta * (count * share));",
        "m2 += other.m2;",
        f"{KERNELS} {ON_CPU.format('far_means')}",
    ),
    Mutant(
        "sums about another pivot lack its distance",
        "csrc/stats.h",
        "all.square_sum += shift * (2 * sum + count * shift);",
        "all.square_sum += shift * (2 * sum);",
        f"{KERNELS} {ON_GPU.format('every_layout and rows')}",
    ),
    Mutant(
        "NaN counts as a value",
        "csrc/stats.h",
        "std::fabs(x) < kInfinity",
        "!(std::fabs(x) >= kInfinity)",
        f"{KERNELS} {ON_CPU.format('hard')}",
    ),
    Mutant(
        "sums hold that have cancelled",
        "csrc/stats.h",
        "return finite & (constant | (in_range & pivot_is_near));",
        "return finite;",
        f"{KERNELS} {ON_CPU.format('hard')}",
    ),
    Mutant(
        "octaves are shifted by one bin",
        "csrc/bins.h",
        "(exponent_bin & 255) - 127 - kFirstOctave + 1",
        "(exponent_bin & 255) - 127 - kFirstOctave + 2",
        f"{KERNELS} {ON_GPU.format('every_16_bit or storage_offsets')}",
    ),
    Mutant(
        "linear bins are shifted by one",
        "csrc/bins.h",
        "bin < bins - 2 ? bin + 1 : bins - 2",
        "bin < bins - 2 ? bin : bins - 2",
        f"{KERNELS} {ON_CPU.format('histc or linear_bins')}",
    ),
    Mutant(
        "strides are ignored",
        "csrc/layout.h",
        "at += i % size[d] * stride[d];",
        "at += i % size[d];",
        f"{KERNELS} {ON_CPU.format('gaps or many_dims')}",
    ),
    Mutant(
        "the first rows count, not those that are listed",
        "csrc/layout.h",
        "if (row_dims == 1) i = row_index[i];",
        "if (row_dims == 1) i = i + 0;",
        f"tests/kernels/test_rows.py {ON_CPU.format('every_mask')}",
    ),
    Mutant(
        "a word of the checksum is not mixed to its end",
        "csrc/checksum.h",
        "return x ^ x >> 33;",
        "return x;",
        f"tests/kernels/test_checksums.py {ON_CPU.format('every_dtype')}",
    ),
    Mutant(
        "the checksum of words does not tell their places",
        "csrc/checksum.h",
        "(uint64_t(word) + 1) * kPlaceStep",
        "kPlaceStep",
        "tests/kernels/test_checksums.py -k swapped_elements",
    ),
    Mutant(
        "the first logit's probability is the largest one's",
        "csrc/softmax.h",
        "acc_t(exp(sum_t(first) - sum_t(max)) / sum)",
        "acc_t(1 / sum)",
        f"tests/kernels/test_softmax_rows.py {ON_CPU.format('every_number')}",
    ),
    Mutant(
        "the margin is that of the largest logit",
        "csrc/softmax.h",
        "largest[k - 1] - largest[k]",
        "largest[0] - largest[k]",
        f"tests/kernels/test_softmax_rows.py {ON_CPU.format('every_number')}",
    ),
    Mutant(
        "a row of masked logits is NaN",
        "csrc/softmax.h",
        "out[field * stride] = nothing(finite);",
        "out[field * stride] = nothing(false);",
        f"tests/kernels/test_softmax_rows.py {ON_CPU.format('masked_entries')}",
    ),
    # The CPU's kernels.
    Mutant(
        "lanes sum values, not deviations from the pivot",
        "csrc/cpu/tile.h",
        "      sum[v] += deviation;",
        "      sum[v] += x;",
        f"{KERNELS} {ON_CPU.format('every_layout and rows')}",
    ),
    Mutant(
        "the first half of the lanes is summed twice",
        "csrc/cpu/tile.h",
        "one.merge_about_pivot(from.get(lane + half));",
        "one.merge_about_pivot(from.get(lane));",
        f"{KERNELS} {ON_CPU.format('plane_sizes')}",
    ),
    Mutant(
        "what is left of a row behind whole lanes is lost",
        "csrc/cpu/accumulate.cpp",
        "add({buffer_ + rows * kLanes, gathered_at_, 1, gathered_ % kLanes});",
        ";",
        f"{KERNELS} {ON_CPU.format('plane_sizes')}",
    ),
    Mutant(
        "every channel's plane is the first one's neighbour",
        "csrc/cpu/accumulate.cpp",
        "static_cast<const scalar_t*>(input.data) + c * layout.channel_stride",
        "static_cast<const scalar_t*>(input.data) + c",
        f"{KERNELS} {ON_CPU.format('plane_sizes')}",
    ),
    Mutant(
        "counters of 16 bits overflow",
        "csrc/cpu/histogram.h",
        "if (rows_ + rows > kMostCounts) flush();",
        ";",
        f"{KERNELS} {ON_CPU.format('more_than_16_bits')}",
    ),
    Mutant(
        "subnormals are zeros where the trainer says so",
        "csrc/cpu/versions.h",
        "_mm_setcsr(saved_ & ~0x8040u);",
        ";",
        f"{KERNELS} {ON_CPU.format('flush_to_zero')}",
    ),
    # The GPU's kernels.
    Mutant(
        "arrivals stay as they were counted",
        "csrc/cuda/fold.h",
        "*word = 0;",
        ";",
        "tests/cuda_on_cpu/test_cuda_on_cpu.py -k 'scratch_is_left or does_not_disturb'",
    ),
    Mutant(
        "the second round merges the parts of the first one again",
        "csrc/cuda/block.h",
        "sums.merge(load_part(part(from + i), channels));",
        "sums.merge(load_part(part(i), channels));",
        "tests/cuda_on_cpu/test_cuda_on_cpu.py -k more_parts",
    ),
    Mutant(
        "one group of the ring is used before it has come",
        "csrc/cuda/feed.h",
        "wait_for_all_but<kGroups - 1>();",
        "wait_for_all_but<kGroups>();",
        f"{KERNELS} {ON_GPU.format('tiles_of_the_packed')}",
    ),
    Mutant(
        "bytes before an unaligned pack are not counted among its words",
        "csrc/cuda/feed.h",
        "(before + bytes + kWord - 1) / kWord",
        "(bytes + kWord - 1) / kWord",
        f"tests/kernels/test_unaligned.py {ON_GPU.format('rows_of_any_width or tails')}",
    ),
    Mutant(
        "listed rows are the first ones",
        "csrc/cuda/walk.h",
        "unsigned(load_constant(layout->row_index + row))",
        "unsigned(row)",
        f"tests/kernels/test_rows.py {ON_GPU.format('every_mask')}",
    ),
    Mutant(
        "the masked tile sums what is NaN alone",
        "csrc/cuda/read.h",
        "if (x[i] != x[i]) continue;",
        "if (x[i] == x[i]) continue;",
        f"tests/kernels/test_not_finite.py {ON_GPU.format('rows_and_planes')}",
    ),
    Mutant(
        "a tile's sums hold that have cancelled",
        "csrc/cuda/read.h",
        "return finite & (equal | (in_range & shift_is_near));",
        "return finite;",
        f"{KERNELS} {ON_GPU.format('hard_float32')}",
    ),
    Mutant(
        "a value of one byte is summed once, however often it occurs",
        "csrc/cuda/count.h",
        "n * double(std::fabs(x))",
        "double(std::fabs(x))",
        f"tests/kernels/test_float8.py {ON_GPU.format('every_value')}",
    ),
    Mutant(
        "the softmax of a row lacks the logits before the first whole pack",
        "csrc/cuda/softmax.cu",
        "(i < before ? i : i + packs * kPack)",
        "(i + packs * kPack < rows.n ? i + packs * kPack : 0)",
        f"tests/kernels/test_softmax_rows.py {ON_GPU.format('where_they_lie')}",
    ),
]
