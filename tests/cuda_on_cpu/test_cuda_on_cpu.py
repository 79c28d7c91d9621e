"""Tests that only the harness can make: the order of blocks and threads does not matter; planted faults are found."""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from tests.conftest import DTYPES, Backend, State, check
from tests.cuda_on_cpu import loading
from tests.kernels.test_kernels import LAYOUTS, PATHS, normal
from tests.kernels.test_many import batch_of, made
from tests.kernels.test_not_finite import VALUES
from tests.kernels.test_unaligned import shifted


def measure_layout(name: str, dtype: torch.dtype, backend: Backend) -> list[State]:
    make, dim = LAYOUTS[name]
    return [backend.accumulate(make(dtype), dim, histogram) for histogram in ("per_tensor", "per_channel")]


def measure_unaligned(dtype: torch.dtype, backend: Backend) -> list[State]:
    x = shifted(normal(2000, 69).to(dtype), 1)
    return [backend.accumulate(each, 1, "per_channel") for each in (x, x[:1960].view(40, 69, 7, 7))]


def measure_not_finite(values: str, backend: Backend) -> list[State]:
    both = (VALUES[values].bfloat16(), VALUES[values][:, 1:].float().contiguous())
    return [backend.accumulate(x, 1, "per_channel") for x in both]


def measure_together(backend: Backend) -> list[State]:
    tensors, dims = made(torch.bfloat16)
    batch, states = batch_of(backend, tensors, dims, "per_channel")
    batch.accumulate(tensors)
    return states


def merge_channels(backend: Backend) -> list[State]:
    backend.merge(
        state := State(1, "per_channel", "cpu"), backend.accumulate(normal(50, 700).float(), 1, "per_channel")
    )
    return [state]


WAYS: dict[str, Callable[[Backend], list[State]]] = {
    f"{name}-{dtype}": functools.partial(measure_layout, name, dtype)
    for name in LAYOUTS
    for dtype in (DTYPES if name in PATHS else [torch.float32])
}
WAYS |= {f"unaligned-{dtype}": functools.partial(measure_unaligned, dtype) for dtype in DTYPES}
WAYS |= {name: functools.partial(measure_not_finite, name) for name in ("nan_and_inf", "one_nan")}
WAYS |= {"every_exponent_and_nan": functools.partial(measure_not_finite, "every_exponent_and_nan")}
WAYS |= {"many": measure_together, "merge": merge_channels}


@pytest.mark.parametrize("way", WAYS)
def test_shuffled_blocks_and_threads_are_bit_identical(harness: Any, way: str) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    runs = []
    for seed in (0, 1, 2):
        harness.shuffle(seed)
        runs.append(WAYS[way](backend))
    harness.shuffle(0)
    assert all(a.same_bits(b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_one_launch_per_accumulate_and_merge(harness: Any) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    state = State(40, "per_channel", "cpu")
    before = harness.launches()
    backend.accumulate(normal(5000, 40).float(), 1, into=state)  # many blocks per channel
    assert harness.launches() == before + 1
    backend.merge(state, state)
    assert harness.launches() == before + 2
    backend.accumulate(torch.empty(0, 40), 1, into=state)
    assert harness.launches() == before + 2


def test_scratch_is_left_as_it_was_found(harness: Any) -> None:
    # Shapes with different numbers of parts after each other: a dirty arrival counter would lose or repeat a part.
    backend = Backend("cuda_on_cpu", harness, "cpu")
    for rows, channels in ((5000, 40), (300, 7), (9000, 1), (5000, 40)):
        x = normal(rows, channels).float()
        check(backend.accumulate(x, 1, "per_channel").stats(), x, 1)


@pytest.mark.parametrize("after", [0, 1, 3, 1000])
def test_a_flag_that_changes_during_a_launch_does_not_disturb_the_next_one(harness: Any, after: int) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    x = normal(5000, 40).float()
    flag = torch.ones(1, dtype=torch.int32)
    torn = State(40, "none", "cpu")
    harness.switch_off_after(flag, after)
    torn.fold(x, 1, active=flag, ops=harness)
    harness.switch_off_after(flag, -1)
    assert set(torn.moments[0].tolist()) <= {0.0, 5000.0}  # whole channels or nothing
    assert (after == 1000) == bool(flag.item())
    check(backend.accumulate(x, 1, "per_channel").stats(), x, 1)


@pytest.mark.parametrize("shape", [(300, 72), (5000, 40)], ids=["one part", "many parts"])
def test_a_block_that_is_switched_off_ends_after_its_copies(harness: Any, shape: tuple[int, int]) -> None:
    """The harness raises where it does not."""
    state = State(shape[1], "per_channel", "cpu")
    state.fold(normal(*shape).float(), 1, active=torch.zeros(1, dtype=torch.int32), ops=harness)
    assert int(state.counters[0]) == int(state.moments.count_nonzero()) == 0


def test_a_channel_in_more_parts_than_meet_at_once(harness: Any) -> None:
    """Parts meet in groups of 64, and these groups in a second round."""
    x = normal(2_500_000).float()
    before = harness.blocks()
    state = Backend("cuda_on_cpu", harness, "cpu").accumulate(x, None)
    assert 64 < harness.blocks() - before < 2 * 64
    check(state.stats(), x, None)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("partial_barrier", r"not every thread of the block reaches the barrier.*32 of 64 have returned"),
        ("diverged_barrier", "not every thread of the block reaches the barrier"),
        ("overrun", "past the end of a shared array"),
    ],
)
def test_the_harness_finds(harness: Any, fault: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        harness.run_faulty(fault)


def test_the_harness_shows_a_missing_barrier(harness: Any) -> None:
    assert harness.run_faulty("missing_barrier") != 64


def test_a_shared_array_is_aligned_to_what_it_asks_for_alone(harness: Any) -> None:
    assert harness.run_faulty("unaligned") == 1


def test_the_harness_shows_copies_of_two_threads_to_one_place_when_these_are_shuffled(harness: Any) -> None:
    harness.shuffle(1)
    wrong = harness.run_faulty("shared_copy")
    harness.shuffle(0)
    assert wrong > 0


def test_one_process_at_a_time_builds_the_harness_and_one_that_was_killed_stops_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def load(build_directory: str, **options: Any) -> None:
        folders.append(Path(build_directory))
        assert not (folders[-1] / "lock").exists()  # with which load() tells that another process builds
        with (folders[-1] / "building").open() as another, pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setattr(loading, "ROOT", tmp_path)
    monkeypatch.setattr(cpp_extension, "load", load)
    loading.build()
    (folders[0] / "lock").touch()
    loading.build()
    assert len(folders) == 2
