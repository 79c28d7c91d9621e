"""Parameters and their gradients: what is measured, and when."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hookstats
from hookstats import Site, Snapshot
from hookstats.watch import optimizers
from hookstats.watch.parameters import Parameters
from tests.models import small_cnn
from tests.plain import hearing
from tests.watch.parameters import BOTH, check_site, loss_of, residual


def test_without_gradients_watched_there_is_no_norm() -> None:
    mon = hookstats.attach(residual(), tensors="param", every=1)
    snapshot = mon.step()
    assert snapshot.grad_norm is None


def test_channels_are_outputs() -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 5, 3),
            "transposed": nn.ConvTranspose2d(3, 5, 2),
            "embedding": nn.Embedding(7, 4),
            "norm": nn.BatchNorm2d(6),
        }
    ).to(memory_format=torch.channels_last)
    mon = hookstats.attach(model, tensors="param", every=1)
    snapshot = mon.step()
    check_site(snapshot, "conv.weight", "param", model["conv"].weight)
    check_site(snapshot, "transposed.weight", "param", model["transposed"].weight, channel_dim=1)
    check_site(snapshot, "embedding.weight", "param", model["embedding"].weight)
    check_site(snapshot, "norm.weight", "param", model["norm"].weight)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ("*.weight", {"0.weight", "1.weight", "3.weight", "7.weight"}),
        ("3", {"3.weight", "3.bias"}),
        (["7.bias", "0"], {"7.bias", "0.weight"}),
        (lambda name, module: isinstance(module, nn.Linear), {"7.weight", "7.bias"}),
        (None, {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias", "7.weight", "7.bias"}),
    ],
)
def test_parameters_are_chosen_by_their_own_names_or_their_modules(modules: Any, expected: set[str]) -> None:
    mon = hookstats.attach(small_cnn(), modules, tensors="param")
    assert {site.name for site in mon.sites} == expected


def test_names_are_clean_and_shared_parameters_have_one() -> None:
    model = residual()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    compiled = torch.compile(model, backend="eager")
    mon = hookstats.attach(compiled, "blocks.*.up*", tensors="param")
    weights = [site.name for site in mon.sites if site.name.endswith("weight")]
    assert weights == ["blocks.0.up.weight", "blocks.2.up.weight"]


def test_a_parameter_that_is_unfrozen_is_watched_from_then_on() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with hearing() as told, hookstats.attach(model, every=1) as monitor:
        for step in range(5):
            if step == 2:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            model(torch.randn(32, 8)).square().mean().backward()
            gradient = None if model[0].weight.grad is None else model[0].weight.grad.clone()
            optimizer.step()
            snapshot = monitor.step()
            assert snapshot is not None
            assert (Site("0.weight", "param_grad") in snapshot) == (step >= 2)
            if gradient is not None:
                check_site(snapshot, "0.weight", "param_grad", gradient)
    assert snapshot["0.bias", "update_sample"].total.count == 16
    assert told == []


def test_an_unfrozen_parameter_without_room_is_skipped_and_said() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))
    model[0].requires_grad_(False)

    def attach(budget: int) -> hookstats.Monitor:
        options = hookstats.Options(memory_budget=budget)
        return hookstats.attach(model, every=1, tensors="param_grad", options=options)

    with pytest.raises(ValueError, match="expected at least") as refused:
        attach(1)
    least = re.search(r"at least (\d+) bytes", str(refused.value))
    assert least is not None
    with attach(int(least[1])) as monitor:
        model[0].requires_grad_(True)
        model(torch.randn(4, 8)).sum().backward()
        with pytest.warns(UserWarning, match="would not fit into what is left of memory_budget"):
            snapshot = monitor.step()
        assert snapshot is not None
        assert {site.name for site in snapshot.skipped} == {"0.weight", "0.bias"}


def test_paused_and_detached_monitors_measure_nothing() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    with mon.paused():
        optimizer.step()
        assert not mon.snapshot().order
    assert mon.step() is not None  # what was not read before is read when the step ends
    mon.detach()
    optimizer.step()
    assert mon.snapshot().step == 0
    assert mon._parameters not in watched()


def test_without_steps_the_last_snapshot_has_the_parameters() -> None:
    got: list[Snapshot] = []
    model = residual()
    with hookstats.attach(model, tensors="param", sinks=got.append):
        pass
    assert got[0]["head.weight", "param"].calls == 1


def test_a_forgotten_monitor_keeps_nothing_alive_and_measures_nothing() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    parameters, head = weakref.ref(mon._parameters), weakref.ref(model.head.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    del mon
    gc.collect()
    assert parameters() is None
    optimizer.step()
    other = hookstats.attach(model, tensors=BOTH)
    del model, optimizer
    gc.collect()
    assert head() is None
    other.step()
    other.detach()


def watched() -> list[Parameters]:
    """By all monitors."""
    return [each for held in optimizers._watched if (each := held()) is not None]


def test_forgotten_monitors_watch_no_optimizer_any_more() -> None:
    before = watched()
    for _ in range(3):
        hookstats.attach(residual(), tensors=BOTH)
    gc.collect()
    assert watched() == before


def test_only_the_first_attach_changes_what_steps_of_other_threads_iterate_over() -> None:
    first = hookstats.attach(residual(), tensors=BOTH)
    walks = [iter(hooks.values()) for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    first.detach()
    hookstats.attach(residual(), tensors=BOTH).detach()
    for walk in walks:
        list(walk)  # RuntimeError, had it changed


def test_asking_before_backward_spoils_nothing() -> None:
    model = residual()
    mon = hookstats.attach(model, tensors=BOTH, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mon.snapshot()
    loss_of(model).backward()
    assert mon.snapshot()["head.weight", "param_grad"].calls == 1
    optimizer.step()
    taken = mon.step()
    assert {stats.calls for stats in taken.values()} == {1}


def test_lazy_parameters_are_read_when_they_are_there() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    mon = hookstats.attach(model, tensors=(*BOTH, "param_update"), every=1)
    model(torch.randn(5, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    taken = mon.step()
    assert {stats.calls for stats in taken.values()} == {1}
    assert taken["0.weight", "param"].total.count == 12
