"""Ways to cut a model over ranks, compiled and not: training is what it is without us, the numbers are eager mode's."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import hookstats
from tests import ranks
from tests.plain import hearing

# Some channels of a sum that is split by ranks or recomputed are near zero: against the largest of the site.
EXACT = ("count", "zeros", "nans", "posinfs", "neginfs")
CLOSE = ("mean", "std", "rms", "min", "max", "abs_max")
COMPILES = True
STEPS, BATCH, SEQUENCE, WIDTH, WORDS = 2, 2, 4, 8, 12


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, blocks: int, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Way(NamedTuple):
    """A way of tensor parallelism: of a block, of the head, and where the model's input lies."""

    block: dict[str, Any]
    head: Any
    sequence: bool = False  # each rank is given its part of the sequences
    wrapped: bool = False  # as a DTensor
    blocks: int = 2  # one, where nothing is new between them


def ways() -> dict[str, Way]:
    rows, whole = Shard(1), Replicate()
    return {
        "sequence": Way(
            {
                "norm": SequenceParallel(),
                "mlp.0": ColwiseParallel(input_layouts=rows),
                "mlp.2": RowwiseParallel(output_layouts=rows),
            },
            ColwiseParallel(input_layouts=rows, output_layouts=whole),
            sequence=True,
        ),
        "plain": Way({"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}, ColwiseParallel(output_layouts=whole)),
        "dtensors": Way(
            {
                "norm": SequenceParallel(),
                "mlp.0": ColwiseParallel(input_layouts=rows, use_local_output=False),
                "mlp.2": RowwiseParallel(output_layouts=rows, use_local_output=False),
            },
            ColwiseParallel(input_layouts=rows, output_layouts=whole, use_local_output=False),
            sequence=True,
            wrapped=True,
        ),
        "prepared": Way(
            {
                "norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
                "mlp.0": ColwiseParallel(),
                "mlp.2": RowwiseParallel(output_layouts=rows),
            },
            ColwiseParallel(input_layouts=rows, output_layouts=whole),
            sequence=True,
            blocks=1,
        ),
        "loss": Way(
            {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()},
            ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            blocks=1,
        ),
    }


class Case(NamedTuple):
    way: str
    compiled: str  # "eager", "blocks", "whole"
    sharded: bool
    checkpointed: bool


# Eager, and compiled. What shards a block sees what goes into it and comes out of it; what is wrapped inside of it, a
# recomputation sees.
CASES = [
    Case("sequence", "blocks", sharded=True, checkpointed=True),
    Case("plain", "whole", sharded=True, checkpointed=True),
    Case("plain", "blocks", sharded=False, checkpointed=False),
    Case("dtensors", "whole", sharded=False, checkpointed=False),
    Case("prepared", "blocks", sharded=False, checkpointed=True),
    Case("loss", "whole", sharded=True, checkpointed=True),
]


class Trained(NamedTuple):
    losses: list[float]
    weights: list[torch.Tensor]  # this rank's parts
    snapshots: list[Any]
    held: dict[Any, Any]
    skipped: dict[Any, str]
    told: list[str]


def trained(case: Case, mesh: DeviceMesh, watched: bool) -> Trained:
    torch.compiler.reset()
    torch.manual_seed(0)
    way = ways()[case.way]
    model = Model(way.blocks, case.checkpointed)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], way.block)
    parallelize_module(model, mesh["tp"], {"head": way.head})
    if case.compiled == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    if case.sharded:
        for each in (*model.blocks, model):
            fully_shard(each, mesh=mesh["dp"])
    if case.compiled == "whole":
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hearing() as told:
        monitor = hookstats.attach(model, every=1) if watched else None
        losses, snapshots = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(one_step(case, model, mesh, step))
            optimizer.step()
            snapshots.append(monitor.step() if monitor else None)
    weights = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    if monitor is None:
        return Trained(losses, weights, [], {}, {}, [])
    held = {entry.site: entry.held for entry in monitor._store.entries}
    skipped = {site: each.reason for site, each in monitor.skipped.items()}
    monitor.detach()
    return Trained(losses, weights, snapshots, held, skipped, told)


def one_step(case: Case, model: nn.Module, mesh: DeviceMesh, step: int) -> float:
    way, tp = ways()[case.way], mesh["tp"]
    numbers = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
    x = torch.randn(BATCH, SEQUENCE, WIDTH, generator=numbers)
    words = torch.randint(WORDS, (BATCH * SEQUENCE,), generator=numbers)
    if way.sequence:
        x = x.chunk(2, 1)[tp.get_local_rank()].contiguous()
    x.requires_grad_()
    if way.wrapped:
        x = DTensor.from_local(x, tp, [Shard(1)])
    with loss_parallel() if case.way == "loss" else contextlib.nullcontext():
        logits = model(x).flatten(0, 1)
        if isinstance(logits, DTensor):
            words = DTensor.from_local(words, tp, [Replicate()])
        loss = F.cross_entropy(logits, words)
        loss.backward()
    return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)


def same_training(got: Trained, wanted: Trained) -> bool:
    return got.losses == wanted.losses and all(map(torch.equal, got.weights, wanted.weights))


def differences(got: Trained, eager: Trained) -> list[str]:
    """In what the numbers of a compiled training are not those of its eager twin, but for what it has left out."""
    found = []
    for mine, theirs in zip(got.snapshots, eager.snapshots, strict=True):
        sites = {site for site in theirs if site not in got.skipped}
        if set(mine) != sites:
            found.append(f"step {mine.step}: other sites: {sorted(map(str, set(mine) ^ sites))}")
        for site in sites & set(mine):
            a, b = mine[site], theirs[site]
            if (
                not b.calls
            ):  # a gradient that is a wrapper of a plain tensor, AsyncCollectiveTensor, is not seen eagerly
                continue
            if a.calls != b.calls or (a.channels is None) != (b.channels is None):
                found.append(f"step {mine.step}: {site}: {a.calls} calls for {b.calls}")
                continue
            a, b = (a.total, b.total) if a.channels is None else (a.channels, b.channels)
            for name in EXACT + CLOSE:
                one, other = np.atleast_1d(getattr(a, name)), np.atleast_1d(getattr(b, name))
                largest = np.abs(np.atleast_1d(b.abs_max)).max()
                close = one.shape == other.shape and np.allclose(
                    one, other, rtol=0, atol=1e-6 * largest, equal_nan=True
                )
                if not (np.array_equal(one, other) if name in EXACT else close):
                    found.append(f"step {mine.step}: {site}: {name} {one} for {other}")
    found += [
        f"{site} lies {got.held[site]} for {held}"
        for site, held in eager.held.items()
        if site not in got.skipped and got.held[site] != held
    ]
    return found


def all_cases(rank: int, world: int) -> list[tuple[Case, list[str]]]:
    """Return the faults of each case of two ranks, or of four with fully_shard."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for case in CASES:
        if case.sharded == (world == 4):
            eager = case._replace(compiled="eager")
            plain, twin = trained(eager, mesh, watched=False), trained(eager, mesh, watched=True)
            found += [(eager, wrong_with(twin, plain, twin)), (case, of_program(case, mesh, plain, twin))]
    return found


def of_program(case: Case, mesh: DeviceMesh, plain: Trained, twin: Trained) -> list[str]:
    ours = trained(case, mesh, watched=True)
    bare = plain if same_training(ours, plain) else trained(case, mesh, watched=False)
    return wrong_with(ours, bare, twin)


def wrong_with(ours: Trained, bare: Trained, twin: Trained) -> list[str]:
    wrong = [] if same_training(ours, bare) else [f"trained otherwise: {ours.losses} for {bare.losses}"]
    return wrong + differences(ours, twin) + [text for text in ours.told if "not measured" not in text]


@pytest.mark.parametrize("world", [2, 4])
def test_a_model_cut_over_ranks_trains_as_without_us_and_compiled_its_numbers_are_those_of_eager_mode(
    world: int,
) -> None:
    for found in ranks.run(all_cases, world, timeout=900):
        assert len(found) == 6
        assert [each for each in found if each[1]] == []
