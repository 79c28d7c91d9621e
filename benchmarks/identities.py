"""Identities, what they find and cost: ``python -m benchmarks.identities COMMAND``.

coverage: small models of many types, each judged at other parameters for another loss, in float64. healthy: the largest
z of 28 kinds of models that train, in four precisions. fleet: alarms in the healthy trainings of benchmarks.illnesses.
clients: the same in trainings like those of torchtitan and Megatron-LM, adjoint tests, too.
adjoint: how far gradients are off in the adjoint tests of the same kinds.
These five take names, too: of these alone. faults: gradients that are wrong in many ways, in three precisions, as the
rule finds them in the first four steps. cost: of a measured step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import hookstats
from benchmarks.illnesses import HEALTHY, KINDS, seed
from benchmarks.law_trainings import CLIENTS
from benchmarks.sampled import timed
from hookstats.identities.measuring import WHOLE_STEPS
from hookstats.results import Identities
from hookstats.rules import Finding, identity, judge, wrong_backward
from hookstats.rules.identities import compare
from hookstats.rules.step import SiteIds, Step
from hookstats.watch.arguments import DEFAULT_TENSORS
from tests.identities.models import Llama, ids, loss_of
from tests.language import zoo as languages
from tests.modules import zoo as others

PRECISIONS = ("float32", "autocast", "bfloat16")
HEALTHY_PRECISIONS = (*PRECISIONS, "float16")
HEALTHY_KINDS = """
    ours mlp cnn resnet llama qwen2 qwen3 qwen3_moe mixtral gemma gemma2 gemma3_text phi phi3 olmo2 gpt_neox gpt2 opt
    gpt_oss deepseek_v3 bloom falcon granite cohere starcoder2 smollm3 glm4 mistral
""".split()  # noqa: SIM905


WRONG = 1e-3  # of their size, by which sums differ in float64: norms that compute in float32 leave 1e-6


def moved(model: nn.Module) -> nn.Module:
    """Return a copy with other parameters, in float64."""
    torch.manual_seed(5)
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.05 * torch.randn_like(each))
    return model


def wrong_of(found: Identities, model: nn.Module, inputs: dict[str, Any]) -> str:
    """Count the identities that gradients of a random loss do not fulfil at other parameters, in float64 if it can."""

    def judged(other: nn.Module) -> str:
        def run() -> None:
            dtype = next(other.parameters()).dtype
            given = {
                name: each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
                for name, each in inputs.items()
            }
            tensors = [each for each in tree_leaves(other(**given)) if isinstance(each, torch.Tensor)]
            torch.stack([(x * torch.randn_like(x)).sum().double() for x in tensors if x.requires_grad]).sum().backward()

        return str(sum(each.relative > WRONG for each in found.check(run, other).breaks))

    try:
        return judged(moved(model))
    except RuntimeError:  # what mixes float32 into it
        try:
            return judged(moved(model).float()) + " (float32)"
        except RuntimeError:
            return "not judged: it has no backward"


def coverage(chosen: list[str]) -> None:
    print("| model | identities | sums | of the parameters | forwards | wrong |\n|---|---|---|---|---|---|")
    counts = [0, 0, 0, 0]
    for name in chosen or dict.fromkeys((*languages.TYPES, *others.TUNED, *others.OTHERS)):
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
        wrong = wrong_of(found, model, inputs)
        held = {parameter for each in found.identities for parameter in each.parameters}
        numbers = {name: each.numel() for name, each in model.named_parameters()}
        share = sum(count for parameter, count in numbers.items() if parameter in held) / sum(numbers.values())
        sums = sum(each.groups for each in found.identities)
        print(f"| {name} | {len(found)} | {sums} | {share:.0%} | {runs[0]} | {wrong} |", flush=True)
        new = (1, len(found), sums, int(wrong.split()[0]) if wrong[0].isdigit() else 0)
        counts = [a + b for a, b in zip(counts, new, strict=True)]
    print("| {} models | {} | {} | | | {} |".format(*counts))


class Trained(NamedTuple):
    findings: list[Finding]
    z: list[float]


class Training:
    """A model, its loss in a precision, and steps that are all measured."""

    def __init__(self, kind: str, precision: str) -> None:
        """kind: "ours" (a Llama by hand), one of benchmarks.illnesses, or a model type of transformers."""
        torch.manual_seed(0)
        self.dtype = {"autocast": torch.bfloat16, "float16": torch.float16}.get(precision)
        self.scaler = torch.amp.GradScaler("cpu") if precision == "float16" else None
        self.model: Any
        if kind == "ours":
            self.model, inputs = Llama(), {"ids": ids(4, 16)}
            self.loss: Callable[[], torch.Tensor] = lambda: loss_of(self.model, inputs["ids"])
        elif kind in KINDS:
            setup = KINDS[kind]()
            self.model, (x, y) = setup.model, setup.data(0)
            inputs = {"input": x.bfloat16() if precision == "bfloat16" and x.is_floating_point() else x}
            self.loss = lambda: setup.loss(self.model(inputs["input"]).float(), y)
        else:
            self.model, inputs = languages.make(kind), languages.batch()
            labels = {"labels": inputs.pop("labels")}
            self.loss = lambda: self.model(**inputs, **labels).loss
        if precision == "bfloat16":
            self.model.bfloat16()
        self._run = (lambda: self.model(inputs["input"])) if kind in KINDS else (lambda: self.model(**inputs))

    @functools.cached_property
    def found(self) -> Identities:
        return hookstats.find_identities(self.model, self._run)

    def train(self, steps: int, change: Callable[[], None] = lambda: None) -> Trained:
        """Return what the rule finds, and all z. change: of gradients, after each backward."""
        taken = self.measure(steps, change, options=hookstats.Options(identities=self.found))
        return Trained(judge(taken, [identity]), z_of(taken))

    def measure(
        self, steps: int, change: Callable[[], None] = lambda: None, **attached: Any
    ) -> list[hookstats.Snapshot]:
        optimizer, taken = torch.optim.AdamW(self.model.parameters(), lr=3e-3), list[hookstats.Snapshot]()
        with hookstats.attach(self.model, every=1, sinks=taken.append, **attached) as monitor:
            for _ in range(steps):
                optimizer.zero_grad()
                with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
                    loss = self.loss()
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                change()
                if self.scaler is None:
                    optimizer.step()
                else:
                    self.scaler.step(optimizer)
                    self.scaler.update()
                monitor.step()
        return taken


def z_of(taken: list[hookstats.Snapshot]) -> list[float]:
    """Return the largest z of each identity in each step."""
    ids_of_sites = SiteIds()
    return [float(each.z.max()) for step in taken for each in compare(Step(step, ids_of_sites))]


def healthy(kinds: list[str]) -> None:
    def measure(run: Training) -> tuple[list[float], int]:
        findings, z = run.train(10)
        return z, len(findings)

    of_kinds(kinds, measure, 8)


def adjoint(kinds: list[str]) -> None:
    def measure(run: Training) -> tuple[list[float], int]:
        taken = run.measure(40, tensors=("adjoint",))
        off = [each[site].total.rms for each in taken for site in each.order if site.tensor.startswith("adjoint.")]
        return off, len(judge(taken, [wrong_backward]))

    of_kinds(kinds, measure, 0.05)


def of_kinds(kinds: list[str], measure: Callable[[Training], tuple[list[float], int]], limit: float) -> None:
    """Print how far all kinds of models are off. measure: returns it, and how many findings there were."""
    print("| model | precision | evaluations | off: median | largest | findings |\n|---|---|---|---|---|---|")
    totals = {precision: list[float]() for precision in HEALTHY_PRECISIONS}
    for kind in kinds or HEALTHY_KINDS:
        for precision, every in totals.items():
            try:
                off, findings = measure(Training(kind, precision))
            except Exception as error:  # transformers has kinds that do not run in each precision
                print(f"| {kind} | {precision} | {type(error).__name__}: {str(error)[:60]} | | | |", flush=True)
                continue
            every += off
            figures = f"{statistics.median(off):.2g} | {max(off):.2g}" if off else "- | -"
            print(f"| {kind} | {precision} | {len(off)} | {figures} | {findings} |", flush=True)
    for precision, every in totals.items():
        if every:
            middle, large = statistics.median(every), sum(off > limit for off in every)
            print(f"| all | {precision} | {len(every)} | {middle:.2g} | {max(every):.2g} | {large} over {limit} |")


def of_fleet(names: list[str]) -> None:
    print(HELD)
    for name in names or HEALTHY:
        hold_training(name, lambda name=name: HEALTHY[name].run().snapshots)  # type: ignore[misc]


def clients(names: list[str]) -> None:
    print(HELD)
    for name in names or ("torchtitan, float32", "megatron, float32", "megatron, bfloat16"):
        hold_training(name, lambda run=CLIENTS[name]: run(("output", "adjoint")))  # type: ignore[misc]


HELD = "| training | identities | evaluations | z: largest | findings |\n|---|---|---|---|---|"


def hold_training(name: str, run: Callable[[], list[hookstats.Snapshot]]) -> None:
    """Run a training twice, and print a row: the first step of the first time shows what its model is given."""
    given, found, attach = list[tuple[Any, dict[str, Any]]](), list[Identities](), hookstats.attach

    def look(model: nn.Module, **others: Any) -> hookstats.Monitor:
        model.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)

        def stop(_: hookstats.Snapshot) -> None:
            raise KeyboardInterrupt

        return attach(model, every=1, sinks=stop)

    def hold(model: nn.Module, **how: Any) -> hookstats.Monitor:
        found.append(Identities(model, [], []))
        if not given:  # its forward is not what a step runs
            return attach(model, **how)
        args, kwargs = given[0]
        with contextlib.suppress(ValueError):  # of a forward that is another one each time
            found[0] = hookstats.find_identities(model, lambda: model(*args, **kwargs))
        return attach(model, options=hookstats.Options(identities=found[0]), **how)

    for how in (look, hold):
        with mock.patch.object(hookstats, "attach", how), contextlib.suppress(KeyboardInterrupt):
            seed()
            taken = run()
    z, findings = z_of(taken), judge(taken, [identity, wrong_backward])
    largest = f"{max(z):.2g}" if z else "-"
    print(f"| {name} | {len(found[0])} | {len(z)} | {largest} | {len(findings)} |", flush=True)


def cost() -> None:
    """Time steps of one training in turns. The first measured steps read all identities, later ones a part of them."""
    torch.manual_seed(0)
    model, batch = Llama(8), ids(16, 64)
    found = hookstats.find_identities(model, lambda: model(batch[:2]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names = ("bare", "measured", "with identities", "with identities, later", "with adjoint tests")
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(12):
        for name, seconds in taken.items():
            options = hookstats.Options(identities=found if "identities" in name else None)
            tensors = (*DEFAULT_TENSORS, *(["adjoint"] if name == "with adjoint tests" else []))
            monitor = None if name == "bare" else hookstats.attach(model, every=1, tensors=tensors, options=options)
            before = WHOLE_STEPS + 1 if "later" in name else 1
            every_step = (timed(lambda: loss_of(model, batch), optimizer, monitor, 1) for _ in range(before + 4))
            seconds += [*every_step][before:]
            if monitor is not None:
                monitor.detach()
    count = sum(each.numel() for each in model.parameters())
    print(f"{len(found)} identities, {count:,} parameters; ms of a processor a step")
    for name, seconds in taken.items():
        print(f"{name}: median {1e3 * sorted(seconds)[len(seconds) // 2]:.1f}, fastest {1e3 * min(seconds):.1f}")


Change = Callable[[dict[str, torch.Tensor]], Any]


def times(part: str, factor: float, places: Any = ...) -> Change:
    """Multiply the gradients of all parameters that have this part in their names, or some places of them."""

    def change(gradients: dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            if part in name:
                gradient[places] *= factor

    return change


A, M = "layers.1.attention", "layers.0.mlp"
Q, K, V, OUT, UP, DOWN = (
    *(f"{A}.{name}_proj.weight" for name in "qkvo"),
    f"{M}.up_proj.weight",
    f"{M}.down_proj.weight",
)
# Reductions, accumulation, buckets, scaling.
REDUCTIONS: dict[str, Change] = {
    "a norm's gradient halved": times("layers.0.norm1.weight", 0.5),
    "a norm counted twice": times("layers.1.norm2.weight", 2),
    "a norm's gradient lost": times("layers.1.norm1.weight", 0),
    "the last norm averaged over 8 ranks": times("norm.weight", 1 / 8),
    "all norms averaged over 4 ranks": times("norm", 0.25),
    "all norms but the first layer's counted twice": times("layers.1.norm", 2),
    "a norm's shard of another rank": lambda gradients: gradients["layers.0.norm2.weight"].copy_(
        gradients["layers.0.norm2.weight"].roll(16)
    ),
    "one layer's MLP x 8": times("layers.0.mlp", 8),
    "queries without 1 / sqrt(d)": times(Q, 2.83),
    "queries' biases x 4 (a small part of their sums)": times(f"{A}.q_proj.bias", 4),
    "keys not summed over a group": times(K, 0.5),
    "values of one head lost": times(V, 0, slice(0, 8)),
    "keys of one head lost": times(K, 0, slice(8, 16)),
    "outputs' columns of one head twice": times(OUT, 2, (slice(None), slice(0, 8))),
    "rows of a shard twice": times(UP, 2, slice(0, 32)),
    "rows of a shard lost": times(UP, 0, slice(48, 64)),
    "columns of a shard lost": times(DOWN, 0, (slice(None), slice(0, 16))),
    "a bucket not reduced (half)": times("layers.1.attention", 0.5),
    "a bucket of the last microbatch alone": times("layers.1.mlp", 1 / 3),
    "a parameter not unscaled": times(DOWN, 2.0**8),
    "a parameter clipped alone": times(V, 0.1),
    "the head x 2": times("head.weight", 2),
}
PLACES = {UP: (3, 4), DOWN: (4, 3), Q: (2, 5), V: (1, 6), OUT: (7, 1)}
ELEMENTS: dict[str, Change] = {
    f"one element of {name}, x {factor}": times(name, factor, place)
    for name, place in PLACES.items()
    for factor in (-1, 256)
}
FACTORS: dict[str, Change] = {
    f"{name} x {factor}": times(name, factor)
    for name, factor in ((UP, 1.01), (UP, 1.03), (UP, 1.1), (DOWN, 1.2), (K, 1.3), ("norm.weight", 1.1), (V, 1.5))
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


def lost_channels(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[..., :4] = 0
    return gradient


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "lost for the last tokens": lost_rows,
    "scaled by 2": lambda gradient: gradient * 2,
    "of the wrong sign": lambda gradient: -gradient,
    "of the token before": lambda gradient: gradient.roll(1, 1),
    "lost for a tile of channels": lost_channels,
}
OUTPUTS = {f"{A}.q_proj": "dQ", f"{A}.k_proj": "dK", f"{A}.v_proj": "dV", f"{M}.up_proj": "dy of up"}
KERNELS: dict[str, Callable[[Llama], Any]] = {
    **{
        f"{what} {how}": behind(name, change)
        for name, what in (OUTPUTS | {"layers.0.norm2": "dy of a norm"}).items()
        for how, change in CHANGES.items()
    },
    "dx of up dropped to a quarter": behind(f"{M}.up_proj", lambda g: g * 0.25),
    "a norm's dw loses rows": norm_without_rows,
    "dlogits scaled (no symmetry broken: not seen)": behind("head", lambda g: g * 2),
    "dlogits lost for the last tokens (not seen)": behind("head", lost_rows),
    "gate's gradient wrong (no symmetry broken: not seen)": behind(f"{M}.gate_proj", lambda g: g * 2),
    "gate's gradient lost for the last tokens (not seen)": behind(f"{M}.gate_proj", lost_rows),
}


def faults() -> None:
    print(f"| fault | {' | '.join(PRECISIONS)} |\n|---|---|---|---|")
    runs = {precision: Training("ours", precision) for precision in PRECISIONS}
    states = {precision: copy.deepcopy(run.model.state_dict()) for precision, run in runs.items()}
    kinds: dict[str, dict[str, Any]] = {
        "reductions": REDUCTIONS,
        "kernels": KERNELS,
        "single elements": ELEMENTS,
        "factors": FACTORS,
    }
    lines = []
    for kind, group in kinds.items():
        caught = dict.fromkeys(PRECISIONS, 0)
        for name, fault in group.items():
            cells = []
            for precision, run in runs.items():
                model: Llama = run.model
                model.load_state_dict(states[precision])
                handle = fault(model) if group is KERNELS else None

                def change(model: Llama = model, fault: Any = fault, is_kernel: bool = group is KERNELS) -> None:
                    if not is_kernel:
                        fault({key: each.grad for key, each in model.named_parameters() if each.grad is not None})

                findings, z = run.train(4, change)
                if handle is not None:
                    handle.remove()
                caught[precision] += bool(findings)
                cells.append(f"step {findings[0].step}, z {max(z):.2g}" if findings else "-")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        lines.append(f"| found of {len(group)}: {kind} | {' | '.join(str(each) for each in caught.values())} |")
    print(*lines, sep="\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    begun = time.monotonic()
    command, *names = sys.argv[1:]
    if command in ("faults", "cost"):
        {"faults": faults, "cost": cost}[command]()
    else:
        {"coverage": coverage, "healthy": healthy, "fleet": of_fleet, "clients": clients, "adjoint": adjoint}[command](
            names
        )
    print(f"{time.monotonic() - begun:.0f} s")
