"""The CUDA kernels' hot loops take no more instructions than were recorded: no GPU here tells what they cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hookstats
from hookstats import _native
from tests.kernels import sass

RECORDED = json.loads(Path(__file__).with_name("instructions.json").read_text())

# Two loops that copy, the second in a loop of tiles, after it one that copies nothing.
SMALL = """
        /*0000*/                   LDGSTS [R1], [R2.64] ;
        /*0010*/               @P0 BRA 0x0 ;
        /*0020*/                   FADD R1, R1, R2 ;
        /*0030*/                   LDS R3, [R4] ;
        /*0040*/                   LDGSTS [R1], [R2.64] ;
        /*0050*/              @!P1 BRA 0x30 ;
        /*0060*/                   FADD R1, R1, R2 ;
        /*0070*/                   LDG.E R3, [R2.64] ;
        /*0080*/                   FADD R1, R1, R2 ;
        /*0090*/                   FADD R1, R1, R2 ;
        /*00a0*/                   BRA P3, 0x70 ;
        /*00b0*/               @P2 BRA 0x20 ;
        /*00c0*/                   BRA 0xc0;
"""


def test_the_hot_loop_is_the_longest_innermost_one_that_copies() -> None:
    assert sass.count_loops(SMALL) == (3, 3)
    assert sass.count_loops(SMALL.replace("@P2 BRA 0x20", "@P2 BRA 0xc0")) == (3, 0)


def test_what_takes_more_instructions_than_recorded_is_named() -> None:
    recorded = {name: {"loop": 32, "tile": 100} for name in "abc"}
    figures = {
        "a": {"loop": 33, "tile": 100},
        "b": {"loop": 32, "tile": 99},
        "d": {"loop": 1, "tile": 1},
    }
    assert [line.split(":")[0] for line in sass.grown(figures, recorded)] == ["a", "c", "d"]


def test_no_hot_loop_takes_more_instructions_than_recorded() -> None:
    built = hookstats.build_info()
    if not any(each.startswith("9.0") for each in built["architectures"]):
        pytest.skip(f"built without CUDA kernels for {sass.GPU}, whose instructions were recorded")
    if built["cuda"] != RECORDED["nvcc"]:
        pytest.skip(
            f"recorded with nvcc {RECORDED['nvcc']}, built with {built['cuda']}: other code for the same source"
        )
    if missing := sass.missing_tools():
        pytest.skip(f"no {' and '.join(missing)}: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    assert not sass.grown(sass.count(_native.LIBRARY.with_name("_kernels.so")), RECORDED["kernels"])
