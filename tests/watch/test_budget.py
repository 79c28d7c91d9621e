"""attach(budget=0.01): what is chosen in a loop whose times are known, because the clock is ours."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats.watch import overhead
from tests import ranks

TIMED = 28  # steps, and ten of the chosen ones are read in full


class Clock:
    """Stands still but for what it is told, in seconds: so many that what really passes is nothing."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", made)
        yield made


def trained(
    clock: Clock, budget: float, cost: Callable[[int], float], steps: int, step_takes: float = 1000.0
) -> tuple[hookstats.Monitor, list[int]]:
    """Return the rows read in each step, 0 where it was not measured. cost: of a measured step, of so many rows."""

    def measuring(snapshot: hookstats.Snapshot) -> None:
        clock.now += cost(snapshot.rows)

    model = nn.Sequential(nn.Linear(16, 16))
    monitor = hookstats.attach(model, budget=budget, sinks=measuring)
    rows = []
    for _ in range(steps):
        clock.now += step_takes
        model(torch.ones(64, 16))
        snapshot = monitor.step()
        rows.append(0 if snapshot is None else snapshot.rows)
    return monitor, rows


def of_rows(rows: int) -> float:
    """10 seconds, and 40 for all rows."""
    return 10 + 40 / rows


@pytest.mark.parametrize(
    ("budget", "every", "rows"),
    [
        (0.06, 1, 1),
        (0.031, 1, 2),
        (0.021, 1, 4),
        (0.016, 1, 8),
        (0.0105, 2, 4),  # one of 8 rows would leave time for no more steps
        (0.007, 3, 4),
        (0.001, 16, 8),
    ],
)
def test_as_many_steps_as_fit_are_measured_and_then_as_many_rows(
    budget: float, every: int, rows: int, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hookstats"):
        monitor, read = trained(clock, budget, of_rows, TIMED + 20 * every)
    assert read[:3] == [1, 1, 1]
    assert read[3:27] == [0, 1, 8] * 8
    after = [each for each in read[TIMED:] if each]
    assert len(after) in (20, 21)
    assert after[:10] == [1] * 10
    assert set(after[10:]) == {rows}
    assert (monitor.overhead().every, monitor.overhead().rows) == (every, rows)
    assert f"with every={every} and rows={rows} about" in caplog.text
    spent = sum(map(of_rows, after[10:])) / (len(after[10:]) * every * 1000)
    assert spent <= budget


def test_what_hooks_take_of_steps_that_are_not_measured_counts(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "_us_of_a_hook", lambda hook: 2.5e6)  # of two modules
    with caplog.at_level(logging.INFO, "hookstats"):
        monitor, _ = trained(clock, 0.031, of_rows, TIMED + 2)
    assert (monitor.overhead().every, monitor.overhead().rows) == (1, 4)  # 26 seconds of 1,000 are left
    assert "a step takes 1000000.00 ms, 5000.00 of them for hooks" in caplog.text
    assert "about 2.6 % is added" in caplog.text


def test_what_hinders_a_single_step_of_a_kind_changes_nothing(clock: Clock) -> None:
    seen = iter(range(10**6))
    monitor, _ = trained(clock, 0.031, lambda rows: of_rows(rows) + 500 * (next(seen) % 4 == 0), TIMED + 2)
    assert (monitor.overhead().every, monitor.overhead().rows) == (1, 2)


def test_what_can_never_fit_is_measured_seldom_and_a_warning_says_so(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hookstats"):
        monitor, _ = trained(clock, 1e-6, of_rows, TIMED + 1)
    assert monitor.overhead().every == 1000
    assert "budget=1e-06: measuring one step in 1000 adds" in caplog.text


def test_nothing_is_known_of_a_choice_before_it_is_made(clock: Clock) -> None:
    monitor, _ = trained(clock, 0.01, of_rows, TIMED - 1)
    assert monitor.overhead().every != monitor.overhead().every  # NaN


@pytest.mark.parametrize("given", [{"every": 1}, {"rows": 8}, {"every": lambda step: True}])
def test_what_it_chooses_is_not_given_beside_it(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="budget: expected neither every= nor rows=, which it chooses; got every="):
        hookstats.attach(nn.Linear(4, 4), budget=0.01, **given)


def of_a_rank(rank: int, world: int) -> tuple[float, float]:
    """Train on two ranks, one of which takes twice as long for measuring."""
    clock = Clock()
    time.perf_counter = clock
    model = nn.Sequential(nn.Linear(16, 16))
    with hookstats.attach(model, budget=0.06, process_group=torch.distributed.group.WORLD) as monitor:
        for step in range(TIMED + 2):
            is_measured = step < 3 or step % 3
            clock.now += 1000 + 50 * (1 + rank) * bool(is_measured)
            model(torch.ones(64, 16))
            monitor.step()
        found = monitor.overhead()
    return found.every, found.rows


def test_ranks_choose_alike() -> None:
    one, other = ranks.run(of_a_rank, 2)
    assert one == other == (2, 1)
