"""Answers that guards of compiled graphs read: kept for backwards to come, over threads, and only with monitors."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstats
from hookstats import _native
from hookstats.watch.guards import Now


def test_what_was_answered_long_ago_is_forgotten_with_its_rows() -> None:
    now = Now()
    assert not now.measured
    part = now.add(_native.Enabled(torch.ones(1, dtype=torch.int32)))
    assert now.measured
    rows = (torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    before = sys.getrefcount(rows)
    for _ in range(200):
        now.set_rows(threading.get_ident(), "monitor", [rows])
        assert now.rows == {"monitor": (rows,)}
        now.set_rows(threading.get_ident(), "monitor", [])
        assert now.rows == {}
    held = sys.getrefcount(rows)  # outside of an assert, which would hold it, too
    part.remove()
    left = sys.getrefcount(rows)
    assert left == before < held <= before + 2 * 32
    assert not now.measured


@pytest.mark.usefixtures("only_monitors")
@pytest.mark.parametrize("case", ["a thread after another", pytest.param("two threads", marks=pytest.mark.glue)])
def test_a_recomputation_runs_the_program_of_its_forward_in_whatever_thread_that_ran(case: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    compiled = torch.compile(model, backend="aot_eager")

    def forward() -> torch.Tensor:
        return checkpoint(compiled, torch.randn(2, 4, requires_grad=True), use_reentrant=False).sum()

    def steps(number: int, forwards: int) -> None:
        for _ in range(number):
            for _ in range(forwards):
                forward().backward()
            mon.step()

    every = 3 if case == "a thread after another" else 2
    with hookstats.attach(model, every=every) as mon, ThreadPoolExecutor(1) as first:
        if case == "a thread after another":
            first.submit(steps, 2, 6).result()
            first.shutdown()  # the next one may have its identity, and counts its nodes anew
            with ThreadPoolExecutor(1) as second:
                second.submit(steps, 1, 1).result()
        else:
            first.submit(steps, 2, 1).result()
            with ThreadPoolExecutor(1) as second:
                losses = second.submit(lambda: [forward() for _ in range(20)]).result()
            first.submit(losses[-1].backward).result()


def test_a_monitor_that_the_collector_of_garbage_ends_while_another_is_detached_is_gone() -> None:
    class Model:
        """A model that only itself holds."""

        def __init__(self) -> None:
            self.me = self

    thresholds = gc.get_threshold()
    try:
        for objects in range(1, 60):  # until the collector runs
            gc.disable()
            gc.collect()
            now = Now()
            detached, collected = (now.add(_native.Enabled(torch.ones(1, dtype=torch.int32))) for _ in range(2))
            weakref.finalize(Model(), collected.remove)
            gc.set_threshold(gc.get_count()[0] + objects, 1000, 1000)
            gc.enable()
            detached.remove()
            gc.disable()
            gc.collect()
            assert now.monitors == 0
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
