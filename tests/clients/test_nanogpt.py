"""docs/frameworks/nanogpt.md under DDP, with a model of nanoGPT's modules and names."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hookstats
from tests import ranks
from tests.clients.standins.nanogpt import GPT
from tests.cluster.parallel import check_sites
from tests.plain import hearing

ITERATIONS, MICROBATCHES = 2, 2  # of each of two ranks


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(32, (4, 17), generator=torch.Generator().manual_seed(number))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def trained(rank: int, world: int, watched: bool) -> Any:
    torch.manual_seed(1337)
    ddp = world > 1
    model = GPT()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5)
    if ddp:
        model = DistributedDataParallel(model)
    seen: list[Any] = []
    monitor = None
    with hearing() as told:
        if watched:
            monitor = hookstats.attach(
                model,
                **hookstats.presets.language_model(model),
                every=1,
                process_group=dist.group.WORLD if ddp else None,
                sinks=seen.append,
            )
        steps = MICROBATCHES * 2 // world
        for iteration in range(ITERATIONS):
            for micro_step in range(steps):
                if ddp:
                    model.require_backward_grad_sync = micro_step == steps - 1
                _, loss = model(*batch(100 * iteration + rank * steps + micro_step))
                loss = loss / steps
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if monitor:
                monitor.step(iteration, loss=loss * steps)
            optimizer.zero_grad(set_to_none=True)
        if monitor:
            monitor.detach()
    return [parameter.detach() for parameter in model.parameters()], seen[-1] if seen else None, told


def on_ranks(rank: int, world: int) -> Any:
    bare, _, _ = trained(rank, world, watched=False)
    watched, snapshot, told = trained(rank, world, watched=True)
    assert all(torch.equal(*pair) for pair in zip(bare, watched, strict=True))
    return snapshot, told


def test_two_ranks_of_ddp_measure_what_one_process_measures_of_all_microbatches() -> None:
    (snapshot, told), _ = ranks.run(on_ranks, 2)
    _, wanted, _ = trained(0, 1, watched=True)
    assert told == []
    assert snapshot.ranks == (0, 1)
    assert {"transformer.h.1", "transformer.h.1.attn"} <= {site.name for site in snapshot}
    check_sites(snapshot, wanted, times=2)  # gradients of a rank's own loss, divided by its own microbatches
