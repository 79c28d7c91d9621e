"""The law of biases on ranks: DDP before and after the reduction, FSDP2; in channels of all ranks together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hookstats.rules import Finding, bias_gradient, judge
from tests import ranks
from tests.cluster.trainings import Case, measured

STEPS, BREAKS, WIDTH = 10, 4, 16
TENSORS = ("output", "grad_output", "param_grad")
LOCAL = (*TENSORS, "param_grad_local")
CASES: dict[str, tuple[str, ...]] = {
    "ddp, healthy": LOCAL,
    "ddp, divided once more": TENSORS,
    "ddp, channels of one rank": TENSORS,
    "ddp, before the reduction": LOCAL,
    "fsdp, healthy": TENSORS,
    "fsdp, times eight": TENSORS,
    "fsdp, times the ranks": TENSORS,
}


def trained(rank: int, world: int) -> dict[str, list[Finding]]:
    return {case: findings(rank, world, case) for case in CASES}


def findings(rank: int, world: int, case: str) -> list[Finding]:
    torch.manual_seed(0)
    inner: Any = nn.Sequential(
        nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
    )
    begun = [False]
    if case == "ddp, before the reduction":  # what a hook on a parameter does comes before DDP takes its gradient
        inner[2].bias.register_hook(lambda gradient: 3 * gradient if begun[0] else gradient)
    model = inner
    if case.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(inner)
    else:
        fully_shard(inner, mesh=init_device_mesh("cpu", (world,)))

    def forward(step: int, half: int) -> torch.Tensor:
        return model(torch.randn(32, 8, generator=torch.Generator().manual_seed(100 * step + 10 * half + rank)))

    def loss(step: int) -> torch.Tensor:
        begun[0] = step >= BREAKS
        if case.startswith("ddp"):
            y = forward(step, 0)
            with model.no_sync():
                y.logsumexp(1).mean().backward()
        else:
            (forward(step, 0) - 1).square().mean().backward()
        return (forward(step, 1) - 1).square().mean()

    def fault(step: int) -> bool:
        gradient = inner[2].bias.grad
        if begun[0] and case == "ddp, divided once more":
            gradient /= world
        if begun[0] and case == "ddp, channels of one rank":
            gradient[WIDTH // world :] *= world
        if begun[0] and case in ("fsdp, times eight", "fsdp, times the ranks"):
            gradient.to_local().mul_(8 if case == "fsdp, times eight" else world)
        return True

    made = Case(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, fault=fault)
    return judge(measured(world, made, STEPS, tensors=CASES[case]), [bias_gradient])


@pytest.fixture(scope="module")
def found() -> dict[str, list[Finding]]:
    return ranks.run(trained, 2)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", ["ddp, healthy", "fsdp, healthy"])
def test_gradients_that_are_averaged_over_ranks_keep_the_law(found: dict[str, list[Finding]], case: str) -> None:
    assert found[case] == []


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        ("ddp, divided once more", 0.5),
        ("ddp, channels of one rank", 2.0),
        ("fsdp, times eight", 8.0),
        ("fsdp, times the ranks", 2.0),
    ],
)
def test_a_fault_after_the_reduction_is_found_with_its_place_and_factor(
    found: dict[str, list[Finding]], case: str, factor: float
) -> None:
    (finding,) = found[case]
    assert (finding.site.name, finding.severity, finding.step) == ("2.bias", "critical", BREAKS + 1)
    assert finding.value == pytest.approx(factor, rel=1e-3)
    assert ("in channels 8 to 15 of 16" in finding.sentence) == (case == "ddp, channels of one rank")


def test_a_fault_before_the_reduction_is_in_the_ranks_own_gradients_too(found: dict[str, list[Finding]]) -> None:
    cases = {each.site.tensor: each for each in found["ddp, before the reduction"]}
    assert set(cases) == {"param_grad", "param_grad_local"}
    for each in cases.values():
        assert (each.site.name, each.step, each.value) == ("2.bias", BREAKS + 1, pytest.approx(3.0, rel=1e-3))
