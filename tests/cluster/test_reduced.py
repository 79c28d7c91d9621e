"""The law of reduction: what an optimizer takes is the mean of what the ranks brought."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookstats.rules import Finding, judge, reduced_gradient
from tests import ranks
from tests.cluster.trainings import DDP, Case, Mlp, batch, measured

STEPS, BREAKS = 16, 6
TENSORS = ("output", "reduction")
CASES = (
    "healthy",
    "clipped",
    "accumulated",
    "summed",
    "averaged twice",
    "from the start",
    "one layer",
    "one not shared",
    "turned",
)
Found = dict[str, list[Finding]]  # by the case


def train(rank: int, world: int) -> Found:
    return {case: find(rank, world, case) for case in CASES}


def find(rank: int, world: int, case: str) -> list[Finding]:
    inner = Mlp()
    nn.init.normal_(inner.down.bias)
    model = DDP(inner)

    def loss(step: int) -> torch.Tensor:
        if case == "accumulated":
            with model.no_sync():
                (model(batch(step, 50 + rank)) - 1).square().mean().backward()
        return (model(batch(step, rank)) - 1).square().mean()

    def fault(step: int) -> bool:
        begun = step >= BREAKS
        for name, parameter in inner.named_parameters():
            gradient: Any = parameter.grad
            if case == "from the start" or (case == "averaged twice" and begun):
                gradient /= world
            if case == "summed":
                gradient *= world
            if case == "one layer" and begun and name.startswith("down"):
                gradient *= 4
            if case == "turned" and begun and name == "down.weight":
                half = gradient[: len(gradient) // 2]
                half.copy_(half.flip(1))  # the sums of its channels stay
            if case == "one not shared" and name.startswith("down"):
                gradient *= world
        if case == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return True

    made = Case(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, fault=fault)
    return judge(measured(world, made, STEPS, tensors=TENSORS), [reduced_gradient])


@pytest.fixture(scope="module")
def found() -> Found:
    first, *others = ranks.run(train, 3)
    assert list(map(repr, others)) == [repr(first)] * 2  # NaN, where no factor is known
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", ["healthy", "clipped", "accumulated", "summed"])
def test_a_mean_and_a_sum_of_what_ranks_brought_are_in_order(found: Found, case: str) -> None:
    assert found[case] == []


@pytest.mark.parametrize(("case", "since"), [("averaged twice", BREAKS), ("from the start", 0)])
def test_gradients_that_are_averaged_twice_are_named_with_the_step(found: Found, case: str, since: int) -> None:
    (finding,) = found[case]
    assert (finding.severity, finding.site, finding.since, finding.step) == ("critical", None, since, since + 1)
    assert "are 1/3 of the mean over 3 ranks of what these contributed" in finding.sentence


def test_a_layer_that_is_reduced_otherwise_is_named_with_the_factor(found: Found) -> None:
    told = found["one layer"]
    names = [each.site.name for each in told if each.site is not None]
    assert names
    assert set(names) <= {"down.weight", "down.bias"}
    assert len(names) == len(set(names))  # once, however it is seen
    for finding in told:
        assert (finding.severity, finding.since, finding.step) == ("critical", BREAKS, BREAKS + 1)
        assert "is 4 times what it is in" in finding.sentence


def test_a_layer_that_fewer_ranks_share_is_told_with_what_it_may_be(found: Found) -> None:
    for finding in found["one not shared"]:
        assert (finding.severity, finding.step) == ("critical", 1)
        assert finding.site.name.startswith("down")
        assert "fewer ranks share it, as with experts" in finding.sentence
    assert found["one not shared"]


def test_elements_tell_what_the_sums_of_channels_do_not(found: Found) -> None:
    (finding,) = found["turned"]
    assert (finding.site.name, finding.since) == ("down.weight", BREAKS)
    assert "sampled elements" in finding.sentence
    assert "is neither the mean of what 3 ranks contributed" in finding.sentence
