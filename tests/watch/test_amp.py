"""Mixed precision with a GradScaler: gradients without its scale, and the steps that it skipped."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from tests import ranks, reference
from tests.plain import Operators

Tensors = dict[tuple[str, str], torch.Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3))


def batch() -> torch.Tensor:
    return torch.randn(40, 12, generator=torch.Generator().manual_seed(2))


def gradients_without_a_scaler() -> Tensors:
    """Return the gradients of every module's output, by plain hooks, in float64."""
    model, found = network().double(), {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda g: found.update({(name, "grad_output"): g}))

        return hook

    for name, module in model.named_children():
        module.register_forward_hook(keep(name))
    model(batch().double()).square().mean().backward()
    return found


def train(model: nn.Module, optimizer: Any, scaler: Any, times: float = 1.0) -> None:
    scaler.scale(model(batch()).square().mean() * times).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("scale", [1024.0, 3.0])
@pytest.mark.parametrize(
    "bins", [hookstats.ExponentBins(), hookstats.ExponentBins(per_channel=True), hookstats.LinearBins(-16, 16, 64)]
)
def test_gradients_are_reported_without_the_scale(scale: float, bins: Any) -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
    mon = hookstats.attach(model, tensors=("grad_output", "output"), histogram=bins)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    snapshot = mon.step()
    assert snapshot.grad_scale == scale
    for site, gradient in gradients_without_a_scaler().items():
        stats, wanted = snapshot[site], gradient.numpy()
        for c, row in enumerate(wanted.T):
            for name, value in reference.statistics(row).items():
                atol = 1e-5 * row.std() if name == "mean" else 0.0
                got = getattr(stats.channels, name)[c]
                np.testing.assert_allclose(got, value, rtol=1e-4, atol=atol)  # of a backward in float32
        histogram = stats.histogram
        by_channel = histogram.counts.ndim == 2
        if not by_channel:
            counts = np.histogram(wanted, histogram.edges)[0]
            assert np.abs(counts - histogram.counts).sum() <= 4  # rounding takes two over an edge, say
            assert counts.sum() > 0.9 * wanted.size
        quantile = np.quantile(np.abs(wanted) if by_channel else wanted, 0.8, axis=0 if by_channel else None)
        bin_of = [np.searchsorted(histogram.edges, q) for q in (stats.quantile(0.8), quantile)]
        assert np.abs(bin_of[0] - bin_of[1]).max() <= 1
    with torch.no_grad():
        output = network()[0](batch())
    np.testing.assert_allclose(snapshot["0", "output"].total.rms, output.square().mean().sqrt(), rtol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_is_marked(fused: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1)
    mon = hookstats.attach(model, every=1)
    marks, scales = [], []
    for times in (1.0, 1e38, 1.0):
        train(model, optimizer, scaler, times)
        snapshot = mon.step()
        marks.append(snapshot.overflowed)
        scales.append(snapshot.grad_scale)
    assert marks == [False, True, False]
    assert scales == [2.0**20, 2.0**21, 2.0**20]  # doubled after a good step, halved after an overflow


def test_the_scale_is_that_of_the_step_also_where_few_are_measured() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    mon = hookstats.attach(model, every=3)
    seen = {}
    for _ in range(5):
        train(model, optimizer, scaler)
        snapshot = mon.step()
        if snapshot is not None:
            seen[snapshot.step] = snapshot.grad_scale, snapshot.overflowed
    assert seen == {0: (16.0, False), 3: (128.0, False)}


def test_an_optimizer_of_another_model_says_nothing_about_this_one() -> None:
    model, other = network(), network()
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-4) for each in (model, other)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    mon = hookstats.attach(model, every=1)
    scaler.scale(model(batch()).square().mean() * 1e38 + other(batch()).square().mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    snapshot = mon.step()
    assert snapshot.overflowed is True


@pytest.mark.parametrize("with_scaler", [False, True])
def test_no_scalar_of_the_user_is_taken_for_the_scalers(with_scaler: bool) -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=with_scaler)
    mon = hookstats.attach(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    own = {"grad_scale": 2.0, "overflowed": True, "scale": 3.0}
    snapshot = mon.step(**own, loss=torch.tensor(7.0))
    assert snapshot.scalars == own | {"loss": 7.0}
    assert (snapshot.grad_scale, snapshot.overflowed) == ((64.0, False) if with_scaler else (None, None))
    wanted = gradients_without_a_scaler()["2", "grad_output"].square().mean().sqrt()
    np.testing.assert_allclose(snapshot["2", "grad_output"].total.rms, wanted, rtol=1e-4)


def test_the_scaler_of_another_model_says_nothing_of_this_one() -> None:
    model, other = network(), network()
    mon = hookstats.attach(model, every=1)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=64.0))
    model(batch()).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    snapshot = mon.step()
    assert (snapshot.grad_scale, snapshot.overflowed) == (None, None)


def test_a_step_that_is_not_measured_runs_no_operator_for_its_scaler() -> None:
    taken = []
    for is_watched in (False, True):
        model, scaler = network(), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mon = hookstats.attach(model, every=10) if is_watched else None
        for step in range(3):
            with Operators() as operators:
                train(model, optimizer, scaler)
            if step < 2 and mon is not None:
                mon.step()
        taken.append(operators.names)
    assert taken[0] == taken[1] != []


def watch_and_leave(rank: int, world: int) -> list[bool]:
    method, found = torch.amp.GradScaler.step, []
    first, second, third = (hookstats.attach(network()) for _ in range(3))
    found.append(torch.amp.GradScaler.step is method)
    first.detach()
    del second
    gc.collect()
    found.append(torch.amp.GradScaler.step is method)
    third.detach()
    return [*found, torch.amp.GradScaler.step is method]


def test_the_method_of_torch_is_back_when_the_last_monitor_is_gone() -> None:
    assert ranks.run(watch_and_leave, 1, init="") == [[False, False, True]]


def test_the_scale_that_is_loaded_after_attach_is_the_one_that_counts() -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    mon = hookstats.attach(model)
    saved = torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict()
    scaler.load_state_dict(saved)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    snapshot = mon.step()
    assert snapshot.grad_scale == 1024
    wanted = gradients_without_a_scaler()["2", "grad_output"].square().mean().sqrt()
    np.testing.assert_allclose(snapshot["2", "grad_output"].total.rms, wanted, rtol=1e-4)


def test_a_step_that_is_still_open_or_accumulates_has_not_overflowed() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    mon = hookstats.attach(model, every=1)
    marks = []
    for microbatch in range(4):
        scaler.scale(model(batch()).square().mean()).backward()
        assert not mon.snapshot().overflowed
        if microbatch % 2:
            scaler.step(optimizer)
            scaler.update()
        marks.append(mon.step())
    assert [each.overflowed for each in marks if each is not None] == [None, False, False, False]


def test_one_of_two_optimizers_that_is_skipped_is_marked() -> None:
    model = network()
    optimizers = [torch.optim.SGD(module.parameters(), lr=1e-4) for module in (model[0], model[2])]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    mon = hookstats.attach(model, every=1)
    scaler.scale(model(batch()).square().mean()).backward()
    model[0].weight.grad.fill_(float("inf"))
    before = model[2].weight.detach().clone()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    snapshot = mon.step()
    assert snapshot.overflowed is True
    assert not torch.equal(model[2].weight, before)  # the other one stepped


def test_a_scaler_that_fails_does_not_stop_training_and_no_earlier_scale_is_taken() -> None:
    class Broken(torch.amp.GradScaler):
        broken = False

        def is_enabled(self) -> bool:
            if self.broken:
                raise RuntimeError("no scale")
            return True

    scaler, model = Broken("cpu", init_scale=1024.0), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scales = []
    with hookstats.attach(model, every=1) as monitor:
        for scaler.broken in (False, True, False):
            before = model[0].weight.detach().clone()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                train(model, optimizer, scaler)
            assert [str(each.message) for each in told if "GradScaler failed" in str(each.message)] == (
                ["hookstats: the GradScaler failed, gradients are reported with its scale: RuntimeError('no scale')"]
                if scaler.broken
                else []
            )
            assert not torch.equal(model[0].weight, before)
            snapshot = monitor.step()
            scales.append((snapshot.grad_scale, snapshot.overflowed))
    assert scales == [(1024.0, False), (None, None), (1024.0, False)]


def test_under_strict_a_scaler_that_fails_raises() -> None:
    class Broken(torch.amp.GradScaler):
        def is_enabled(self) -> bool:
            raise RuntimeError("no scale")

    model = network()
    with (
        hookstats.attach(model, every=1, options=hookstats.Options(strict=True)),
        pytest.raises(RuntimeError, match="no scale"),
    ):
        train(model, torch.optim.SGD(model.parameters(), lr=1e-4), Broken("cpu"))
