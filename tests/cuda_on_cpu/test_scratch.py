"""Scratch, streams, captures, and what CUDA is asked, as the harness imitates them: csrc/cuda/scratch.cu."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hookstats import _native
from hookstats._native import operators
from hookstats.watch.flags import Flags
from tests.conftest import DTYPES, HISTOGRAMS, Backend, State, check
from tests.cuda_on_cpu.test_other_gpus import A100
from tests.kernels.test_kernels import LAYOUTS, normal
from tests.kernels.test_many import batch_of
from tests.plain import Operators

DRIVERS = itertools.count(13000)


@pytest.fixture
def imitated(harness: Any) -> Iterator[Backend]:
    """A device of each test's own, whose first streams have scratch of their own."""
    harness.use_gpu(driver=next(DRIVERS))
    harness.reserve_scratch()
    harness.close_step([])
    yield Backend("cuda_on_cpu", harness, "cpu")
    harness.use_gpu()
    harness.use_stream(0)
    harness.use_memory(True)
    harness.use_foreign_streams(False)
    harness.close_step([])


def in_parts() -> torch.Tensor:
    """Make several parts for each channel, which meet in scratch."""
    return normal(5000, 40).float()


def mean_is_right(backend: Backend, x: torch.Tensor) -> bool:
    """Check a mean of new values each time: a previous launch leaves other values in scratch."""
    x = x + 10 * torch.randn(1)
    try:
        check(backend.accumulate(x, 1).stats(), x, 1)
    except AssertionError:
        return False
    return True


def begin_on(backend: Backend, *streams: int) -> None:
    """From now on they come behind all closings before."""
    for stream in streams:
        backend.ops.use_stream(stream)
        backend.accumulate(normal(8, 8).float(), 1)
    backend.ops.order()


def test_streams_of_one_capture_and_captures_on_one_stream_share_no_scratch(imitated: Backend) -> None:
    def scratch(stream: int, capture: int) -> int:
        imitated.ops.use_stream(stream, capture)
        address: int = imitated.ops.scratch()
        return address

    streams = range(31, 38)
    eager = [scratch(stream, 0) for stream in streams]
    forked = [scratch(stream, 3100) for stream in streams]
    captured = [scratch(31, capture) for capture in range(3101, 3110)]
    assert len({*eager, *forked, *captured}) == 23
    assert [scratch(stream, 3100) for stream in streams] == forked
    assert [scratch(stream, 0) for stream in streams] == eager


def test_streams_beyond_the_first_share_scratch_one_behind_the_other(imitated: Backend) -> None:
    ops, x = imitated.ops, in_parts()
    begin_on(imitated, *range(401, 408))  # with the default one, all that have scratch of their own
    before = ops.reserve_scratch()
    begin_on(imitated, *range(408, 440))
    piece = ops.reserve_scratch() - before
    assert piece == before // 8 > 3e6
    assert len({(ops.use_stream(stream), ops.scratch())[1] for stream in range(408, 440)}) == 1
    sites: list[State] = []  # none lies where another one was
    for stream, behind in ((438, 439), (438, None), (420, 438), (401, None), (420, None), (408, 420)):
        ops.use_stream(stream)
        ops.order()
        sites.append(imitated.accumulate(x, 1))
        waits = [] if behind is None else [f"record {behind}", f"wait {stream} behind {behind}"]
        assert ops.order() == [*waits, f"launch {stream}"]
        check(sites[-1].stats(), x, 1)
    assert ops.reserve_scratch() == before + piece
    ops.use_stream(420, 42000)
    assert ops.scratch() not in {(ops.use_stream(stream), ops.scratch())[1] for stream in range(401, 440)}


def test_more_than_is_shared_is_shared_in_its_place(imitated: Backend) -> None:
    begin_on(imitated, *range(441, 450))
    before = imitated.ops.scratch()
    parts = [normal(1025, 1024)] * 67
    batch, states = batch_of(imitated, parts, [1] * len(parts), "none")
    assert batch.accumulate(parts) == []
    imitated.ops.use_stream(450)
    assert imitated.ops.scratch() != before
    assert mean_is_right(imitated, in_parts())
    check(states[66].stats(), parts[0], 1)


def test_the_scratch_of_a_graph_that_is_no_more_is_the_next_ones(imitated: Backend) -> None:
    ops = imitated.ops

    def scratch(capture: int) -> int:
        ops.use_stream(41, capture)
        address: int = ops.scratch()
        return address

    first, second = scratch(4101), scratch(4102)
    ops.end_graph(4101)
    later = {scratch(capture) for capture in range(4103, 4113)}
    assert len(later) == 10
    assert first in later
    assert second not in later


def test_a_batch_that_needs_more_scratch_than_a_tensor_gets_it(imitated: Backend) -> None:
    parts = [normal(1025, 1024)] * 67  # of 16 groups of channels, each in 2 parts: more words and more partial sums
    batch, states = batch_of(imitated, parts, [1] * len(parts), "none")
    imitated.ops.use_stream(63)
    for _ in range(2):
        assert batch.accumulate(parts) == []
    for i in (0, 35, 66):
        check(states[i].stats(), torch.cat([parts[i]] * 2), 1)


def test_no_memory_for_scratch_is_told_and_nothing_else_is_lost(imitated: Backend) -> None:
    ops, x = imitated.ops, in_parts()
    ops.use_stream(70)
    assert mean_is_right(imitated, x)
    ops.use_memory(False)
    ops.use_stream(76)
    with pytest.raises(RuntimeError, match=r"expected \d+ bytes of device memory for scratch: out of memory"):
        imitated.accumulate(x, 1)
    assert ops.last_error() == 0
    ops.use_stream(70)
    assert mean_is_right(imitated, x)
    ops.use_memory(True)
    ops.use_stream(76)
    assert mean_is_right(imitated, x)


def test_a_kernel_of_anybody_that_failed_is_told_from_a_launch_that_does(imitated: Backend) -> None:
    imitated.ops.fail_device(True)
    try:
        with pytest.raises(RuntimeError, match=r"the device had failed before, in any kernel.*: an illegal memory"):
            imitated.accumulate(in_parts(), 1)
    finally:
        imitated.ops.fail_device(False)
    assert mean_is_right(imitated, in_parts())


def test_scratch_is_made_without_an_operator_that_a_python_mode_sees(imitated: Backend) -> None:
    for stream in range(101, 120):
        imitated.ops.use_stream(stream)
        with Operators() as seen:
            imitated.ops.scratch()
        assert {name.split(".")[-2] for name in seen.names} <= {"scratch"}


def test_a_closing_comes_behind_all_streams_in_use_and_later_launches_behind_it(imitated: Backend) -> None:
    ops, x = imitated.ops, normal(8, 8).float()
    sites: list[State] = []  # none lies where another one was

    def launched(stream: int) -> None:
        ops.use_stream(stream)
        sites.append(imitated.accumulate(x, 1))

    for stream in (201, 202, 203):
        launched(stream)
    ops.use_stream(202)
    ops.close_step([])  # in which all were in use
    launched(201)
    ops.order()
    ops.use_stream(204)
    ops.close_step([])
    behind_all = ["wait 204 behind 202", "record 201", "wait 204 behind 201"]
    assert ops.order() == [*behind_all, "record 204", "record 204"]  # before it reads, and when it has cleared
    for stream in (204, 201, 201, 205):
        launched(stream)
    assert ops.order() == [
        "launch 204",
        *("wait 201 behind 204", "launch 201", "launch 201"),
        *("wait 205 behind 204", "launch 205"),
    ]


def test_a_stream_that_may_be_gone_when_a_step_is_closed_is_not_asked_then(imitated: Backend) -> None:
    ops, x = imitated.ops, normal(8, 8).float()
    ops.use_foreign_streams(True)
    ops.use_stream(211)
    imitated.accumulate(x, 1)
    ops.order()
    imitated.accumulate(x, 1)
    assert ops.order() == ["launch 211", "record 211"]
    ops.use_stream(212)
    ops.close_step([])
    assert "wait 212 behind 211" in ops.order()


def test_closings_come_behind_each_other(imitated: Backend) -> None:
    ops, x = imitated.ops, normal(8, 8).float()
    ops.use_stream(251)
    imitated.accumulate(x, 1)
    ops.use_stream(252)
    ops.close_step([])
    for before, stream in ((252, 253), (253, 254), (254, 252), (252, 252)):
        ops.order()
        ops.use_stream(stream)
        ops.close_step([])
        waits = [f"wait {stream} behind {before}"] if before != stream else []
        assert ops.order() == [*waits, f"record {stream}", f"record {stream}"]


def test_closings_come_behind_one_that_gives_memory_away(imitated: Backend) -> None:
    ops, x = imitated.ops, normal(8, 8).float()
    ops.use_stream(261)
    imitated.accumulate(x, 1)
    ops.use_stream(262)
    ops.close_step([])
    ops.use_stream(261)
    imitated.accumulate(x, 1)
    ops.order()
    ops.use_stream(263)
    operators.give_away(imitated.operators, [torch.zeros(1)])
    assert ops.order() == ["wait 263 behind 262", "record 261", "wait 263 behind 261", "record 263"]
    ops.use_stream(264)
    ops.close_step([])
    assert ops.order()[0] == "wait 264 behind 263"


def test_what_switches_measuring_on_and_off_is_written_inside_of_a_closing(
    imitated: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, x = imitated.ops, normal(8, 8).float()
    monkeypatch.setattr(_native, "set_flags", functools.partial(operators.set_flags, imitated.operators))
    flags = Flags()
    version = flags.host._version
    for value in (True, False):
        begin_on(imitated, 265, 266)

        class Watching(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if "fill_" in str(function):
                    assert ops.order()[-2:] == ["wait 266 behind 265", "record 266"]
                return function(*args, **(kwargs or {}))

        with Watching():
            flags.value = value
        assert ops.order() == ["record 266"]
        assert int(flags.host) == value
        ops.use_stream(265)
        imitated.accumulate(x, 1)
        assert ops.order() == ["wait 265 behind 266", "launch 265"]
    assert flags.host._version == version


def test_a_launch_comes_behind_the_last_one_of_one_site(imitated: Backend) -> None:
    ops, x, state, other = imitated.ops, normal(8, 8).float(), State(8, "none", "cpu"), State(8, "none", "cpu")

    def launched(stream: int, into: State, capture: int = 0) -> list[str]:
        ops.use_stream(stream, capture)
        ops.order()
        imitated.accumulate(x, 1, into=into)
        order: list[str] = ops.order()
        return order

    begin_on(imitated, 271, 272, 273)
    assert launched(271, state) == ["launch 271"]
    assert launched(272, other) == ["launch 272"]
    assert launched(272, state) == ["record 271", "wait 272 behind 271", "launch 272"]
    assert launched(272, state) == ["launch 272"]
    assert launched(271, other) == ["record 272", "wait 271 behind 272", "launch 271"]
    assert launched(271, state, 27100) == ["launch 271"]  # what is captured is not looked at
    assert launched(272, state) == ["launch 272"]
    ops.use_stream(273)
    imitated.merge(state, other)
    assert sorted(order := ops.order())[:2] == ["launch 273", "record 271"]
    assert {"wait 273 behind 271", "wait 273 behind 272"} < set(order)
    ops.use_stream(273)
    ops.close_step([])  # comes behind both, and who comes behind it does
    assert launched(271, state) == ["wait 271 behind 273", "launch 271"]
    assert launched(272, other) == ["wait 272 behind 273", "launch 272"]


def test_a_launch_comes_behind_the_one_of_one_site_on_a_stream_that_may_be_gone(imitated: Backend) -> None:
    ops, x, state = imitated.ops, normal(8, 8).float(), State(8, "none", "cpu")
    ops.use_foreign_streams(True)
    begin_on(imitated, 281, 282)
    for stream in (281, 282):
        ops.use_stream(stream)
        imitated.accumulate(x, 1, into=state)
    assert ops.order() == ["launch 281", "record 281", "wait 282 behind 281", "launch 282", "record 282"]


def test_a_batch_comes_behind_the_last_launches_of_its_sites(imitated: Backend) -> None:
    ops, x = imitated.ops, normal(8, 8).float()
    batch, states = batch_of(imitated, [x] * 4, [0] * 4, "none")
    begin_on(imitated, 291, 292, 293)
    ops.use_stream(291)
    imitated.accumulate(x, 0, into=states[3])
    ops.use_stream(292)
    assert batch.accumulate([x] * 4) == []
    assert ops.order() == ["launch 291", "record 291", "wait 292 behind 291", "launch 292"]
    ops.use_stream(293)
    assert batch.accumulate([x] * 4) == []  # of four sites on one stream
    assert ops.order() == ["record 292", "wait 293 behind 292", "launch 293"]


def test_a_launch_in_a_capture_waits_for_no_closing(imitated: Backend) -> None:
    ops, x = imitated.ops, normal(8, 8).float()
    ops.use_stream(221)
    ops.close_step([])
    ops.order()
    ops.use_stream(222, 22200)
    imitated.accumulate(x, 1)
    assert ops.order() == ["launch 222"]


@pytest.mark.parametrize("how", ["accumulate", "merge", "rows"])
def test_operators_that_are_captured_by_hand_keep_their_memory(imitated: Backend, how: str) -> None:
    x, ops = normal(8, 8).float(), imitated.ops
    state, other = State(8, "per_tensor", "cpu"), State(8, "per_tensor", "cpu")
    mask = torch.tensor([True, False] * 4)
    owners = state.moments._use_count(), other.moments._use_count()
    ops.use_stream(231, 23100)
    if how == "merge":
        imitated.merge(state, other)
    else:
        imitated.accumulate(x, 1, into=state, mask=mask if how == "rows" else None)
    assert state.moments._use_count() == owners[0] + 1
    assert other.moments._use_count() == owners[1] + (how == "merge")


def test_what_cuda_says_of_kernels_and_devices_is_asked_once(imitated: Backend) -> None:
    x = in_parts()
    batch, _ = batch_of(imitated, [x, x], [1, 1], "per_tensor")
    imitated.ops.use_gpu(multiprocessors=77)
    for _ in range(2):
        before = imitated.ops.queries()
        imitated.accumulate(x, 1, "per_channel")
        imitated.accumulate(x, 1, "blocks of 32")
        assert batch.accumulate([x, x]) == []
        asked = imitated.ops.queries() - before
    assert asked == 0


@pytest.mark.parametrize(("gpu", "wave"), [(A100, 2 * 108), ({"multiprocessors": 148}, 2 * 148)], ids=["A100", "B200"])
def test_the_blocks_of_a_large_tensor_are_one_wave_of_the_gpu(
    imitated: Backend, gpu: dict[str, int], wave: int
) -> None:
    ops = imitated.ops
    ops.use_gpu(**gpu)
    # Of one group of channels, and of a quarter more bytes than are worth that many blocks.
    x = torch.ones(wave * (160 << 10) // (16 * 2), 16, dtype=torch.bfloat16)
    imitated.accumulate(x[:8], 1, "per_channel")
    before = ops.blocks()
    ops.use_stream(0)
    state = imitated.accumulate(x, 1, "per_channel")
    assert 0.9 * wave < ops.blocks() - before <= wave
    assert state.stats().total.count == x.numel()


@pytest.mark.parametrize("multiprocessors", [1, 58, 700])
def test_a_gpu_of_any_size_gives_right_numbers(imitated: Backend, multiprocessors: int) -> None:
    imitated.ops.use_gpu(multiprocessors=multiprocessors)
    for shape in ((5000, 40), (30, 14336)):
        x = normal(*shape).float()
        check(imitated.accumulate(x, 1, "per_channel").stats(), x, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_kernels_are_loaded_before_a_capture_where_the_driver_loads_none_in_one(
    imitated: Backend, dtype: torch.dtype
) -> None:
    ops = imitated.ops
    ops.use_gpu(driver=12020, runtime=12010)
    ops.use_stream(0)
    ops.forget_kernels()
    ops.reserve_scratch()
    for number, histogram in enumerate(HISTOGRAMS):
        ops.use_stream(241, 24100 + number)
        for make, channel_dim in LAYOUTS.values():
            imitated.accumulate(make(dtype), channel_dim, histogram)
        x = normal(8, 4).to(dtype)
        ops.sample([x], [x.new_empty(32, dtype=torch.float64 if dtype is torch.float64 else torch.float32)], None, [])
        ops.softmax_rows(x, 2)
        imitated.merge(State(8, histogram, "cpu"), State(8, histogram, "cpu"))
    ops.forget_kernels()
    with pytest.raises(RuntimeError, match="capture implicit"):
        imitated.accumulate(normal(8, 4).to(dtype), 1)


@pytest.mark.parametrize("step", [256, (1 << 30) - 2])
def test_a_walk_through_runs_of_nearly_2_to_the_30_packs(imitated: Backend, step: int) -> None:
    inner, stride = (1 << 30) - 1, 1 << 32
    places = range(inner - 1000, inner - 1000 + 8 * step, step)
    found = imitated.ops.near_addresses(inner, stride, places[0], step, len(places))
    assert found == [i // inner * stride + i % inner for i in places]
    assert imitated.ops.near_addresses(inner + 1, stride, 0, 256, 1) == []  # goes the way for any layout


def test_a_tensor_that_cannot_be_read_makes_no_call_plan_anew(imitated: Backend) -> None:
    x = normal(8, 64).float()
    batch, states = batch_of(imitated, [x, x], [0, 0], "none")
    assert batch.accumulate([x, x]) == []
    unreadable = torch.ones(8, 64, dtype=torch.complex64)
    for _ in range(2):
        with Operators() as called:
            failures = batch.accumulate([x, unreadable])
        assert [number for number, _ in failures] == [1]
        assert not any("_to_copy" in name for name in called.names), called.names  # of a plan's table
    assert batch.accumulate([x, x]) == []
    assert [int(state.counters[0]) for state in states] == [4, 2]
