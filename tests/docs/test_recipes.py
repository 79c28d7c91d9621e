"""Training loops as people write them: accelerate, DDP, trainers under DDP, FSDP2 x tensor parallel x compile.

What docs/trainers.md says of them. Each spawn has a time limit of its own, see tests.ranks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import hookstats
from hookstats import Snapshot
from hookstats.integrations import lightning as for_lightning
from hookstats.integrations import transformers as for_transformers
from tests import ranks
from tests.models import Residual

COMPILES = True
KINDS = ("output", "grad_output", "param", "param_grad")
STEPS = [[0, 2, 1, 3], [4, 6, 5, 7]]  # microbatches of two ranks together: the first two of each are the first rank's


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(number))


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual(depth=1)


def loop(model: nn.Module, steps: list[list[int]]) -> list[Snapshot]:
    """A plain loop over microbatches."""
    monitor, snapshots = (
        hookstats.attach(model, every=1, tensors=KINDS, options=hookstats.Options(strict=True)),
        list[Snapshot](),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for numbers in steps:
        for number in numbers:
            (model(batch(number)).square().mean() / len(numbers)).backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshot = monitor.step()
        assert snapshot is not None
        snapshots.append(snapshot)
    return snapshots


@pytest.fixture
def accelerate_anew() -> Iterator[None]:
    """Its state is the process's, and is of whoever asked first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("accelerate_anew")
def test_accelerate_measures_what_a_plain_loop_does() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model: Any = residual()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    monitor, snapshots = (
        hookstats.attach(model, every=1, tensors=KINDS, options=hookstats.Options(strict=True)),
        list[Snapshot](),
    )
    for number in range(6):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(number)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            snapshots += [snapshot for snapshot in [monitor.step()] if snapshot is not None]
    wanted = loop(residual(), [[0, 1, 2], [3, 4, 5]])
    assert all(got.equals(want) for got, want in zip(snapshots, wanted, strict=True))


class Squares(nn.Module):
    """A dataset as Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = residual()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Net(lightning.pytorch.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = residual()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def of_lightning(rank: int, world: int) -> list[Any]:
    """Two microbatches of this rank to a step, evaluation between them."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    snapshots: list[Snapshot] = []
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        strategy=lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo"),
        devices=world,
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=1,
        use_distributed_sampler=False,
        callbacks=for_lightning.HookStats(every=1, tensors=KINDS, process_group="world", sinks=snapshots.append),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    mine = [batch(number) for number in (rank, rank + 2, rank + 4, rank + 6)]
    trainer.fit(Net(), DataLoader(mine, batch_size=None), DataLoader(mine, batch_size=None))
    return [snapshot.to_dict() for snapshot in snapshots]


class EachItsOwn(Trainer):
    """Each rank has its batches."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=None)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return DataLoader(self.eval_dataset, batch_size=None)


def of_transformers(rank: int, world: int) -> list[Any]:
    snapshots: list[Snapshot] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=2,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=1e9,
            prediction_loss_only=True,
            save_strategy="no",
            report_to=[],
        )
        mine = [{"x": batch(number)} for number in (rank, rank + 2, rank + 4, rank + 6)]
        callback = for_transformers.HookStats(every=1, tensors=KINDS, process_group="world", sinks=snapshots.append)
        trainer = EachItsOwn(Squares(), arguments, train_dataset=mine, eval_dataset=mine, callbacks=[callback])
        trainer.train()
        assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    return [snapshot.to_dict() for snapshot in snapshots]


def of_ddp(rank: int, world: int) -> list[Any]:
    model = nn.parallel.DistributedDataParallel(residual())
    monitor, snapshots = (
        hookstats.attach(model, every=1, tensors=KINDS, options=hookstats.Options(strict=True)),
        list[Snapshot](),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first, second in ((rank, rank + 2), (rank + 4, rank + 6)):
        with model.no_sync():
            (model(batch(first)).square().mean() / 2).backward()
        (model(batch(second)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        snapshots += [snapshot for snapshot in [monitor.step()] if snapshot is not None]
    return [snapshot.to_dict() for snapshot in snapshots]


def test_ddp_measures_each_ranks_activations_and_the_gradients_of_all() -> None:
    whole = loop(residual(), STEPS)
    for rank, returned in enumerate(ranks.run(of_ddp, 2, init="env", timeout=240)):
        own = loop(residual(), [[rank, rank + 2]])[0]
        got = [Snapshot.from_dict(each) for each in returned]
        assert [snapshot.step for snapshot in got] == [0, 1]
        for step, snapshot in enumerate(got):
            assert snapshot.order == own.order
            for site in own.order:
                if site.tensor.startswith("param"):
                    assert snapshot[site].total.rms == pytest.approx(whole[step][site].total.rms, rel=1e-4)
                elif step == 0:
                    assert snapshot[site].calls == 2
                    assert snapshot[site].total.rms == pytest.approx(own[site].total.rms, rel=1e-6)


@pytest.mark.parametrize(("function", "first"), [(of_lightning, 0), (of_transformers, 1)])
def test_trainers_on_two_ranks_measure_as_one_process_with_all_batches(function: Any, first: int) -> None:
    """With accumulation, and evaluation between the steps, of the module inside of DDP."""
    whole = loop(residual(), STEPS)
    returned, nothing = ranks.run(function, 2, init="", timeout=240)
    assert nothing == []  # sinks are the first rank's
    got = [Snapshot.from_dict(each) for each in returned]
    assert [(snapshot.step, snapshot.ranks, snapshot.world_size) for snapshot in got] == [
        (first, (0, 1), 2),
        (first + 1, (0, 1), 2),
    ]
    for snapshot, want in zip(got, whole, strict=True):
        assert {("layers." + site.name, site.tensor) for site in want.order} <= {tuple(each) for each in snapshot.order}
        for site in want.order:
            seen, wanted = snapshot["layers." + site.name, site.tensor], want[site]
            assert seen.total.count == wanted.total.count
            assert seen.calls == wanted.calls
            share = 2 if site.tensor == "grad_output" else 1  # of a mean over two microbatches, not over four
            assert seen.total.rms == pytest.approx(share * wanted.total.rms, rel=1e-4)


def of_torchtitan(rank: int, world: int) -> Any:
    """Tensor parallel, then sharded, then compiled block by block, then attached."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = residual()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    snapshots = loop(model, [[mesh["dp"].get_local_rank()]] * 2)
    return mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank(), [snapshot.to_dict() for snapshot in snapshots]


def test_a_loop_as_torchtitan_has_it_shows_each_rank_its_part() -> None:
    """FSDP2 x tensor parallel x compile, on 2 x 2 ranks."""
    returned = ranks.run(of_torchtitan, 4, timeout=240)
    parts = {(dp, tp): [Snapshot.from_dict(each) for each in seen] for dp, tp, seen in returned}
    whole = loop(residual(), [[0, 1]] * 2)  # gradients are the mean over the data parallel ranks
    for dp in range(2):
        own = loop(residual(), [[dp]])[0]
        for site in own.order:
            if site.tensor.startswith("param"):
                continue
            want = own[site].channels
            got = [parts[dp, tp][0][site].channels for tp in range(2)]
            assert want is not None
            rms = [each.rms for each in got if each is not None]
            if site.name.endswith("up"):  # columns lie side by side
                np.testing.assert_allclose(np.concatenate(rms), want.rms, rtol=1e-4, atol=1e-9)
            else:
                np.testing.assert_allclose(rms, [want.rms] * 2, rtol=1e-4, atol=1e-9)
    for step in range(2):
        for site in whole[step].order:
            if site.tensor.startswith("param"):
                total = whole[step][site].total
                each = [part[step][site].total for part in parts.values()]
                copies = sum(one.count for one in each) / total.count
                assert copies == (1.0 if site.name.endswith(("up.weight", "up.bias", "down.weight")) else 2.0)
                squares = sum(one.count * one.rms**2 for one in each) / copies
                assert squares == pytest.approx(total.count * total.rms**2, rel=1e-4)
