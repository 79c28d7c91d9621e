"""Several threads run one watched model, or one closes steps while others run: nothing is lost, twice or torn."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from tests.conftest import ROOT
from tests.models import Containers


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], object], threads: int = 8) -> None:
    """Calls work(0), work(1), ... on threads that begin together; raises what one of them raised."""
    begin, errors = threading.Barrier(threads), []

    def run(number: int) -> None:
        begin.wait()
        try:
            work(number)
        except Exception as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


class Meeting(nn.Module):
    """Everything whose sites are made when it is first seen: a container, a width learned late, a tapped tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.containers = Containers("dict")
        self.relu, self.tanh = nn.ReLU(), nn.Tanh()
        self.tap: Callable[[torch.Tensor, str], torch.Tensor] = lambda tensor, name: tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.containers(x)
        return self.tap(self.tanh(self.relu(seen["logits"]) + seen["hidden"]), "sum")


@pytest.mark.usefixtures("often_interrupted")
def test_sites_that_several_threads_meet_first_at_once_are_made_once() -> None:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(25):
        model = Meeting()
        mon = hookstats.attach(model, "*", every=1, tensors="output")
        model.tap = mon.tap
        with torch.no_grad():
            at_once(lambda _, model=model: model(x))
            y = model.containers(x)
            want = {
                ("containers", "output.logits"): y["logits"],
                ("containers", "output.hidden"): y["hidden"],
                ("relu", "output"): y["logits"].relu(),
                ("sum", "output"): (y["logits"].relu() + y["hidden"]).tanh(),
            }
        taken = mon.snapshot()
        assert len(set(mon.sites)) == len(mon.sites)
        extra = {"containers": 1}  # of the call above, without a hook's tap
        for site, tensor in want.items():
            calls = 8 + extra.get(site[0], 0)
            assert taken[site].calls == calls, site
            assert taken[site].total.count == calls * tensor.numel(), site
            assert taken[site].total.mean == pytest.approx(tensor.double().mean().item(), rel=1e-5), site
        states = [entry.state for entry in mon._store.entries]
        places = sorted((s.moments.data_ptr(), s.moments.numel()) for s in states)
        assert all(a + 8 * n <= b for (a, n), (b, _) in itertools.pairwise(places))


@pytest.mark.parametrize("channels_every", [1, 2])
@pytest.mark.parametrize("rows", [2, 32], ids=["small", "without the GIL"])
def test_steps_that_are_closed_beside_forwards_take_what_is_there_whole_and_once(
    rows: int, channels_every: int
) -> None:
    width = 2048  # so many channels that copying and clearing them takes a while
    model = nn.Linear(4, width).requires_grad_(False)
    mon = hookstats.attach(model, every=1, tensors="output", channels=hookstats.Channels(every=channels_every))
    x = torch.randn(rows, 4)
    done, forwards = threading.Event(), [0] * 3

    def run(number: int) -> None:
        while not done.is_set():
            model(x)
            forwards[number] += 1

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    snapshots: list[Snapshot] = []
    while len(snapshots) < 300:
        snapshot = mon.step()
        assert snapshot is not None
        snapshots.append(snapshot)
    done.set()
    for thread in threads:
        thread.join()
    model(x)  # of an empty open step, `snapshot` is the last one again
    forwards.append(1)
    snapshots.append(mon.snapshot())
    sites = [snapshot["", "output"] for snapshot in snapshots]
    assert all(site.total.count == site.calls * rows * width for site in sites)
    assert all(site.histogram is None or site.histogram.counts.sum() == site.total.count for site in sites)
    assert sum(site.calls for site in sites) == sum(forwards)


def test_optimizers_of_other_threads_do_not_look_like_outer_ones() -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    done, wrong = threading.Event(), []

    def spin() -> None:
        while not done.is_set():
            stranger.step()

    def train(number: int) -> None:
        model = models[number]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        mon = hookstats.attach(model, tensors=("param_grad", "param_update"), every=1)
        for _ in range(100):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            snapshot = mon.step()
            wrong.extend(site for site in mon.sites if snapshot is None or snapshot[site].calls != 1)

    spinning = threading.Thread(target=spin)
    spinning.start()
    try:
        at_once(train, threads=2)
    finally:
        done.set()
        spinning.join()
    assert wrong == []


def test_closing_a_step_under_a_dispatch_mode_waits_for_no_thread_that_waits_for_it() -> None:
    code = """
import sys, threading, torch, hookstats
sys.setswitchinterval(1e-5)  # so that it meets the thread often, and waits for it no longer
from torch.utils.flop_counter import FlopCounterMode
model = torch.nn.Linear(4, 4096).requires_grad_(False)
mon = hookstats.attach(model, every=1, tensors="output", channels=hookstats.Channels(every=2))
done, x = threading.Event(), torch.randn(4, 4)
def run():
    while not done.is_set():
        model(x)
thread = threading.Thread(target=run, daemon=True)
thread.start()
with FlopCounterMode(display=False):
    for _ in range(80):
        mon.step()
        mon.reset()
done.set()
thread.join()
print("closed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout == "closed\n", done.stderr
