"""Scratch, closings and captures, of which the harness imitates the orders (tests/cuda_on_cpu/test_scratch.py)."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import _native
from tests.conftest import ROOT, State, check

pytestmark = pytest.mark.gpu


def in_parts() -> torch.Tensor:
    return torch.randn(20_000, 64, device="cuda")


def accumulate(x: torch.Tensor, state: State) -> None:
    state.fold(x, 1)


def graph_of(x: torch.Tensor, state: State) -> torch.cuda.CUDAGraph:
    accumulate(x, state)
    torch.cuda.synchronize()
    state.moments.zero_()
    state.counters.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accumulate(x, state)
    return graph


def test_replays_of_one_graph_on_several_streams_leave_its_scratch_as_it_was() -> None:
    x, state = in_parts(), State(64, "none", "cuda")
    graph = graph_of(x, state)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(200):
        for stream in streams:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _ in range(2):
        state.moments.zero_()
        graph.replay()
        torch.cuda.synchronize()
        check(state.stats(), x, 1)


def test_forked_streams_of_one_capture_have_scratch_of_their_own() -> None:
    _native.reserve_scratch(torch.device("cuda", torch.cuda.current_device()))
    tensors = [in_parts() for _ in range(9)]
    states = [State(64, "none", "cuda") for _ in tensors]
    streams = [torch.cuda.Stream() for _ in tensors]
    accumulate(tensors[0], State(64, "none", "cuda"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        origin = torch.cuda.current_stream()
        for stream, x, state in zip(streams, tensors, states, strict=True):
            stream.wait_stream(origin)
            with torch.cuda.stream(stream):
                accumulate(x, state)
        for stream in streams:
            origin.wait_stream(stream)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    for x, state in zip(tensors, states, strict=True):
        assert int(state.counters[0]) == 20
        assert state.stats().total.count == 20 * x.numel()
        assert state.stats().total.mean == pytest.approx(float(x.double().mean()), abs=1e-5)


def test_more_streams_than_have_scratch_of_their_own_measure_at_once() -> None:
    streams = [torch.cuda.Stream() for _ in range(20)]
    tensors, states = [in_parts() + i for i in range(20)], [State(64, "none", "cuda") for _ in range(20)]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, x, state in zip(streams, tensors, states, strict=True):
            with torch.cuda.stream(stream):
                accumulate(x, state)
    torch.cuda.synchronize()
    for x, state in zip(tensors, states, strict=True):
        assert state.stats().total.count == 50 * x.numel()
        assert state.stats().total.mean == pytest.approx(float(x.double().mean()), abs=1e-5)


def test_the_scratch_of_deleted_graphs_is_used_again() -> None:
    x, state = in_parts(), State(64, "none", "cuda")
    accumulate(x, state)
    free = []
    for _ in range(40):
        graph_of(x, state).replay()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] > free[19] - (20 << 20)  # 20 pieces would be 76 MB


@pytest.mark.parametrize("totals", [False, True])
def test_a_step_that_is_closed_on_another_stream_has_all_and_takes_nothing_of_the_next_one(totals: bool) -> None:
    model = nn.Sequential(nn.Identity())
    mon = hookstats.attach(model, modules="0", every=1, channels=not totals)
    busy, x = torch.randn(4096, 4096, device="cuda"), in_parts()
    model(x)
    mon.reset()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    snapshots = []
    for _ in range(5):
        with torch.cuda.stream(side):
            for _ in range(10):
                busy = busy @ busy
            model(x)
        snapshots.append(mon.step())  # not ordered behind it
    found = [each for each in (*snapshots, *mon.detach()) if each is not None]
    assert [snapshot["0", "output"].calls for snapshot in found] == [1] * 5


def test_memory_of_a_monitor_that_is_gone_is_its_own_until_its_launches_have_ended() -> None:
    model, x, busy = nn.Sequential(nn.Identity()), in_parts(), torch.randn(4096, 4096, device="cuda")
    mon = hookstats.attach(model, modules="0", every=1)
    model(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            busy = busy @ busy
        model(x)
    mon._take_hooks_off()
    del mon
    gc.collect()
    others = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in range(512, 1 << 16, 512)]
    torch.cuda.synchronize()
    assert all(int(each.min()) == 255 for each in others)


def test_rows_that_are_made_after_a_fork_inside_a_capture_are_known_on_the_other_stream() -> None:
    model = nn.Linear(64, 64).cuda()
    mon = hookstats.attach(model, tensors="output", every=1)
    x, skip = torch.randn(5000, 64, device="cuda"), torch.rand(5000, device="cuda") < 0.5
    with torch.no_grad(), mon.ignore(skip):
        model(x)
    torch.cuda.synchronize()
    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        origin = torch.cuda.current_stream()
        other.wait_stream(origin)
        with mon.ignore(skip), torch.cuda.stream(other):
            model(x)
        origin.wait_stream(other)
    for _ in range(20):
        mon.reset()
        skip.copy_(torch.rand(5000, device="cuda") < 0.5)
        graph.replay()
        check(mon.snapshot()["", "output"], model(x)[~skip].detach(), -1)


def test_an_operator_that_is_captured_by_hand_may_outlive_its_state() -> None:
    x, state = in_parts(), State(64, "per_tensor", "cuda")
    graph = graph_of(x, state)
    del state
    gc.collect()
    others = [torch.ones(size, dtype=torch.int64, device="cuda") for size in (2, 512, 640) for _ in range(64)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((each == 1).all()) for each in others)


def test_a_batch_on_two_streams_at_once() -> None:
    x = torch.randn(1, 1 << 22, device="cuda")
    states = [State(1, "none", "cuda") for _ in range(2)]
    active = torch.ones(1, dtype=torch.int32, device="cuda")
    batches: list[Any] = [_native.Batch([state.site(0, active)]) for state in states]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(500):
        for stream, batch in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                assert batch.accumulate([x]) == []
    torch.cuda.synchronize()
    for state in states:
        assert state.stats().total.count == 500 * x.numel()
        assert state.stats().total.mean == pytest.approx(float(x.double().mean()), abs=1e-5)


def test_a_first_launch_in_a_capture_of_a_dtype_that_no_launch_had_before() -> None:
    program = (
        "import torch, hookstats; from torch import nn\n"
        "model = nn.Linear(64, 64, dtype=torch.bfloat16).cuda(); x = torch.randn(8, 64, device='cuda').bfloat16()\n"
        "model(x); mon = hookstats.attach(model, tensors='output', every=1); graph = torch.cuda.CUDAGraph()\n"
        "torch.cuda.synchronize()\n"
        "with torch.cuda.graph(graph), torch.no_grad(): model(x)\n"
        "mon.reset(); graph.replay(); print(mon.snapshot()['', 'output'].calls)"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == "1"
