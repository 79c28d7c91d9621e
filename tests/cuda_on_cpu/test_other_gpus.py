"""GPUs, drivers and captures, as the harness imitates them: less shared memory, errors that stay, captured graphs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conftest import DTYPES, HISTOGRAMS, ROOT, Backend, check
from tests.kernels.test_kernels import LAYOUTS, PATHS, normal
from tests.kernels.test_many import LONG, batch_of, made

KB = 1 << 10
A100 = {"shared_memory": 163 * KB, "multiprocessors": 108, "capability": 80}


@pytest.fixture
def imitated(harness: Any) -> Iterator[Backend]:
    harness.reserve_scratch()
    yield Backend("cuda_on_cpu", harness, "cpu")
    harness.use_gpu()
    harness.use_stream(0)
    harness.tell_captures(True)


def test_a_block_counts_more_rows_than_16_bits_hold(imitated: Backend) -> None:
    imitated.ops.use_gpu(multiprocessors=1)  # of two blocks
    x = torch.full((300_000, 4), 1.5, dtype=torch.bfloat16)
    x[:, 1], x[:, 2], x[::3, 3] = 0.3, -70.0, 0.0
    state = imitated.accumulate(x, 1, "per_channel")
    assert state.histogram is not None
    wanted = [{47: 300_000}, {45: 300_000}, {53: 300_000}, {0: 100_000, 47: 200_000}]
    assert [{i: n for i, n in enumerate(row) if n} for row in state.histogram.tolist()] == wanted


@pytest.mark.parametrize("shared_memory", [163 * KB, 99 * KB, 48 * KB], ids=["163 KB", "99 KB", "48 KB"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", PATHS)
def test_every_path_dtype_and_histogram_runs_with_less_shared_memory(
    imitated: Backend, layout: str, dtype: torch.dtype, shared_memory: int
) -> None:
    make, channel_dim = LAYOUTS[layout]
    x = make(dtype)
    imitated.ops.use_gpu(shared_memory=shared_memory)
    for histogram in HISTOGRAMS:
        check(imitated.accumulate(x, channel_dim, histogram).stats(), x, channel_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_usual_and_lean_blocks_give_the_same_bits(imitated: Backend, dtype: torch.dtype) -> None:
    x, mask = normal(700, 68).to(dtype), torch.arange(700) % 3 > 0
    for histogram in HISTOGRAMS:
        for rows in (None, mask):
            imitated.ops.use_gpu()
            most = imitated.accumulate(x, 1, histogram, mask=rows)
            imitated.ops.use_gpu(shared_memory=99 * KB)
            assert imitated.accumulate(x, 1, histogram, mask=rows).same_bits(most)


@pytest.mark.parametrize("shared_memory", [99 * KB, 48 * KB], ids=["99 KB", "48 KB"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tensors_run_with_less_shared_memory(imitated: Backend, dtype: torch.dtype, shared_memory: int) -> None:
    imitated.ops.use_gpu(shared_memory=shared_memory)
    for histogram in HISTOGRAMS:
        # Of 99 KB, what is chosen matters; of 48 KB also what is read by value then, in many parts.
        in_parts = shared_memory == 48 * KB and histogram == "per_channel"
        tensors, dims = made(dtype, () if in_parts else LONG)
        batch, states = batch_of(imitated, tensors, dims, histogram)
        assert batch.accumulate(tensors) == []
        for x, dim, state in zip(tensors, dims, states, strict=True):
            check(state.stats(), x, dim)


def test_a_launch_that_failed_leaves_no_error_for_the_next_one(imitated: Backend) -> None:
    x = normal(700, 70).float()
    imitated.ops.use_gpu(shared_memory=16 * KB)
    with pytest.raises(RuntimeError, match="invalid argument"):
        imitated.accumulate(x, 1, "per_channel")
    assert imitated.ops.last_error() == 0
    imitated.ops.use_gpu()
    check(imitated.accumulate(x, 1, "per_channel").stats(), x, 1)


def test_a_capture_that_cannot_be_asked_for_leaves_no_error_for_the_next_launch(imitated: Backend) -> None:
    x = normal(700, 70).float()
    imitated.ops.use_stream(1)
    imitated.ops.tell_captures(False)
    check(imitated.accumulate(x, 1, "per_channel").stats(), x, 1)
    assert imitated.ops.last_error() == 0


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ({"driver": 12080}, r"expected an NVIDIA driver for CUDA 13\.0 or newer, found one for CUDA 12\.8"),
        ({"runtime": 12010, "driver": 12000}, r"driver for CUDA 12\.1 or newer, found one for CUDA 12\.0"),
        ({"capability": 75}, r"expected a GPU of compute capability 8\.0 or newer, found 7\.5"),
    ],
    ids=["toolkit of a newer major version", "kernels with 8 KB of parameters", "sm_75"],
)
def test_a_gpu_or_driver_that_is_too_old_is_refused_when_memory_is_made_there(
    imitated: Backend, gpu: dict[str, int], message: str
) -> None:
    imitated.ops.use_gpu(**gpu)
    with pytest.raises(RuntimeError, match=message):
        imitated.ops.reserve_scratch()
    imitated.ops.use_gpu(capability=86, runtime=12010, driver=12080)
    imitated.ops.reserve_scratch()


def test_a_first_launch_that_fails_is_told_when_memory_is_made_there(harness: Any) -> None:
    """In a process of its own: what has succeeded is not tried again."""
    program = (
        "from tests.cuda_on_cpu.loading import load_harness; harness = load_harness()\n"
        "harness.use_gpu(shared_memory=1)\n"
        "try: harness.reserve_scratch()\n"
        "except RuntimeError as error: print(error)\n"
        "harness.use_gpu(); before = harness.launches()\n"
        "harness.reserve_scratch(); harness.reserve_scratch(); print(harness.launches() - before)"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "hookstats: a first launch on cpu failed: hookstats: CUDA: invalid argument" in said
    assert "hookstats.build_info() says for which GPUs it was built" in said
    assert said.split()[-1] == "3"  # a kernel of each file, once


def test_a_capture_that_meets_other_tensors_refuses_these_and_leaves_the_rest_as_it_was(imitated: Backend) -> None:
    x, longer = normal(8, 64).float(), normal(8, 128).float()
    batch, states = batch_of(imitated, [x] * 3, [0] * 3, "per_tensor")
    assert batch.accumulate([x, x, x]) == []
    imitated.ops.use_stream(1, capture=1)
    failures = batch.accumulate([x, longer, x])
    assert [number for number, _ in failures] == [1]
    assert "expected a measured step with a tensor like this one before a CUDA graph captures one" in failures[0][1]
    imitated.ops.use_stream(0)
    before = imitated.ops.launches()
    assert batch.accumulate([x, x, x]) == []
    assert imitated.ops.launches() == before + 1
    assert [int(state.counters[0]) for state in states] == [3, 2, 3]
    check(states[1].stats(), torch.cat([x, x], dim=1), 0)


def test_a_batch_that_is_first_met_in_a_capture_is_planned_after_it(imitated: Backend) -> None:
    x = normal(8, 64).float()
    batch, states = batch_of(imitated, [x] * 2, [0] * 2, "per_tensor")
    imitated.ops.use_stream(1, capture=1)
    assert [number for number, _ in batch.accumulate([x, x])] == [0, 1]
    imitated.ops.use_stream(0)
    assert batch.accumulate([x, x]) == []
    assert [int(state.counters[0]) for state in states] == [1, 1]


def test_what_a_captured_launch_refers_to_is_kept(imitated: Backend) -> None:
    x = normal(8, 64).float()
    batch, (state,) = batch_of(imitated, [x], [0], "per_tensor")
    batch.accumulate([x])
    del batch
    owners = state.moments._use_count()
    batch = imitated.batch([state], [0])
    batch.accumulate([x])
    imitated.ops.use_stream(1, capture=1)
    batch.accumulate([x])
    del batch
    assert state.moments._use_count() == owners + 1
