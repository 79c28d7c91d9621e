"""Bounds on the compiler's report of every CUDA kernel and GPU, so that occupancy is guarded without a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import hookstats
from tests.kernels import compiled

RECORD = Path(hookstats.__file__).with_name("_built.json")
# Registers of a thread. 128: two blocks of 256 threads on a multiprocessor. Some kernels of doubles are let have one
# (kBlocksAtOnce in csrc/cuda/block.h), and are bound by what they take. The first pattern that a kernel's name shows
# decides.
MOST_REGISTERS = {
    r"blocks_kernel": 64,
    r"sample_kernel": 64,
    r"joint_kernel": 80,
    r"softmax_kernelIdLi17": 255,  # doubles, and the largest 17 of them in registers
    r"softmax_kernel(Id|.*Li17)": 128,
    r"softmax_kernel": 64,
    r"_kernelId.*KindE[23]": 170,
    r"(accumulate|many|merge|totals)_kernel": 128,
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


def test_a_change_of_a_kernel_or_of_its_headers_asks_for_all_architectures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "csrc" / "cuda").mkdir(parents=True)
    (tmp_path / "hookstats").mkdir()
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    monkeypatch.setattr(compiled, "RECORD", tmp_path / "compiled.json")
    built = tmp_path / "hookstats" / "_built.json"
    built.write_text(json.dumps({"cuda": "13.0", "architectures": ["9.0"]}))
    assert compiled.main(["record"]) == 1  # not all of them
    built.write_text(json.dumps({"cuda": "13.0", "architectures": ["8.0", "9.0", "10.0", "12.0+PTX"]}))
    (tmp_path / "csrc" / "stats.h").touch()
    for name, text in {"cuda/many.cu": '#include "../stats.h"\n', "stats.h": ""}.items():
        (tmp_path / "csrc" / name).write_text(f"{text}// as it was\n")
        assert compiled.main(["record"]) == compiled.main([]) == 0
        (tmp_path / "csrc" / name).write_text(f"{text}// as it is\n")
        assert compiled.main([]) == 1
    assert compiled.main(["record"]) == 0
    for name in ("ops.cpp", "ops.h"):  # no part of them
        (tmp_path / "csrc" / name).touch()
    assert compiled.main([]) == 0
