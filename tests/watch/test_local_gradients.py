"""``"param_grad_local"``: a rank's own gradients, of each backward, before ranks reduce them."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hookstats
from tests import ranks
from tests.plain import hearing

BOTH = ("param_grad_local", "param_grad")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def own_gradients(seeds: list[int]) -> dict[str, list[torch.Tensor]]:
    """Return each seed's gradients, from a backward each."""
    found: dict[str, list[torch.Tensor]] = {}
    for seed in seeds:
        model = network()
        model(batch(seed)).square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found.setdefault(name, []).append(parameter.grad)
    return found


@pytest.mark.parametrize("is_clipped", [False, True])
def test_sampled_elements_are_those_of_each_backward_and_of_what_the_optimizer_takes(is_clipped: bool) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    options = hookstats.Options(strict=True)
    monitor = hookstats.attach(model, tensors=("reduction",), every=1, options=options)
    for seed in (1, 2):
        model(batch(seed)).square().mean().backward()
    if is_clipped:
        monitor.measure_gradients()  # before
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    snapshot = monitor.step()
    for name, gradients in own_gradients([1, 2]).items():
        elements = sum(gradients).flatten().double()  # type: ignore[union-attr]
        places = torch.linspace(0, len(elements) - 1, min(len(elements), 64)).long()
        local, reduced = (snapshot[name, f"reduction.{kind}"] for kind in ("local", "reduced"))
        assert (local.calls, reduced.calls) == (2, 1)
        for stats in (local, reduced):
            sums = stats.channels.mean * stats.calls
            assert np.allclose(sums, elements[places].numpy(), rtol=1e-5, atol=1e-8), name


def test_a_parameter_that_is_replaced_by_a_smaller_one_is_left_out() -> None:
    model = network()
    monitor = hookstats.attach(model, tensors=("reduction",), every=1)
    model[0].weight = nn.Parameter(torch.zeros(10, 3))
    model(batch(1)[:, :3]).square().mean().backward()
    monitor.step()  # it is found when a step ends
    with pytest.warns(UserWarning, match="expected a gradient of 60 elements, as before, got one of 30"):
        model(batch(1)[:, :3]).square().mean().backward()
    assert monitor.detach() == []


def test_nothing_is_measured_in_other_steps_and_nothing_is_left_on_the_model() -> None:
    model = network()
    monitor = hookstats.attach(model, tensors=BOTH, every=2)
    for step in range(4):
        model(batch(step)).square().mean().backward()
        snapshot = monitor.step()
        assert (snapshot is not None) == (step % 2 == 0)
        if snapshot is not None:
            assert snapshot["0.weight", "param_grad_local"].calls == 1
    copy.deepcopy(model)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    monitor.detach()
    del model
    gc.collect()
    assert not any(each() for each in parameters)


def test_what_autograd_is_asked_for_is_no_backward_and_new_parameters_are_watched() -> None:
    model = network()
    monitor = hookstats.attach(model, tensors=BOTH, every=1)
    calls = []
    for step in range(4):
        torch.autograd.grad(model(batch(step)).square().mean(), list(model.parameters()))
        model(batch(step)).square().mean().backward()
        snapshot = monitor.step()
        calls.append({snapshot[name, "param_grad_local"].calls for name, _ in model.named_parameters()})
        if step == 1:
            state = {name: each.clone() for name, each in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
    assert calls == [{1}, {1}, {0}, {1}]  # found when the next step ends
    with pytest.raises(ZeroDivisionError):
        raise_in_backward(model)
    assert monitor.detach() == []


def raise_in_backward(model: nn.Module) -> None:
    """Raise in backward, as training's own hooks may."""

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    output = model(batch(0))
    output.register_hook(fail)
    output.sum().backward()


def test_a_frozen_parameter_has_none_and_a_gradient_behind_a_scaler_is_unscaled() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor = hookstats.attach(model, tensors=BOTH, every=1)
    scaler.scale(model(batch(1)).square().mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    snapshot = monitor.step()
    assert ("0.weight", "param_grad_local") not in snapshot
    for name in ("0.bias", "2.weight", "2.bias"):
        ours, reduced = (snapshot[name, kind].total.rms for kind in BOTH)
        assert ours == pytest.approx(reduced, rel=1e-6)


def reduces(rank: int, world: int, twice: bool) -> Any:
    model = nn.parallel.DistributedDataParallel(network())
    monitor = hookstats.attach(model, tensors=BOTH, every=1, process_group=dist.group.WORLD)
    with model.no_sync():
        model(batch(rank)).square().mean().backward()
    model(batch(10 + rank)).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= world if twice else 1
    (snapshot,) = [each for each in (monitor.step(), *monitor.detach()) if each is not None]
    assert snapshot.ranks == tuple(range(world))
    assert snapshot.drifts == ()
    return {
        name: (snapshot[name, "param_grad_local"].calls, *(snapshot[name, kind].total.mean for kind in BOTH))
        for name, _ in network().named_parameters()
    }


@pytest.mark.parametrize("twice", [False, True])
def test_what_is_reduced_is_the_sum_over_backwards_of_the_mean_over_ranks_or_not(twice: bool) -> None:
    (found, *others) = ranks.run(reduces, 2, twice)
    assert others == [found]
    wanted = own_gradients([0, 1, 10, 11])
    for name, (calls, ours, reduced) in found.items():
        assert calls == 4
        mean = float(np.mean([each.double().mean().item() for each in wanted[name]]))
        assert ours == pytest.approx(mean, rel=1e-5, abs=1e-9)
        assert reduced == pytest.approx(2 * mean / (2 if twice else 1), rel=1e-5, abs=1e-9)


def sharded(rank: int, world: int) -> Any:
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (world,)))
    with hearing() as told:
        monitor = hookstats.attach(model, tensors=BOTH, every=1)
        model(batch(rank)).square().mean().backward()
        snapshot = monitor.step()
    return {str(each.reason) for each in monitor.skipped.values()}, told, len(snapshot.order)


def test_under_fsdp2_it_is_left_out_with_its_reason() -> None:
    for reasons, told, fired in ranks.run(sharded, 2):
        assert reasons == {"FSDP2 reduces a gradient before anybody can see it: torch has no public hook at that point"}
        assert fired == 4
        assert len(told) == 1
