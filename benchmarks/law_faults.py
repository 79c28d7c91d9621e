"""The faults that laws find, by the way of training: ``python -m benchmarks.law_faults [WAY ...]``.

A small transformer in which something goes wrong from one step on. A fault is found if its law names the place, as
critical (or as a warning, where the factor is below 1.5), and the factor to 2 %. "-": it cannot be there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import hookstats
from hookstats import Snapshot
from hookstats.rules import Finding, judge, rules_of_laws
from hookstats.watch.arguments import DEFAULT_TENSORS
from tests import ranks

STEPS, BREAKS, MICROBATCHES = 16, 6, 4
TENSORS = (*DEFAULT_TENSORS, "outside_update", "optimizer_law", "token_weights")
FSDP, ACCUMULATED = "FSDP2 on two ranks", "accumulated"
WAYS = ("float32", "autocast", "bfloat16", "float16 with a scaler", "compiled", ACCUMULATED, FSDP)
BY_NORM = ("float32", "autocast", "bfloat16")  # of which the grad_fn of the loss tells the logits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return result


class Model(nn.Sequential):
    def __init__(self, width: int = 32, words: int = 32) -> None:
        super().__init__(
            nn.Embedding(words, width), Block(width), Block(width), nn.LayerNorm(width), nn.Linear(width, words)
        )


class Fault(NamedTuple):
    """``gradient``, ``between``: of a parameter, or of this rank's part, after backward or between two steps."""

    law: str
    place: str  # a parameter; empty: the step as a whole
    factor: float  # NaN: none is known
    gradient: Callable[[torch.Tensor], object] | None = None
    in_step: Callable[[torch.optim.Optimizer, Any], object] | None = None
    between: Callable[[torch.Tensor], object] | None = None
    loss: Callable[[torch.Tensor, int], torch.Tensor] = lambda loss, tokens: loss
    is_part: bool = False  # of the ranks, one alone has it
    ways: tuple[str, ...] = WAYS
    tensors: tuple[str, ...] = TENSORS
    tokens: tuple[int, ...] = (24,) * MICROBATCHES  # of a row of each microbatch


NAN = float("nan")
FAULTS: dict[str, Fault] = {
    "experts' gradients x 8": Fault("bias", "2.up.bias", 8, lambda g: g.mul_(8)),
    "a rank divided once more (1/8)": Fault("bias", "2.qkv.bias", 0.125, lambda g: g.mul_(0.125)),
    "reversed": Fault("bias", "4.bias", -1, lambda g: g.neg_()),
    "a norm counted twice": Fault("bias", "1.norm2.bias", 2, lambda g: g.mul_(2)),
    "the last norm halved": Fault("bias", "3.bias", 0.5, lambda g: g.mul_(0.5)),
    "what is added to the residual stream x 4": Fault("bias", "1.down.bias", 4, lambda g: g.mul_(4)),
    "the other one, x 3": Fault("bias", "2.out.bias", 3, lambda g: g.mul_(3)),
    "half of the channels twice (a shard)": Fault("bias", "1.up.bias", 2, lambda g: g[:64].mul_(2), is_part=True),
    "a quarter of the channels lost": Fault("bias", "2.down.bias", 0, lambda g: g[8:16].zero_(), is_part=True),
    "a layer x 1.7": Fault("bias", "1.qkv.bias", 1.7, lambda g: g.mul_(1.7)),
    "a layer x 1.2": Fault("bias", "2.up.bias", 1.2, lambda g: g.mul_(1.2)),
    "losses summed": Fault("cross_entropy", "", NAN, loss=lambda loss, tokens: loss * tokens),
    "losses divided twice": Fault("cross_entropy", "", NAN, loss=lambda loss, tokens: loss / tokens),
    "the loss x 3": Fault("cross_entropy", "", 3, loss=lambda loss, tokens: loss * 3),
    "the loss x 1.2": Fault("cross_entropy", "", 1.2, loss=lambda loss, tokens: loss * 1.2),
    "microbatches not averaged": Fault(
        "cross_entropy", "", MICROBATCHES, loss=lambda loss, tokens: loss * MICROBATCHES, ways=(ACCUMULATED,)
    ),
    "microbatches averaged twice": Fault(
        "cross_entropy", "", 1 / MICROBATCHES, loss=lambda loss, tokens: loss / MICROBATCHES, ways=(ACCUMULATED,)
    ),
    "tokens of short microbatches weigh more (transformers#34191)": Fault(
        "cross_entropy", "", 2, ways=(ACCUMULATED,), tokens=(24, 24, 12, 24)
    ),
    "losses summed, by default": Fault(
        "cross_entropy", "4", NAN, loss=lambda loss, tokens: loss * tokens, ways=BY_NORM, tensors=DEFAULT_TENSORS
    ),
    "losses x 8 (the world's size), by default": Fault(
        "cross_entropy", "4", NAN, loss=lambda loss, tokens: loss * 8, ways=BY_NORM, tensors=DEFAULT_TENSORS
    ),
    "a gradient halved while it steps": Fault("optimizer", "1.up.weight", NAN, in_step=lambda o, p: p.grad.mul_(0.5)),
    "a shard clipped by itself (LlamaFactory#10640)": Fault(
        "optimizer", "2.qkv.weight", NAN, in_step=lambda o, p: local(p.grad)[:8].mul_(0.1), is_part=True
    ),
    "all clipped by a norm of replicas (TransformerEngine#715)": Fault(
        "optimizer", "", NAN, in_step=lambda o, p: [each.grad.mul_(0.5**0.5) for each in o.param_groups[0]["params"]]
    ),
    "never stepped": Fault("optimizer", "2.down.weight", 0, in_step=lambda o, p: setattr(p, "grad", None)),
    "second moments of 0": Fault(
        "optimizer", "1.out.weight", NAN, in_step=lambda o, p: o.state[p]["exp_avg_sq"].zero_() if o.state[p] else None
    ),
    "first moments lost": Fault(
        "optimizer", "1.out.weight", NAN, in_step=lambda o, p: o.state[p]["exp_avg"].zero_() if o.state[p] else None
    ),
    "moments in another layout": Fault(
        "optimizer", "1.up.weight", NAN, in_step=lambda o, p: swap(local(o.state[p]["exp_avg"])) if o.state[p] else None
    ),
    "another learning rate than the group's (x 10)": Fault(
        "optimizer", "", 10, in_step=lambda o, p: o.param_groups[0].update(lr=1e-2)
    ),
    "weights averaged in": Fault("step", "1.qkv.weight", NAN, between=lambda p: p.mul_(0.9)),
    "a part of them written": Fault("step", "3.weight", NAN, between=lambda p: p[:4].add_(0.25), is_part=True),
    "weights untied": Fault("step", "4.weight", NAN, between=lambda p: p.copy_(p.flip(0))),
}


def local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def swap(moments: torch.Tensor) -> None:
    """Reorder the moments as if another program had laid them out."""
    moments.copy_(moments.flatten().view(*reversed(moments.shape)).T.clone())


def trained(way: str, fault: Fault | None, rank: int = 0, world: int = 1) -> list[Snapshot]:
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16 if way == "bfloat16" else torch.float32)
    if way == FSDP:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    run: Any = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in way)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    named, taken = dict(model.named_parameters()), list[Snapshot]()
    is_here = fault is not None and (not fault.is_part or rank == world - 1)
    now = [False]

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if fault is not None and fault.in_step is not None and now[0] and is_here:
            fault.in_step(optimizer, named.get(fault.place))

    def put_back(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3

    microbatches = MICROBATCHES if way == ACCUMULATED else 1
    tensors, lengths = (TENSORS, (24,) * MICROBATCHES) if fault is None else (fault.tensors, fault.tokens)
    half = torch.float16 if "float16 w" in way else torch.bfloat16
    group = dist.group.WORLD if world > 1 else None
    with hookstats.attach(model, tensors=tensors, every=1, sinks=taken.append, process_group=group) as monitor:
        optimizer.register_step_pre_hook(hook)  # behind ours
        optimizer.register_step_post_hook(put_back)
        for step in range(STEPS):
            now[0] = step >= BREAKS
            losses = []
            for microbatch in range(microbatches):
                seed = 100 * step + 10 * rank + microbatch
                length = lengths[microbatch] if now[0] else 24
                ids = torch.randint(32, (4, length + 1), generator=torch.Generator().manual_seed(seed))
                ids[:, 1::2] = ids[:, :-1:2]
                with torch.autocast("cpu", half, enabled=way == "autocast" or "float16 w" in way):
                    logits = run(ids[:, :-1]).flatten(0, 1)
                loss = cross_entropy(logits.float(), ids[:, 1:].flatten())
                losses.append(loss)
                wrong = fault.loss(loss, 4 * length) if fault is not None and now[0] else loss
                scaler.scale(wrong / microbatches).backward()
            scaler.unscale_(optimizer)
            if fault is not None and fault.gradient is not None and now[0] and is_here:
                with torch.no_grad():
                    gradient = named[fault.place].grad
                    assert gradient is not None
                    fault.gradient(local(gradient))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.step(loss=losses[0] if microbatches == 1 else torch.stack(losses).mean())
            if fault is not None and fault.between is not None and step == BREAKS and is_here:
                with torch.no_grad():
                    fault.between(local(named[fault.place]))
    return taken


def findings(way: str, names: list[str | None], rank: int = 0, world: int = 1) -> list[list[Finding]]:
    """Return the findings for each fault; a name of None trains without a fault."""
    rules = list(rules_of_laws().values())
    faults = [None if name is None else FAULTS[name] for name in names]
    return [judge(trained(way, each, rank, world), rules) for each in faults]


def on_ranks(rank: int, world: int, names: list[str | None]) -> list[list[Finding]]:
    return findings(FSDP, names, rank, world)


def is_found(fault: Fault, findings: list[Finding]) -> bool:
    of_law = [each for each in findings if each.rule == rules_of_laws()[fault.law].name and each.severity != "note"]
    places = {each.site.name if each.site is not None else "" for each in of_law}
    if not of_law or (fault.place and places != {fault.place}):
        return False
    is_right = fault.factor != fault.factor or abs(of_law[0].value - fault.factor) <= 0.02 * abs(fault.factor)
    is_small = 1 / 1.5 < fault.factor < 1.5 or fault.law == "step" or len(set(fault.tokens)) > 1  # may be meant
    return is_right and of_law[0].severity == ("warning" if is_small else "critical")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ways, results = sys.argv[1:] or WAYS, {}
    from benchmarks.law_faults import on_ranks  # other processes do not know this module as __main__

    for way in ways:
        names: list[Any] = [None, *(name for name, fault in FAULTS.items() if way in fault.ways)]
        found = ranks.run(on_ranks, 2, names)[0] if way == FSDP else findings(way, names)
        results[way] = dict(zip(names, found, strict=True))
    healthy = [str(len(results[way].pop(None))) for way in ways]
    print(f"| fault | law | {' | '.join(ways)} |\n|---|---|{'---|' * len(ways)}")
    print(f"| none: findings | | {' | '.join(healthy)} |")
    for name, fault in FAULTS.items():
        cells = ["-" if name not in results[way] else _cell(fault, results[way][name]) for way in ways]
        print(f"| {name} | {fault.law} | {' | '.join(cells)} |")
    counts = [sum(is_found(FAULTS[name], own) for name, own in results[way].items()) for way in ways]
    of = [len(results[way]) for way in ways]
    print(f"| found of {len(FAULTS)} | | {' | '.join(f'{a} of {b}' for a, b in zip(counts, of, strict=True))} |")


def _cell(fault: Fault, found: list[Finding]) -> str:
    if is_found(fault, found):
        return "found"
    return "no"


if __name__ == "__main__":
    main()
