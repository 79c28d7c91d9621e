"""Biases, and the weights of norms: a channel for each entry."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import hookstats
from hookstats import Channels, Options, Snapshot
from hookstats.modules.channels import MOST_ENTRIES
from tests import ranks

KINDS = ("grad_output", "param", "param_grad", "param_update")


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 6, 2), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(24, 8), nn.LayerNorm(8), nn.Linear(8, 4)
    )


def train(model: nn.Module, monitor: hookstats.Monitor, steps: int = 1, microbatches: int = 2) -> list[Snapshot]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(microbatches):
            x = torch.randn(16, 3, 5, generator=torch.Generator().manual_seed(step * microbatches + part))
            model(x).square().mean().backward()
        optimizer.step()
        taken.append(monitor.step())
    return [each for each in taken if each is not None]


def test_the_gradient_of_a_bias_is_channel_by_channel_the_sum_of_that_of_the_output() -> None:
    model = model_of()
    (taken,) = train(model, hookstats.attach(model, tensors=KINDS, every=1))
    for name in ("0", "1", "3", "4", "5"):
        bias, terms = taken[f"{name}.bias", "param_grad"].channels, taken[name, "grad_output"].channels
        assert bias.count.tolist() == [1] * len(terms.count)
        tolerance = 1e-6 * terms.l1_norm.max()
        np.testing.assert_allclose(bias.mean, terms.mean * terms.count, rtol=1e-5, atol=tolerance)


def test_they_are_kept_where_channels_are_asked_for() -> None:
    model = model_of()
    with hookstats.attach(model, tensors=("output", "param_grad"), every=1, channels="3") as monitor:
        (taken,) = train(model, monitor)
    kept = {site.name for site, stats in taken.items() if stats.channels is not None}
    assert kept == {"3", "3.weight", "3.bias"}
    with hookstats.attach(model, tensors="param_grad", every=1, channels=False) as monitor:
        (taken,) = train(model, monitor)
    assert all(stats.channels is None for stats in taken.values())
    with hookstats.attach(model, tensors="param_grad", every=1, channels=Channels(every=2)) as monitor:
        full, thin = train(model, monitor, steps=2)
    assert full["3.bias", "param_grad"].channels is not None
    assert thin["3.bias", "param_grad"].channels is None
    assert thin["3.bias", "param_grad"].total.count == 8


def test_parameters_in_a_row_are_no_channels() -> None:
    model = nn.ParameterDict({"many": torch.zeros(MOST_ENTRIES + 1), "most": torch.ones(MOST_ENTRIES)})
    with hookstats.attach(model, tensors="param", every=1) as monitor:
        taken = monitor.snapshot()
    many, most = taken["many", "param"], taken["most", "param"]
    assert (many.channels, many.total.count) == (None, MOST_ENTRIES + 1)
    assert most.channels.mean.tolist() == [1] * MOST_ENTRIES


def test_where_the_budget_does_not_hold_them_all_other_channels_stay(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    needed = hookstats.attach(model, tensors="param_grad").state_bytes
    with caplog.at_level(logging.WARNING, "hookstats"):
        monitor = hookstats.attach(model, tensors="param_grad", every=1, options=Options(memory_budget=needed - 1))
    assert "vectors (biases, the weights of norms) keep totals only" in caplog.text
    (taken,) = train(model, monitor)
    kept = {site.name for site, stats in taken.items() if stats.channels is not None}
    assert kept == {"0.weight", "3.weight", "5.weight"}
    assert monitor.state_bytes < needed


def of_ranks(rank: int, world: int) -> dict[str, Any]:
    """The channels of a bias's gradient, merged over ranks, and of FSDP1's; and what they are on one process."""
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for name in ("plain", "replicas", "shards", "flat"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5))
        if name == "replicas":
            model = nn.parallel.DistributedDataParallel(model)
        elif name == "shards":
            fully_shard(model, mesh=mesh)
        elif name == "flat":
            model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        group = None if name == "plain" else dist.group.WORLD
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hookstats.attach(model, tensors="param_grad", every=1, process_group=group) as monitor:
            part = x if name == "plain" else x[rank * len(x) // world : (rank + 1) * len(x) // world]
            model(part).square().mean().backward()
            optimizer.step()
            snapshots = [monitor.step(), *monitor.detach()]
        (snapshot,) = (each for each in snapshots if each is not None)
        for site in ("0.bias", "1.weight"):
            channels = snapshot[site, "param_grad"].channels
            found[f"{name} {site}"] = None if channels is None else (channels.mean.tolist(), channels.count.tolist())
    return found


def test_ranks_have_those_of_one_process() -> None:
    for found in ranks.run(of_ranks, 2):
        for site in ("0.bias", "1.weight"):
            wanted = found[f"plain {site}"]
            for name in ("replicas", "shards"):
                mean, count = found[f"{name} {site}"]
                assert mean == pytest.approx(wanted[0], rel=1e-5)
                assert count == [1] * 5
            assert found[f"flat {site}"] is None  # who knows what of it this rank holds
