"""What the compiler says of every CUDA kernel and GPU, so that occupancy does not rot where no GPU looks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hookstats

RECORD = Path(hookstats.__file__).with_name("_built.json")
# Registers of a thread. 128: two blocks of 256 threads on a multiprocessor, or one of 512. Some kernels of doubles are
# let have one of 256 (kBlocksAtOnce in csrc/cuda/block.h), and are bound by what they take. The first pattern that a
# kernel's name shows decides.
MOST_REGISTERS = {
    r"(blocks|checksum)_kernel": 64,
    r"(sample|mend)_kernel": 64,
    r"softmax_kernelIdLi17": 255,  # doubles, and the largest 17 of them in registers
    r"softmax_kernel(Id|.*Li17)": 128,
    r"softmax_kernel": 64,
    r"_kernelId.*KindE[23]": 170,
    r"(accumulate|small|many|merge|totals)_kernel": 128,
}


def kernels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORD.read_text()).get("kernels", [])
    return found


def test_no_kernel_spills_or_takes_more_registers_than_its_bound() -> None:
    if not kernels():
        pytest.skip("built without CUDA kernels")
    for each in kernels():
        bounds = [most for pattern, most in MOST_REGISTERS.items() if re.search(pattern, each["kernel"])]
        assert bounds, f"{each['kernel']}: a kernel without a bound"
        assert each["stack"] == each["spilled"] == 0, each
        assert each["registers"] <= bounds[0], each


def test_every_kernel_is_built_for_every_gpu() -> None:
    if not kernels():
        pytest.skip("built without CUDA kernels")
    names = [{each["kernel"] for each in kernels() if each["gpu"] == gpu} for gpu in {k["gpu"] for k in kernels()}]
    assert all(each == names[0] for each in names)
    assert len(names[0]) > 50
