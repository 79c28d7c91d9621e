"""Several streams, many parts, very large tensors, several GPUs: what only a GPU can show."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import _native
from hookstats.numbers import fields
from tests.conftest import ROOT, State, check

pytestmark = pytest.mark.gpu


def batch_of(states: list[State]) -> Any:
    active = torch.ones(1, dtype=torch.int32, device="cuda")
    return _native.Batch([state.site(0, active) for state in states])


def test_the_parts_of_a_tensor_are_folded_in_one_order_beside_other_work() -> None:
    """2 parts, 65 (two rounds of merging), 1056 (the most, of a tensor among many): 10,005 launches in a graph."""
    _native.reserve_scratch(torch.device("cuda", torch.cuda.current_device()))
    values = [parts * size // 4 for parts, size in ((2, 128 << 10), (65, 128 << 10), (1056, 512 << 10))]
    tensors = [torch.randn(count, device="cuda") for count in values]

    def folds_into(states: list[State]) -> list[Callable[[], Any]]:
        alone = [partial(s.fold, x, 0) for x, s in zip(tensors[:2], states, strict=False)]
        return [*alone, partial(batch_of(states[2:]).accumulate, tensors[2:])]

    states = [State(1, "per_channel", "cuda") for _ in tensors]
    folds, times = folds_into(states), (4995, 4995, 15)
    for fold in folds:  # a batch is planned before the capture
        fold()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(15):
            for _ in range(333):
                folds[0]()
                folds[1]()
            folds[2]()
    hog = torch.randn(4096, 4096, device="cuda")
    runs = []
    for _ in range(2):
        for state in states:
            for each in (state.moments, state.counters, state.histogram):
                each.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                hog = hog @ hog
        graph.replay()
        torch.cuda.synchronize()
        runs.append([state.moments.clone() for state in states])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first.view(torch.int64), second.view(torch.int64))
    count = fields.FIELDS.index("count")
    for x, state, launches in zip(tensors, states, times, strict=True):
        assert state.counters[0] == launches
        assert state.moments[count, 0] == launches * x.numel()
    once = []
    for _ in range(3):  # into an empty state, and into one that is not
        once.append([State(1, "per_channel", "cuda") for _ in tensors])
        for fold in folds_into(once[-1]):
            fold()
            fold()
    for first, *others in zip(*once, strict=True):
        assert all(other.same_bits(first) for other in others)


def test_memory_of_a_batch_and_of_totals_that_are_gone_is_theirs_until_their_launches_have_ended() -> None:
    """Both are made on one stream and used on another one, where they wait behind other work."""
    tensors = [torch.randn(64, 4096, device="cuda") for _ in range(8)] + [torch.randn(1, 1 << 21, device="cuda")]
    states = [State(len(x), "none", "cuda") for x in tensors]
    batch = batch_of(states)
    totals = _native.Totals([state.moments for state in states], [state.counters for state in states])
    for _ in range(2):  # the first one plans
        assert batch.accumulate(tensors) == []
    busy, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    for state in states:
        state.moments.zero_()
        state.counters.zero_()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(20):
            busy = busy @ busy
        assert batch.accumulate(tensors) == []
        taken = totals.take([])
    del batch, totals
    others = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in range(512, 1 << 16, 512)]
    torch.cuda.synchronize()
    for x, state, row in zip(tensors, states, taken.cpu(), strict=True):
        check(state.stats(), x, 0)
        moments = row[: len(fields.FIELDS)].view(torch.float64).numpy()
        np.testing.assert_allclose(moments, fields.fold_channels(state.moments.cpu().numpy()), rtol=1e-10)
    assert all(int(each.min()) == 255 for each in others)


@pytest.mark.parametrize("how", ["rows", "planes"])
def test_a_tensor_of_more_than_2_to_the_31_elements(how: str) -> None:
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GB of GPU memory")
    size = (1 << 31) + 8
    x = torch.zeros(size, dtype=torch.bfloat16, device="cuda")
    x[-1], x[-9], x[0], x[1 << 30] = 3.0, -5.0, 1.0, 2.0
    values = x.view(-1, 8) if how == "rows" else x.view(8, -1)
    channel_dim = 1 if how == "rows" else 0
    state = State(8, "per_channel", "cuda")
    state.fold(values, channel_dim)
    stats = state.stats()
    assert stats.total.count == size
    assert stats.total.zeros == size - 4
    assert (stats.total.min, stats.total.max, stats.total.l1_norm) == (-5.0, 3.0, 11.0)
    channels = [7, 7, 0, 0] if how == "rows" else [7, 7, 0, (1 << 30) // (size // 8)]
    for channel in range(8):
        norm = sum(v for c, v in zip(channels, (3.0, 5.0, 1.0, 2.0), strict=True) if c == channel)
        assert stats.channels.l1_norm[channel] == norm


def test_memory_made_late_on_one_stream_is_clear_when_another_one_uses_it() -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    for width in range(16, 24):
        model = nn.Sequential(nn.Linear(1, 1).cuda(), nn.ReLU(), nn.ReLU())
        x = torch.randn(64, width, device="cuda")
        mon = hookstats.attach(model, tensors="output", every=1)
        torch.cuda.synchronize()
        for _ in range(20):
            busy = busy @ busy  # the clearing comes behind this
        model[1](x)  # makes a block, with room for the other site, too
        with torch.cuda.stream(torch.cuda.Stream()):
            model[2](x)
        torch.cuda.synchronize()
        snapshot = mon.snapshot()
        assert [snapshot[name, "output"].calls for name in "12"] == [1, 1]


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_that_are_ignored_are_known_on_every_stream(compiled: bool) -> None:
    model = nn.Linear(64, 64).cuda()
    mon = hookstats.attach(model, tensors="output", every=1)
    x, busy = torch.randn(5000, 64, device="cuda"), torch.randn(4096, 4096, device="cuda")
    run = torch.compile(model) if compiled else model
    run(x)
    for _ in range(5):
        mon.reset()
        skip = torch.rand(5000, device="cuda") < 0.5
        torch.cuda.synchronize()
        for _ in range(20):
            busy = busy @ busy  # the rows are listed behind this
        with mon.ignore(skip), torch.cuda.stream(torch.cuda.Stream()):
            run(x)
        torch.cuda.synchronize()
        check(mon.snapshot()["", "output"], model(x)[~skip].detach(), -1)


def test_a_capture_that_takes_the_place_of_one_on_another_stream_is_the_later_one() -> None:
    model = nn.Sequential(nn.Identity())
    shots = hookstats.capture(model, "0", keep=1)
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        first, second = (torch.full((4, 8), value, device="cuda") for value in (1.0, 2.0))
        torch.cuda.synchronize()
        for _ in range(20):
            busy = busy @ busy  # the first one's way to the host comes behind this
        model(first)
        with torch.cuda.stream(torch.cuda.Stream()):
            model(second)
        torch.cuda.synchronize()
        assert bool((shots["0"][0].output == 2).all())


def test_what_a_step_that_was_not_measured_left_behind_is_not_in_the_next_one() -> None:
    model, x = nn.Linear(8, 8).cuda(), torch.randn(5, 8, device="cuda")
    mon = hookstats.attach(model, tensors="output", every=2)
    model(x)
    mon.step()
    entry = mon._store.entries[0]
    entry.state.histogram.fill_(7)  # as a kernel does whose flag changed while it ran
    mon.step()
    model(x)
    histogram = mon.snapshot()["", "output"].histogram
    assert histogram.counts.sum() == x.numel()


def test_two_threads_that_launch_on_one_site_from_two_streams_lose_nothing() -> None:
    x, state = torch.randn(2000, 64, device="cuda"), State(64, "per_tensor", "cuda")
    begun = threading.Barrier(2)
    torch.cuda.synchronize()

    def measure() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            begun.wait(60)
            for _ in range(500):
                state.fold(x, 1)

    threads = [threading.Thread(target=measure) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    torch.cuda.synchronize()
    stats = state.stats()
    assert stats.total.count == 1000 * x.numel()
    assert stats.histogram.counts.sum() == 1000 * x.numel()


def test_usual_and_lean_blocks_give_the_same_bits() -> None:
    program = (
        "import torch; from tests.conftest import DTYPES, State; torch.manual_seed(0)\n"
        "x = torch.randn(700, 68, dtype=torch.float64).cuda()\n"
        "for dtype in DTYPES:\n"
        "  for histogram in ('per_channel', 'linear'):\n"
        "    state = State(68, histogram, 'cuda')\n"
        "    state.fold(x.to(dtype), 1)\n"
        "    print(state.moments.view(torch.int64).sum().item(), state.histogram.sum().item())"
    )

    def run(**environment: str) -> str:
        command = [sys.executable, "-c", program]
        environment = os.environ | environment
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    usual = run()
    assert len(usual.splitlines()) == 12
    assert run(HOOKSTATS_SHARED_MEMORY=str(99 << 10)) == usual


def test_measuring_on_one_gpu_leaves_the_current_one_as_it_was() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model, x = nn.Linear(8, 8).to("cuda:1"), torch.randn(5, 8, device="cuda:1")
    torch.cuda.set_device(0)
    mon = hookstats.attach(model, tensors=("output", "grad_output", "param_grad"), every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).sum().backward()
        assert torch.cuda.current_device() == 0
        optimizer.step()
        assert torch.cuda.current_device() == 0
        mon.step()
        assert torch.cuda.current_device() == 0
    assert mon.snapshot()["", "output"].calls == 1
