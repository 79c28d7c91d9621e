"""Monitor.overhead: what hookstats takes of a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import _native
from hookstats.watch import overhead
from tests.models import Containers


def network() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))


def run(model: nn.Module, mon: hookstats.Monitor, steps: int, optimizer: Any = None) -> None:
    for _ in range(steps):
        model(torch.ones(8, 16)).square().sum().backward()
        if optimizer is not None:
            optimizer.step()
        mon.step()


def test_nothing_is_known_before_the_second_step() -> None:
    mon = hookstats.attach(network(), every=1)
    *times, every, rows = mon.overhead()
    assert all(map(math.isnan, times))
    assert (every, rows) == (1, 1)


def test_every_part_is_known_after_a_few_steps() -> None:
    model = network()
    mon = hookstats.attach(model, every=2)
    run(model, mon, 8)
    found = mon.overhead()
    assert 0 < found.skipped_host < math.inf
    assert 0 < found.measured_host < math.inf
    assert 0 < found.measured_step < math.inf
    assert 0 < found.skipped_step < math.inf


def test_sixteen_measured_steps_behind_the_first_two_are_timed_spread_over_the_run_and_then_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    times = _native.Times
    monkeypatch.setattr(_native, "Times", lambda: made.append(times()) or made[-1])
    model = network()
    mon = hookstats.attach(model, tensors=("output", "grad_output", "param"), every=1)
    when = []
    for step in range(82):
        before = len(made)
        run(model, mon, 1)
        when += [step + 1] * (len(made) - before)  # the next one is timed
    assert when == [*range(2, 10), *range(10, 74, 8)]
    assert [each.calls for each in made] == [5] * 16  # a hook of each module
    host = [each.host_us for each in made]
    assert min(host) > 0
    run(model, mon, 10)
    assert [each.host_us for each in made] == host


def test_the_parts_of_a_step_are_of_the_steps_that_the_whole_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is ten times as slow from step 12 on: the share of a step that is hookstats' stays as it was."""
    model = network()
    mon = hookstats.attach(model, every=1)
    run(model, mon, 80)
    watch = mon._stopwatch
    assert len(watch._timed) == len(watch._ended) == 16
    slow = [1] * 10 + [10] * 6
    timed = [SlowTimes(100.0 * factor) for factor in slow]
    ended = [(Moment(0), Moment(1000 * factor)) for factor in slow]
    monkeypatch.setattr(watch, "_timed", timed)
    monkeypatch.setattr(watch, "_ended", ended)
    monkeypatch.setattr(watch, "_us_of_a_hook", 0.0)
    found = mon.overhead()
    assert found.measured_host / found.measured_step == pytest.approx(0.1)


class SlowTimes:
    calls = 5

    def __init__(self, host_us: float) -> None:
        self.host_us = host_us


class Moment(overhead._Mark):
    def __init__(self, us: float) -> None:
        super().__init__(None)
        self.at = us / 1e6


def test_skipped_steps_are_known_though_none_but_the_first_is_measured() -> None:
    model = network()
    mon = hookstats.attach(model, every=1000)
    run(model, mon, 5)
    assert 0 < mon.overhead().skipped_host < math.inf


def test_what_happens_in_backward_and_in_the_optimizer_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    times = _native.Times
    monkeypatch.setattr(_native, "Times", lambda: made.append(times()) or made[-1])
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    mon = hookstats.attach(model, tensors=("grad_output", "param", "param_update"), every=1)
    run(model, mon, 2, optimizer)
    y = model(torch.ones(8, 16)).square().sum()
    seen = [made[-1].host_us]
    y.backward()
    seen.append(made[-1].host_us)
    optimizer.step()
    seen.append(made[-1].host_us)
    mon.step()
    seen.append(made[0].host_us)
    assert seen == sorted(set(seen))  # more after each of them


def test_what_is_in_containers_and_what_inputs_take_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    times = _native.Times
    monkeypatch.setattr(_native, "Times", lambda: made.append(times()) or made[-1])
    model = Containers("dict")
    mon = hookstats.attach(model, modules="*", tensors=("input", "output"), every=1)
    for _ in range(4):
        model(torch.ones(8, 6))
        mon.step()
    assert [each.calls for each in made[:2]] == [4, 4]  # two modules, an input and an output each
    assert min(each.host_us for each in made[:2]) > 0


def test_asking_changes_no_statistic() -> None:
    model = network()
    mon = hookstats.attach(model, every=1)
    model(torch.ones(8, 16)).sum().backward()
    before = mon.snapshot().flat()
    mon.overhead()
    assert mon.snapshot().flat() == before


@pytest.mark.gpu
def test_steps_are_timed_on_a_gpu_and_nothing_waits() -> None:
    model = network().cuda()
    mon = hookstats.attach(model, every=1)
    x = torch.ones(8, 16, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            model(x).square().sum().backward()
            mon.step()
        mon.overhead()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    found = mon.overhead()
    assert 0 < found.measured_step < math.inf


def test_no_time_is_told_between_two_streams() -> None:
    before, after = overhead._Mark(None), overhead._Mark(None)
    assert after.measure_since(before) is not None
    before.event, after.event = PastEvent(), PastEvent()  # type: ignore[assignment]
    assert after.measure_since(before) == 2000
    after.stream = "another"  # type: ignore[assignment]
    assert after.measure_since(before) is None


class PastEvent:
    def query(self) -> bool:
        return True

    def elapsed_time(self, other: PastEvent) -> float:
        return 2.0
