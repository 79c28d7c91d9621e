"""What identities cover, find and cost: ``python -m benchmarks.identities coverage|healthy|faults|cost``.

coverage: small models of many types, each judged at other parameters for another loss. healthy: the largest z of a
Llama that trains. faults: gradients that are wrong in many ways, in three precisions, as the rule
finds them in the first four steps. cost: of a measured step.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import hookstats
from hookstats.rules import Finding, identity, judge
from hookstats.rules.identities import compare
from hookstats.rules.step import SiteIds, Step
from tests.identities.models import Llama, ids, loss_of
from tests.language import zoo as languages
from tests.modules import zoo as others

PRECISIONS = ("float32", "autocast", "bfloat16")


def moved(model: nn.Module) -> nn.Module:
    """Return a copy with other parameters."""
    torch.manual_seed(5)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.05 * torch.randn_like(each))
    return model


def coverage() -> None:
    print("| model | identities | sums | of the parameters | forwards | wrong |\n|---|---|---|---|---|---|")
    counts = [0, 0, 0, 0]
    for name in dict.fromkeys((*languages.TYPES, *others.TUNED, *others.OTHERS)):
        torch.manual_seed(0)
        if name in languages.TYPES:
            model, inputs = languages.make(name).eval(), languages.batch()
            del inputs["labels"]
        else:
            model, inputs = others.made({**others.TUNED, **others.OTHERS}[name])
        runs = [0]

        def forward(model: nn.Module = model, inputs: dict[str, Any] = inputs, runs: list[int] = runs) -> Any:
            runs[0] += 1
            return model(**inputs)

        found = hookstats.find_identities(model, forward)
        other = moved(model)

        def run(other: nn.Module = other, inputs: dict[str, Any] = inputs) -> None:
            tensors = [each for each in tree_leaves(other(**inputs)) if isinstance(each, torch.Tensor)]
            torch.stack(
                [(each * torch.randn_like(each)).sum() for each in tensors if each.requires_grad]
            ).sum().backward()

        try:
            wrong = str(len(found.check(run, other).breaks))
        except RuntimeError:
            wrong = "not judged: it has no backward"
        held = {parameter for each in found.identities for parameter in each.parameters}
        numbers = {name: each.numel() for name, each in model.named_parameters()}
        share = sum(count for parameter, count in numbers.items() if parameter in held) / sum(numbers.values())
        sums = sum(each.groups for each in found.identities)
        print(f"| {name} | {len(found)} | {sums} | {share:.0%} | {runs[0]} | {wrong} |", flush=True)
        counts = [
            a + b for a, b in zip(counts, (1, len(found), sums, int(wrong) if wrong.isdigit() else 0), strict=True)
        ]
    print("| {} models | {} | {} | | | {} |".format(*counts))


def prepared(precision: str, layers: int = 2) -> tuple[Llama, Callable[[nn.Module], None]]:
    torch.manual_seed(0)
    model = Llama(layers)
    if precision == "bfloat16":
        model.bfloat16()

    def train(model: nn.Module) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = loss_of(model, ids(4, 16))
        loss.backward()

    return model, train


Trained = tuple[list[Finding], list[float]]


def trained(
    model: Llama, train: Callable[[nn.Module], None], steps: int, change: Callable[[], None] = lambda: None
) -> Trained:
    """Return what the rule finds where each step is measured, and all z. change: of gradients, after each backward."""
    found = hookstats.find_identities(model, lambda: model(ids(4, 16)))
    optimizer, taken = torch.optim.AdamW(model.parameters(), lr=3e-3), list[hookstats.Snapshot]()
    options = hookstats.Options(identities=found)
    with hookstats.attach(model, every=1, sinks=taken.append, options=options) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            train(model)
            change()
            optimizer.step()
            monitor.step()
    return judge(taken, [identity]), [float(e.z.max()) for each in taken for e in compare(Step(each, SiteIds()))]


def healthy() -> None:
    print("| precision | evaluations | z: median | largest | findings |\n|---|---|---|---|---|")
    for precision in PRECISIONS:
        findings, z = trained(*prepared(precision), steps=60)
        values = torch.tensor(z)
        print(f"| {precision} | {len(z)} | {values.median():.2g} | {values.max():.2g} | {len(findings)} |", flush=True)


def cost() -> None:
    """Steps of one training in turns, not measured, measured, and measured with identities."""
    torch.manual_seed(0)
    model, batch = Llama(8), ids(16, 64)
    found = hookstats.find_identities(model, lambda: model(batch[:2]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(monitor: hookstats.Monitor | None) -> float:
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if monitor is not None:
            monitor.step()
        return time.perf_counter() - begun

    taken: dict[str, list[float]] = {"bare": [], "measured": [], "with identities": []}
    for _ in range(12):
        for name, seconds in taken.items():
            options = hookstats.Options(identities=found if name == "with identities" else None)
            monitor = None if name == "bare" else hookstats.attach(model, every=1, options=options)
            seconds += [step(monitor) for _ in range(4)][1:]
            if monitor is not None:
                monitor.detach()
    print(
        f"{len(found)} identities, {sum(each.numel() for each in model.parameters()):,} parameters; ms a step, median"
    )
    for name, seconds in taken.items():
        print(f"{name}: median {1e3 * sorted(seconds)[len(seconds) // 2]:.1f}, fastest {1e3 * min(seconds):.1f}")


Change = Callable[[dict[str, torch.Tensor]], None]


def times(name: str, factor: float, places: Any = ...) -> Change:
    def change(gradients: dict[str, torch.Tensor]) -> None:
        gradients[name][places] *= factor

    return change


def every(part: str, factor: float) -> Change:
    def change(gradients: dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            if part in name:
                gradient *= factor

    return change


A, M = "layers.1.attention", "layers.0.mlp"
AFTER: dict[str, Change] = {
    "a norm's gradient halved": times("layers.0.norm1.weight", 0.5),
    "a norm counted twice": times("layers.1.norm2.weight", 2),
    "all norms averaged over 4 ranks": every("norm", 0.25),
    "one layer's MLP x 8": every("layers.0.mlp", 8),
    "queries without 1 / sqrt(d)": times(f"{A}.q_proj.weight", 2.83),
    "values of one head lost": times(f"{A}.v_proj.weight", 0, slice(0, 8)),
    "keys of one head lost": times(f"{A}.k_proj.weight", 0, slice(8, 16)),
    "rows of a shard twice": times(f"{M}.up_proj.weight", 2, slice(0, 32)),
    "columns of a shard lost": times(f"{M}.down_proj.weight", 0, (slice(None), slice(0, 16))),
    "a bucket not reduced (half)": every("layers.1.attention", 0.5),
    "one element, sign": times(f"{M}.up_proj.weight", -1, (3, 4)),
    "one tile of 8 x 8 x 2": times(f"{M}.down_proj.weight", 2, (slice(0, 8), slice(0, 8))),
    "up x 1.1": times(f"{M}.up_proj.weight", 1.1),
    "up x 1.03": times(f"{M}.up_proj.weight", 1.03),
    "up x 1.01": times(f"{M}.up_proj.weight", 1.01),
    "head x 2": times("head.weight", 2),
    "query biases x 4 (a small part of their sums)": times(f"{A}.q_proj.bias", 4),
}


class Wrong(torch.autograd.Function):
    """The identity, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(gradient), None


def behind(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Llama], Any]:
    def put(model: Llama) -> Any:
        module = model.get_submodule(name)
        return module.register_forward_hook(lambda _, args, y: Wrong.apply(y, change))  # type: ignore[no-untyped-call]

    return put


def lost_rows(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[:, -3:] = 0
    return gradient


def norm_without_rows(model: Llama) -> Any:
    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
            ctx.save_for_backward(y, weight)
            return y * weight

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, weight = ctx.saved_tensors
            return gradient * weight, (gradient * y)[:, :-4].sum((0, 1))  # a block of rows is lost

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Norm.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return out

    before = model.layers[1].norm2
    model.layers[1].norm2 = Module().to(dtype=next(model.parameters()).dtype)

    class Undo:
        def remove(self) -> None:
            model.layers[1].norm2 = before

    return Undo()


KERNELS: dict[str, Callable[[Llama], Any]] = {
    "dV lost for the last tokens": behind("layers.1.attention.v_proj", lost_rows),
    "dK scaled by 2": behind("layers.1.attention.k_proj", lambda g: g * 2),
    "dQ with the wrong sign": behind("layers.0.attention.q_proj", lambda g: -g),
    "dx of up dropped to a quarter": behind("layers.0.mlp.up_proj", lambda g: g * 0.25),
    "a norm's dw loses rows": norm_without_rows,
    "dy of the norm's output lost for some tokens": behind("layers.0.norm2", lost_rows),
    "dlogits scaled (no symmetry broken: not seen)": behind("head", lambda g: g * 2),
    "gate's gradient wrong (no symmetry broken: not seen)": behind("layers.0.mlp.gate_proj", lambda g: g * 2),
}


def faults() -> None:
    print(f"| fault | {' | '.join(PRECISIONS)} |\n|---|---|---|---|")
    caught = dict.fromkeys(PRECISIONS, 0)
    for name in (*AFTER, *KERNELS):
        cells = []
        for precision in PRECISIONS:
            model, train = prepared(precision)
            handle = KERNELS[name](model) if name in KERNELS else None

            def change(model: Llama = model, name: str = name) -> None:
                if name in AFTER:
                    AFTER[name]({key: each.grad for key, each in model.named_parameters() if each.grad is not None})

            findings, z = trained(model, train, 4, change)
            if handle is not None:
                handle.remove()
            caught[precision] += bool(findings)
            cells.append(f"step {findings[0].step}, z {max(z):.2g}" if findings else "-")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print(f"| found of {len(AFTER) + len(KERNELS)} | {' | '.join(str(each) for each in caught.values())} |")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    begun = time.monotonic()
    {"coverage": coverage, "healthy": healthy, "faults": faults, "cost": cost}[sys.argv[1]]()
    print(f"{time.monotonic() - begun:.0f} s")
