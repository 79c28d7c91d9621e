"""Tests of `StepRanks`, and of the way a monitor's steps take to the ranks of a group and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hookstats
from hookstats import Snapshot
from hookstats.numbers.ranks import Spread, StepRanks
from hookstats.watch.arguments import OF_PARAMETERS
from tests.frames import merged_snapshot


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (StepRanks((0,), 1), "0 of 1"),
        (StepRanks(tuple(range(16384)), 16384), "0-16383 of 16384"),
        (StepRanks((0, 1, 3, 5, 6, 7), 8), "0-1,3,5-7 of 8"),
    ],
)
def test_ranks_as_text_give_the_same_ranks_again(ranks: StepRanks, text: str) -> None:
    assert ranks.to_text() == text
    assert StepRanks.from_text(text) == ranks


@pytest.mark.parametrize(
    "text", ["", "0", "0 of 0", "0-3 of 2", "3-1 of 8", "0,0 of 2", "-1 of 1", "0-99999999999 of 99999999999", "a of 1"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|invalid literal"):
        StepRanks.from_text(text)


def test_whose_numbers_a_snapshot_has_stays_with_it_when_it_is_selected_saved_and_loaded() -> None:
    snapshot = monitored(1)[0]
    assert (snapshot.ranks, snapshot.world_size, snapshot.merged) == ((0,), 1, False)
    merged = Snapshot(replace(snapshot.frame, step=7, ranks=StepRanks((0, 1), 3)))
    for each in (merged, merged.select(), merged.compact(), Snapshot.from_dict(merged.to_dict())):
        assert (each.ranks, each.world_size, each.merged) == ((0, 1), 3, True)
    assert not merged.equals(Snapshot(replace(snapshot.frame, step=7)))
    assert repr(merged) == "Snapshot(step=7, 2 of 2 sites fired, ranks 0-1 of 3)"


def test_the_spread_over_ranks_is_given_site_by_site_or_refused() -> None:
    snapshot = monitored(1)[0]
    with pytest.raises(ValueError, match=r"spread=True\)\); got one of ranks 0 of 1"):
        snapshot.rank_spread(("", "output"))
    spread = {"rms": Spread(*map(np.array, ([1.0, 2.0], [0, 1], [3.0, 4.0], [1, 0])))}
    merged = Snapshot(replace(snapshot.frame, ranks=StepRanks((0, 1), 2), spread=spread))
    second = list(merged)[1]
    assert merged.rank_spread(second) == {"rms": Spread(2.0, 1, 4.0, 0)}


def monitored(steps: int, **settings: Any) -> list[Snapshot]:
    net = nn.Linear(3, 2)
    monitor = hookstats.attach(net, every=1, **{"tensors": ("output", "grad_output"), **settings})
    given = []
    for _ in range(steps):
        net(torch.ones(4, 3)).sum().backward()
        given.append(monitor.step())
    return [each for each in [*given, *monitor.detach()] if each is not None]


def of_gradient(gradient: torch.Tensor) -> Snapshot:
    """Make the step of a rank that holds a weight with this gradient."""
    layer = nn.Linear(gradient.shape[1], gradient.shape[0], bias=False)
    layer.weight.grad = gradient
    with hookstats.attach(layer, tensors="param_grad", every=1) as monitor:
        return monitor.snapshot()


def test_recorded_gradients_of_replicas_count_once_and_those_of_shards_make_one_tensor() -> None:
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    for parts in ([whole, whole.clone()], [whole[:4], whole[4:]], [whole[:5], whole[5:]]):
        merged = merged_snapshot([of_gradient(part.clone()) for part in parts])
        stats = merged["weight", "param_grad"]
        assert (stats.calls, stats.total.count) == (1, 32)
        assert stats.total.l2_norm == pytest.approx(whole.norm().item(), rel=1e-6)
        assert merged.grad_norm == pytest.approx(whole.norm().item(), rel=1e-6)
        assert (stats.channels is None) == (len(parts[0]) < 8)  # the rows of shards are different channels


def test_recorded_replicas_of_all_that_is_measured_of_a_parameter_count_once_and_buffers_of_each_rank() -> None:
    def trained() -> Snapshot:
        torch.manual_seed(0)
        layer = nn.BatchNorm1d(4)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        with hookstats.attach(layer, tensors=OF_PARAMETERS, every=1) as monitor:
            for _ in range(2):
                layer(torch.randn(8, 4)).pow(3).sum().backward()
                optimizer.step()
                monitor.step()
            return monitor.snapshot()

    one = trained()
    merged = merged_snapshot([one, trained()])
    kinds = {site.tensor for site in one}
    made = {"optimizer.exp_avg", "optimizer.exp_avg_sq", "reduction.local", "reduction.reduced"}
    assert kinds == {*OF_PARAMETERS, *made} - {"optimizer", "reduction"}
    for site, stats in one.items():
        of_ranks = ("buffer", "buffer_sample", "param_grad_local", "reduction.local", "reduction.reduced")
        times = 2 if site.tensor in of_ranks else 1
        assert merged[site].calls == times * stats.calls, site
        assert merged[site].total.count == times * stats.total.count, site
        assert merged[site].total.l2_norm == pytest.approx(times**0.5 * stats.total.l2_norm), site
