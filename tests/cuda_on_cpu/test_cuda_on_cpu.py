"""Tests that only the harness can make: the order of blocks and threads does not matter; planted faults are found."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

from tests.conftest import DTYPES, Backend, State, check
from tests.cuda_on_cpu import loading
from tests.kernels.test_kernels import LAYOUTS, PATHS, normal


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [(layout, dtype) for layout in LAYOUTS for dtype in (DTYPES if layout in PATHS else [torch.float32])],
    ids=str,
)
def test_shuffled_blocks_and_threads_are_bit_identical(harness: Any, layout: str, dtype: torch.dtype) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    make, channel_dim = LAYOUTS[layout]
    x = make(dtype)
    for histogram in ("per_tensor", "per_channel"):
        harness.shuffle(0)
        in_order = backend.accumulate(x, channel_dim, histogram)
        for seed in (1, 2):
            harness.shuffle(seed)
            assert backend.accumulate(x, channel_dim, histogram).same_bits(in_order)
    harness.shuffle(0)


def test_shuffled_merges_are_bit_identical(harness: Any) -> None:
    backend = Backend("cuda_on_cpu", harness, "cpu")
    part = backend.accumulate(normal(50, 700).float(), 1, "per_channel")
    folded = []
    for seed in (0, 1, 2):
        harness.shuffle(seed)
        state = State(1, "per_channel", "cpu")
        backend.merge(state, part)
        folded.append(state)
    harness.shuffle(0)
    assert all(state.same_bits(folded[0]) for state in folded)


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
    harness.accumulate(x, *torn.tensors, flag, 1)
    harness.switch_off_after(flag, -1)
    assert set(torn.moments[0].tolist()) <= {0.0, 5000.0}  # whole channels or nothing
    assert (after == 1000) == bool(flag.item())
    check(backend.accumulate(x, 1, "per_channel").stats(), x, 1)


@pytest.mark.parametrize("shape", [(300, 72), (5000, 40)], ids=["one part", "many parts"])
def test_a_block_that_is_switched_off_ends_after_its_copies(harness: Any, shape: tuple[int, int]) -> None:
    """The harness raises where it does not."""
    state = State(shape[1], "per_channel", "cpu")
    harness.accumulate(normal(*shape).float(), *state.tensors, torch.zeros(1, dtype=torch.int32), 1)
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
