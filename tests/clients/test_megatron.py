"""docs/frameworks/megatron.md on a stand-in: plain tensors that hold parts, and an optimizer that steps copies."""

from __future__ import annotations

import types
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import hookstats
from tests import ranks
from tests.clients.pages import names_of_page
from tests.clients.standins import megatron
from tests.clients.standins.megatron import Region
from tests.clients.standins.megatron_training import Training
from tests.cluster.parallel import check_sites
from tests.plain import hearing

ALONE = Region(None, 0, 1)
STEPS, MICROBATCHES, SEQUENCES = 2, 2, 4


def placements(model: torch.nn.Module, shards_optimizer: bool) -> Any:
    """Return the placements that the page gives."""
    args = types.SimpleNamespace(sequence_parallel=True, use_distributed_optimizer=shards_optimizer)
    return names_of_page("megatron")["placements"](model, args)


class Trained(NamedTuple):
    loss: float
    weights: list[torch.Tensor]
    snapshot: Any  # of the last step
    findings: list[str]
    told: list[str]


def batches(step: int, dp: Region) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(step)
    whole = torch.randint(megatron.WORDS, (MICROBATCHES, SEQUENCES, megatron.SEQUENCE + 1), generator=numbers)
    parts = [each.chunk(dp.size)[dp.rank] for each in whole]
    return [(part[:, :-1], part[:, 1:]) for part in parts]


def trained(tp: Region, dp: Region, watched: bool, group: Any = None, **how: Any) -> Trained:
    training = Training(tp, dp, **how)
    monitor, seen = None, []
    with hearing() as told:
        if watched:
            model = training.unwrapped
            if group is not None:
                group = hookstats.Ranks(group, placements=placements(model, training.scattered))
            preset = hookstats.presets.language_model(model)
            monitor = hookstats.attach(
                model,
                **preset,
                channels=hookstats.Channels(dim=-1),
                exclude=lambda name, _: name.endswith("scale_mask_softmax"),
                every=1,
                process_group=group,
                sinks=seen.append,
            )
        for step in range(STEPS):
            loss = training.train_step(batches(step, dp))
            if monitor:
                monitor.step(step, loss=loss)
        if monitor:
            monitor.detach()
            if group is not None:
                assert hookstats.check_replicas(training.unwrapped, dp.group) == []
    weights = [each.detach().clone() for each in training.unwrapped.parameters()]
    findings = [str(each) for each in hookstats.rules.judge(seen)]
    return Trained(float(loss), weights, seen[-1] if seen else None, findings, told)


def on_ranks(rank: int, world: int, how: dict[str, Any]) -> Any:
    whole = torch.arange(world).view(-1, 2)  # tensor parallelism takes neighbours
    tp_groups, dp_groups = ([dist.new_group(line) for line in lines.tolist()] for lines in (whole, whole.T))
    dp_rank, tp_rank = divmod(rank, 2)
    tp, dp = Region(tp_groups[dp_rank], tp_rank, 2), Region(dp_groups[tp_rank], dp_rank, world // 2)
    mesh = DeviceMesh.from_group([dp.group, tp.group], "cpu", mesh=whole, mesh_dim_names=("dp", "tp"))
    bare, watched = trained(tp, dp, watched=False, **how), trained(tp, dp, watched=True, group=mesh, **how)
    assert all(torch.equal(*pair) for pair in zip(bare.weights, watched.weights, strict=True))
    return watched


@cache
def whole() -> Trained:
    return trained(ALONE, ALONE, watched=True)


@pytest.mark.parametrize("scattered", [False, True], ids=["copies", "distributed optimizer"])
def test_what_ranks_measure_together_is_what_one_process_measures(scattered: bool) -> None:
    """Copies in float64 of parameters in float32, as Megatron has copies in float32 of those in bfloat16."""
    first, *others = ranks.run(on_ranks, 4, {"copies": torch.float64, "scattered": scattered})
    assert [each.snapshot for each in others] == [None] * 3
    assert first.told == []
    assert first.findings == whole().findings == []
    snapshot, wanted = first.snapshot, whole().snapshot
    assert snapshot.ranks == (0, 1, 2, 3)
    # Each rank gives the biases that are yet to be added; gradients are of a rank's own loss, the mean over its tokens.
    biases = {site for site in wanted if site.tensor.endswith(".1")}
    assert all(snapshot[site].calls == 4 * wanted[site].calls for site in biases)
    check_sites(snapshot, wanted, but=biases, times=2, flat=scattered)
    assert wanted["", "token_weights.each"].calls == MICROBATCHES  # ranks have a part of the vocabulary each
    assert not any(site.tensor.startswith("token_weights") for site in snapshot)
    assert snapshot.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)


def test_of_bfloat16_parameters_the_copies_in_float32_are_measured() -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "copies": torch.float32}
    training = Training(ALONE, ALONE, **how)
    model = training.unwrapped
    kinds = ("param", "param_grad", "param_update", "optimizer")
    with hookstats.attach(model, tensors=kinds, every=1) as monitor:
        for step in range(STEPS):
            before = {name: each.main_param.clone() for name, each in model.named_parameters()}
            training.train_step(batches(step, ALONE))
            snapshot = monitor.step()
    for name, parameter in model.named_parameters():
        copy = parameter.main_param
        seen = {
            "param": before[name],
            "param_grad": parameter.main_grad,
            "param_update": copy - before[name],
            "optimizer.exp_avg": training.optimizer.optimizer.state[copy]["exp_avg"],
        }
        assert parameter.grad is None
        for kind, tensor in seen.items():
            total = snapshot[name, kind].total
            assert total.count == tensor.numel()
            assert total.rms == pytest.approx(tensor.double().square().mean().sqrt().item(), rel=1e-5), (name, kind)
            assert total.abs_max == tensor.abs().max().item(), (name, kind)


def test_where_parameters_are_stepped_themselves_nothing_differs() -> None:
    """Megatron's FP32Optimizer gives them their `main_grad`."""
    assert whole().told == []
    snapshot = whole().snapshot
    assert snapshot.skipped == {}
    assert {"param_grad", "optimizer.exp_avg"} <= {tensor for name, tensor in snapshot if name.endswith("qkv.weight")}
