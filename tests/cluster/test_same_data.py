"""Ranks that are given the same data are told so, by the model's input or by its last output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hookstats.rules import Finding, judge, same_data
from tests import ranks
from tests.cluster.trainings import DDP, Case, measured

CASES = ("equal batches", "own batches", "one batch is another", "equal ids", "own ids", "inputs of one value")


def trained(rank: int, world: int) -> dict[str, list[Finding]]:
    return {case: judge(measured(world, training_of(rank, case)), [same_data]) for case in CASES}


def training_of(rank: int, case: str) -> Case:
    torch.manual_seed(0)
    first = nn.Embedding(32, 16) if "ids" in case else nn.Linear(16, 16)
    model = DDP(nn.Sequential(first, nn.Tanh(), nn.Linear(16, 4)))

    def loss(step: int) -> torch.Tensor:
        is_own = case in ("own batches", "own ids") or (case == "one batch is another" and step == 6)
        chosen = torch.Generator().manual_seed(step + 100 * rank * is_own)
        x = torch.randint(32, (8,), generator=chosen) if "ids" in case else torch.randn(8, 16, generator=chosen)
        if case == "inputs of one value":
            x = torch.ones(8, 16)
            with torch.no_grad():
                first.weight[0, 0] = rank  # so that outputs differ
        return model(x).square().mean()

    return Case(model, torch.optim.SGD(model.parameters(), 0.1), loss)


@pytest.fixture(scope="module")
def found() -> Any:
    return ranks.run(trained, 2)[0]


@pytest.mark.parametrize("case", ["equal batches", "equal ids"])
def test_ranks_that_draw_the_same_are_told_so(found: Any, case: str) -> None:
    (note,) = found[case]
    assert (note.rule, note.severity, note.step) == ("same-data", "note", 9)
    assert "all 2 ranks have been given the same data, to the bit, since step 0" in note.sentence


@pytest.mark.parametrize("case", ["own batches", "own ids", "one batch is another", "inputs of one value"])
def test_ranks_that_do_not_are_not(found: Any, case: str) -> None:
    assert found[case] == []
