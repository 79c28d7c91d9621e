"""docs/frameworks/torchtitan.md on a stand-in: what ranks give together is what one process gives."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import hookstats
from tests import ranks
from tests.clients.standins import torchtitan
from tests.conftest import ROOT
from tests.docs import test_pages
from tests.plain import hearing

EXACT = ("count", "nans", "posinfs", "neginfs")
CLOSE = ("mean", "std", "rms", "min", "max", "abs_max")
STEPS, MICROBATCHES, SEQUENCES = 2, 2, 4
VALID = SEQUENCES * torchtitan.SEQUENCE * MICROBATCHES


class Trained(NamedTuple):
    weights: list[torch.Tensor]  # this rank's parts
    snapshot: Any  # of the last step
    told: list[str]


def placements(*args: Any) -> Any:
    """What the page says."""
    known = test_pages.names()
    test_pages.run(ROOT / "docs" / "frameworks" / "torchtitan.md", known)
    return known["placements"](*args)


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
            group = hookstats.Ranks(mesh, placements=placements(model, mesh)) if "tp" in names else mesh
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
    check(first.snapshot, whole().snapshot, of_stages)


def test_blocks_that_are_checkpointed_and_compiled_apart_measure_what_eager_ones_do() -> None:
    bare, compiled = trained(None, watched=False, backend="aot_eager"), trained(None, watched=True, backend="aot_eager")
    assert all(torch.equal(*pair) for pair in zip(bare.weights, compiled.weights, strict=True))
    assert compiled.told == []
    check(compiled.snapshot, whole().snapshot)


def check(found: hookstats.Snapshot, wanted: hookstats.Snapshot, more: set[Any] = frozenset()) -> None:
    assert {str(site) for site in (set(found) ^ set(wanted)) - more} == set()
    assert found.skipped == {}
    assert found.scalars["loss"] == pytest.approx(wanted.scalars["loss"], rel=1e-5)
    assert {"layers.0", "layers.1"} <= {site.name for site in found}
    for site in wanted:
        check_site(site, found[site], wanted[site])


def check_site(site: Any, found: Any, wanted: Any) -> None:
    sampled = site.tensor.endswith("_sample")  # other elements of each rank's part
    pairs = [(found.total, wanted.total)]
    assert (found.channels is None) == (wanted.channels is None), site
    if wanted.channels is not None:
        pairs.append((found.channels, wanted.channels))
    scale = wanted.total.abs_max
    for a, b in pairs:
        for name in () if sampled else EXACT:
            assert np.array_equal(getattr(a, name), getattr(b, name)), (site, name)
        for name in CLOSE:
            np.testing.assert_allclose(
                getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-4 * scale, err_msg=f"{site} {name}"
            )
