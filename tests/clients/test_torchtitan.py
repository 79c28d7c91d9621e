"""docs/frameworks/torchtitan.md on a stand-in: what ranks give together is what one process gives."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import hookstats
from tests import ranks
from tests.clients.pages import names_of_page
from tests.clients.standins import torchtitan
from tests.cluster.parallel import check_sites
from tests.plain import hearing

STEPS, MICROBATCHES, SEQUENCES = 2, 2, 4
VALID = SEQUENCES * torchtitan.SEQUENCE * MICROBATCHES


class Trained(NamedTuple):
    weights: list[torch.Tensor]  # this rank's parts
    snapshot: Any  # of the last step
    told: list[str]


def batches(step: int, dp_rank: int, dp_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(step)
    whole = torch.randint(torchtitan.WORDS, (MICROBATCHES, SEQUENCES, torchtitan.SEQUENCE + 1), generator=numbers)
    parts = [each.chunk(dp_size)[dp_rank] for each in whole]
    return [(part[:, :-1], part[:, 1:]) for part in parts]


def trained(mesh: Any, watched: bool, backend: str = "") -> Trained:
    trainer = torchtitan.Trainer(mesh, backend)
    [model] = trainer.model_parts
    names = trainer.names
    dp_rank, dp_size = (mesh["fsdp"].get_local_rank(), mesh["fsdp"].size()) if "fsdp" in names else (0, 1)
    monitor, seen = None, []
    with hearing() as told:
        if watched:
            group = (
                hookstats.Ranks(mesh, placements=names_of_page("torchtitan")["placements"](model, mesh))
                if "tp" in names
                else mesh
            )
            preset = hookstats.presets.language_model(model)
            monitor = hookstats.attach(model, **preset, every=1, process_group=group, sinks=seen.append)
        for step in range(1, STEPS + 1):
            parts = batches(step, dp_rank, dp_size)
            if "pp" in names:  # a schedule cuts them itself
                parts = [tuple(torch.cat(each) for each in zip(*parts, strict=True))]
            loss = trainer.train_step(parts, VALID)
            if monitor:
                of_all = {"loss": loss * dp_size} if trainer.pp_has_last_stage else {}
                monitor.step(step, **of_all)
        if monitor:
            monitor.detach()
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    return Trained(weights, seen[-1] if seen else None, told)


def on_ranks(rank: int, world: int, shape: dict[str, int]) -> Any:
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    bare, watched = trained(mesh, watched=False), trained(mesh, watched=True)
    assert all(torch.equal(*pair) for pair in zip(bare.weights, watched.weights, strict=True))
    return watched


@cache
def whole() -> Trained:
    return trained(None, watched=True)


@pytest.mark.parametrize("shape", [{"pp": 2, "fsdp": 2}, {"fsdp": 2, "tp": 2}], ids="-".join)
def test_what_ranks_measure_together_is_what_one_process_measures(shape: dict[str, int]) -> None:
    world = math.prod(shape.values())
    first, *others = ranks.run(on_ranks, world, shape)
    assert [each.snapshot for each in others] == [None] * (world - 1)
    assert first.told == []
    assert first.snapshot.ranks == tuple(range(world))
    of_stages = {("", "input")} if "pp" in shape else set()  # what a stage gets from the one before it
    check_sites(first.snapshot, whole().snapshot, more=of_stages)
    check_names_and_loss(first.snapshot)


def test_blocks_that_are_checkpointed_and_compiled_apart_measure_what_eager_ones_do() -> None:
    bare, compiled = trained(None, watched=False, backend="aot_eager"), trained(None, watched=True, backend="aot_eager")
    assert all(torch.equal(*pair) for pair in zip(bare.weights, compiled.weights, strict=True))
    assert compiled.told == []
    check_sites(compiled.snapshot, whole().snapshot)
    check_names_and_loss(compiled.snapshot)


def check_names_and_loss(found: hookstats.Snapshot) -> None:
    assert {"tok_embeddings", "layers.0", "layers.1", "layers.0.attention.wq", "norm", "output"} <= {
        s.name for s in found
    }
    assert found.scalars["loss"] == pytest.approx(whole().snapshot.scalars["loss"], rel=1e-5)
