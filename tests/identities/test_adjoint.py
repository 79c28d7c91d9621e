"""The adjoint test of a module in a measured step: backwards that are wrong are named, also where a symmetry holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookstats
from hookstats import Snapshot
from hookstats.rules import identity, judge, wrong_backward
from hookstats.watch.arguments import DEFAULT_TENSORS
from tests.identities.models import Llama, ids

pytestmark = pytest.mark.usefixtures("one_thread")


class Derived(torch.autograd.Function):
    """Any forward, with the backward of another one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: Any, other: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.other = other
        out: torch.Tensor = value(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(ctx.other(x), x, gradient)
        return found, None, None


class Norm(nn.Module):
    """An RMSNorm by a function of its own, whose backward may be another one's."""

    def __init__(self, width: int, backward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.weight, self._backward = nn.Parameter(torch.ones(width)), backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def normed(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

        y: torch.Tensor = Derived.apply(x, normed, self._backward or normed)  # type: ignore[no-untyped-call]
        return y * self.weight


class Scaled(nn.Module):
    """An attention whose logits' gradients lack the scale, for queries and keys alike."""

    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.is_wrong = is_wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.q_proj(x) @ self.k_proj(x).mT
        other = (lambda y: y) if self.is_wrong else (lambda y: y / 4)
        logits = Derived.apply(logits, lambda y: y / 4, other)  # type: ignore[no-untyped-call]
        out: torch.Tensor = self.o_proj(logits.softmax(-1) @ self.v_proj(x))
        return out


def without_projection(x: torch.Tensor) -> torch.Tensor:
    """Take the scale for a constant, as a fused kernel has done."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6).detach()


class Silu(nn.Module):
    """Its backward takes the sigmoid for a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        silu, wrong = nn.functional.silu, lambda x: x * x.sigmoid().detach()
        out: torch.Tensor = Derived.apply(x, silu, wrong)  # type: ignore[no-untyped-call]
        return out


def snapshots(
    model: nn.Module,
    x: torch.Tensor,
    steps: int,
    *,
    autocast: bool = False,
    run: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
    **attached: Any,
) -> tuple[list[Snapshot], hookstats.Monitor]:
    optimizer, taken = torch.optim.SGD(model.parameters(), 1e-2), list[Snapshot]()
    attached = {"every": 1, "tensors": ("adjoint",), "options": hookstats.Options(strict=True)} | attached
    sinks = [taken.append, *attached.pop("sinks", [])]
    with hookstats.attach(model, sinks=sinks, **attached) as monitor:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = run(model, x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
    return taken, monitor


def snapshots_of_a_wrong_norm() -> list[Snapshot]:
    """Return those of docs/rules.md: it is wrong from step 12 on."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 256), Norm(256), nn.Linear(256, 4))

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        steps.append(x)
        model[1]._backward = without_projection if len(steps) > 12 else None
        out: torch.Tensor = model(x)
        return out

    steps = list[torch.Tensor]()
    return snapshots(model, torch.randn(32, 8), 24, tensors=(*DEFAULT_TENSORS, "adjoint"), modules=["1"], run=run)[0]


def largest_of(taken: list[Snapshot]) -> dict[str, float]:
    """Return how far each gradient was off at most, by its module and argument."""
    found = dict[str, float]()
    for each in taken:
        for site in each.order:
            if site.tensor.startswith("adjoint.") and each[site].total.count:
                name = f"{site.name} {site.tensor.removeprefix('adjoint.')}"
                found[name] = max(found.get(name, 0.0), float(each[site].total.abs_max))
    return found


@pytest.mark.parametrize("precision", ["float32", "autocast", "bfloat16"])
def test_backwards_that_are_right_are_silent(precision: str) -> None:
    torch.manual_seed(0)
    model: Any = Llama()
    if precision == "bfloat16":
        model.bfloat16()
    taken, _ = snapshots(model, ids(2), 50, autocast=precision == "autocast", modules=["*"])
    assert judge(taken, [wrong_backward]) == []
    found = largest_of(taken)
    assert {"layers.0.attention input", "layers.0.norm1 weight", "layers.0.mlp up_proj.weight"} <= found.keys()
    assert max(found.values()) < 0.05, found


WRONG: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "a norm without its projection": (lambda: Norm(16, without_projection), "1", "its input"),
    "half of an activation's derivative": (Silu, "1", "its input"),
    "an attention without its scale": (lambda: Scaled(is_wrong=True), "1", "its parameter q_proj.weight"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_backward_is_found_though_the_symmetries_hold(fault: str) -> None:
    make, name, argument = WRONG[fault]
    torch.manual_seed(0)
    x = torch.randn(4, 12, 8)
    model = nn.Sequential(nn.Linear(8, 16), make(), nn.Linear(16, 4))
    options = hookstats.Options(identities=hookstats.find_identities(model, lambda: model(x)), strict=True)
    taken, _ = snapshots(model, x, 8, modules=["?*"], options=options)
    assert judge(taken, [identity]) == []
    found = judge(taken, [wrong_backward])
    assert {(each.site.name if each.site else "", each.severity) for each in found} == {(name, "warning")}
    assert any(f"the gradient of {argument} is off by " in each.sentence for each in found), found


def test_a_backward_that_was_right_before_is_critical() -> None:
    (found,) = judge(snapshots_of_a_wrong_norm(), [wrong_backward])
    assert (found.severity, found.since, found.step) == ("critical", 12, 13)


class Noisy(nn.Module):
    """Dropout, running statistics, counters: what a run of it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.calls, self.seen = 0, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        out: torch.Tensor = self.dropout(self.norm(self.linear(x)).relu_())
        return out


def test_training_is_the_same_to_the_bit_with_and_without() -> None:
    def trained(tensors: tuple[str, ...]) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Noisy(), nn.Linear(8, 2))

        def run(model: Any, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(model[0], x, use_reentrant=False)
            out: torch.Tensor = model[2](checkpoint(model[1], hidden, use_reentrant=False))
            return out

        snapshots(model, torch.randn(16, 8), 10, tensors=tensors, run=run)
        return model.state_dict(), model[1].calls, model[1].seen, torch.rand(4)  # type: ignore[union-attr]

    with_test, without = trained(("output", "adjoint")), trained(("output",))
    assert with_test[1:3] == without[1:3] == (20, list(range(1, 21)))  # each block runs twice a step: it is recomputed
    assert torch.equal(with_test[3], without[3])
    assert all(torch.equal(value, without[0][key]) for key, value in with_test[0].items())


def test_what_is_not_smooth_or_cannot_be_copied_is_left_out_with_its_reason(tmp_path: Path) -> None:
    class Rounds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + ((8 * x).round() / 8 - x).detach()  # a straight-through estimator

    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
            cache.calls += 1
            return x * 2

    class Cache:
        calls = 0

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model[3](model[2](model[1](model[0](x)), cache))
        return out

    torch.manual_seed(0)
    cache = Cache()
    model = nn.Sequential(nn.Linear(8, 8), Rounds(), Takes(), nn.Embedding(3, 8, padding_idx=0))
    model[3] = nn.Linear(8, 8)
    sinks = [hookstats.record(tmp_path / "run", on_finding=None)]
    taken, monitor = snapshots(model, torch.randn(64, 8), 8, run=run, sinks=sinks)
    assert judge(taken, [wrong_backward]) == []
    assert cache.calls == 8
    assert {name.split()[0] for name in largest_of(taken)} == {"0", "3"}
    law = monitor.laws()["adjoint"]
    assert law.is_applied
    assert "1 modules: it is given a Cache, which cannot be copied" in law.where


def test_copies_are_counted_in_the_memory_budget(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(256, 64)
    for budget, is_tested in ((1 << 16, False), (1 << 20, True)):
        options = hookstats.Options(memory_budget=budget, strict=True)
        sinks = [hookstats.record(tmp_path / str(budget), on_finding=None)]
        taken, monitor = snapshots(model, x, 4, options=options, sinks=sinks)
        assert bool(largest_of(taken)) == is_tested
        assert is_tested != ("memory_budget" in monitor.laws()["adjoint"].where)


def test_a_module_whose_run_fails_costs_a_step_nothing_but_its_test() -> None:
    class Once(nn.Module):
        """It runs in bfloat16 alone, as kernels do."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.bfloat16:
                raise RuntimeError("expected bfloat16")
            return x * 2

    model = nn.Sequential(nn.Linear(8, 8), Once(), nn.Linear(8, 2)).bfloat16()
    taken, _ = snapshots(model, torch.randn(16, 8).bfloat16(), 8, options=hookstats.Options())
    assert {name.split()[0] for name in largest_of(taken)} == {"0", "2"}
