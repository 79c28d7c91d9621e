"""Hooks that come and go in a process that has compiled: what it compiled is kept, and no call is missed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import hookstats
from hookstats import edit
from hookstats.modules import order
from tests.models import THREE_KINDS, Residual
from tests.tools.edits import scale_by

DEFAULT = torch._dynamo.config.recompile_limit  # 8
LIMIT = 4  # soon reached by monitors, whose graphs are their own


@pytest.fixture(autouse=True)
def a_process_that_has_not_met_hookstats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And in which a frame that would run eagerly for good raises instead."""
    monkeypatch.setattr(order, "_guards", order._Guards())  # the hooks of other tests may still be there
    torch._dynamo.reset()
    with torch._dynamo.config.patch(
        skip_nnmodule_hook_guards=True, recompile_limit=LIMIT, fail_on_recompile_limit_hit=True
    ):
        yield


class Broken(nn.Module):
    """Two graphs, the second one in a frame that the compiler wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return self.head(x)


def compiled(how: str, backend: Any) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A model whose first and last Linear are called "up" and "head", and what runs it."""
    if how == "breaks":
        model: nn.Module = Broken()
        return model, torch.compile(model, backend=backend)
    if how == "sequential":
        model = nn.Sequential()
        model.add_module("up", nn.Linear(16, 16))
        model.add_module("head", nn.Linear(16, 4))
        return model, torch.compile(model, backend=backend, fullgraph=True)
    model = Residual(depth=1)
    if how == "function":
        return model, torch.compile(lambda x: model(x).square(), backend=backend, fullgraph=True)
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model, model
    if how == "module.compile":
        model.compile(backend=backend)
        return model, model
    return model, torch.compile(model, backend=backend, fullgraph=True)


def batch(size: int = 3) -> torch.Tensor:
    return torch.randn(size, 5, 16)


def measure(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with hookstats.attach(model, ["*up", "head"], tensors=THREE_KINDS, every=1) as mon:
        for _ in range(2):
            x = batch()
            y = run(x)
            y.sum().backward()
            mon.step()
            taken = mon.snapshot()
            assert {site: taken[site].calls for site in mon.sites} == dict.fromkeys(mon.sites, 1)
            up = next(name for name in ("up", "blocks.0.up") if (name, "output") in taken)
            seen = model.get_submodule(up)(x if up == "up" else model.blocks[0].norm(x))
            # Comes last: an eager call is measured, too.
            assert taken[up, "output"].total.mean == pytest.approx(seen.double().mean().item(), rel=1e-4, abs=1e-6)
            mon.reset()
    assert mon.skipped == {}


def change(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = batch()
    with (
        edit(model, "*up", torch.neg) as negated,
        edit(model, "*up", scale_by(0.5), "grad_output") as scaled,
    ):
        run(x).sum().backward()
        ups = [module for name, module in model.named_modules() if name.endswith("up")]
        assert negated.changed == 3 * 5 * sum(up.out_features for up in ups)
        assert scaled.changed > 0
        before = negated.changed, scaled.changed
    run(x).sum().backward()
    assert (negated.changed, scaled.changed) == before


def keep(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with hookstats.capture(model, "*up", items=3, channels=64) as captured:
        run(batch()).sum().backward()
        run(batch()).sum().backward()
    run(batch()).sum().backward()
    for shots in captured.values():
        assert [shot.call for shot in shots] == [0, 1]
        assert all(shot.gradient is not None for shot in shots)


# What edits and captures hang on modules a graph meets as it meets monitors' hooks.
@pytest.mark.parametrize(
    ("how", "cycle"),
    [(how, measure) for how in ("function", "module.compile", "blocks", "breaks")]
    + [("function", change), ("breaks", change), ("blocks", keep), ("breaks", keep)],
)
def test_hooks_that_come_and_go_often_are_never_missed_and_never_end_compilation(
    how: str, cycle: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[None] = []
    reset = torch.compiler.reset
    monkeypatch.setattr(torch.compiler, "reset", lambda: (resets.append(None), reset()))
    counter = CompileCounterWithBackend("eager")
    model, run = compiled(how, counter)
    run(batch()).sum().backward()
    if cycle is measure:
        for _ in range(LIMIT + 1):
            cycle(model, run)
            run(batch()).sum().backward()
    else:  # edits and captures find the graphs of the last ones again, where there is room for both
        with torch._dynamo.config.patch(recompile_limit=DEFAULT):
            cycle(model, run)
            run(batch()).sum().backward()
            first = counter.frame_count
            for _ in range(3):
                cycle(model, run)
                run(batch()).sum().backward()
                assert counter.frame_count == first
    assert len(resets) == 1


@pytest.fixture
def attached() -> Iterator[None]:
    """Attach the first monitor, which makes torch forget what was compiled before it."""
    with hookstats.attach(nn.Linear(2, 2)):
        yield


def test_what_was_compiled_for_another_model_is_kept(attached: None) -> None:
    counter = CompileCounterWithBackend("eager")
    other, run_other = compiled("sequential", counter)
    run_other(batch()).sum().backward()
    assert counter.frame_count == 1
    model, run = compiled("fullgraph", "eager")
    for cycle in (measure, change, keep):
        cycle(model, run)
        run_other(batch()).sum().backward()
        assert counter.frame_count == 1, cycle
    mon = hookstats.attach(other, tensors=THREE_KINDS, every=1)
    run_other(batch()).sum().backward()
    assert counter.frame_count == 2
    assert [mon.snapshot()[site].calls for site in mon.sites] == [1] * len(mon.sites)


@pytest.mark.parametrize("cycle", [measure, change, keep])
def test_a_frame_that_has_used_up_its_graphs_has_room_for_those_with_hooks(
    attached: None, cycle: Callable[..., None]
) -> None:
    counter = CompileCounterWithBackend("eager")
    _, run_other = compiled("sequential", counter)
    run_other(batch()).sum().backward()
    model = Residual(depth=1)
    run = torch.compile(model, backend="eager", dynamic=False, fullgraph=True)
    for size in range(3, 3 + LIMIT):
        run(batch(size)).sum().backward()
    cycle(model, run)
    run_other(batch()).sum().backward()
    assert counter.frame_count == 1


def test_a_graph_looks_at_little_of_each_hook_before_it_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    seen: list[tuple[str, str]] = []

    def note(entries: Any) -> list[bool]:
        seen.extend((entry.name, entry.guard_type) for entry in entries)
        return [True] * len(entries)

    with hookstats.attach(model, tensors=("output", "grad_output"), every=1) as mon:
        run = torch.compile(model, options={"guard_filter_fn": note, "fallback_by_default": True})
        run(torch.randn(2, 4)).sum().backward()
        snapshot = mon.snapshot()
        assert [snapshot[site].calls for site in mon.sites] == [1] * 4
    hook = r"_modules\['0'\]\._forward_hooks\[[^ ]*\]\]?\)?\.?(\w*)$"  # at the end of how it is reached: its attribute
    paths = [(name.replace(".__dict__)['", ".").removesuffix("']"), kind) for name, kind in seen]  # of its class, too
    of_hook = {(found[1], kind) for path, kind in paths if (found := re.search(hook, path))}
    assert {name for name, kind in of_hook} == {"", "monitor", "slot", "gradient_slot", "is_sampled", "__call__"}
    assert len(of_hook) == 6


def looks_at_hooks() -> bool:
    return not torch._dynamo.config.skip_nnmodule_hook_guards


def test_where_nothing_is_compiled_torchs_setting_comes_back_with_the_last_hook() -> None:
    first, second = (hookstats.attach(nn.Linear(2, 2), every=1) for _ in range(2))
    with edit(nn.Linear(2, 2), "", torch.neg):
        assert looks_at_hooks()
        first.detach()
        first.detach()
        second.detach()
        assert looks_at_hooks()
    assert not looks_at_hooks()


@pytest.mark.parametrize("first", ["attach", "compile"])
def test_what_is_compiled_with_a_monitor_or_before_one_takes_no_measuring_away(first: str) -> None:
    model, twin = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))

    def measured(model: nn.Module, run: Callable[..., Any]) -> int:
        with hookstats.attach(model, tensors="output", every=1) as mon:
            run(torch.ones(3, 2))
            return mon.snapshot()["0", "output"].calls  # type: ignore[no-any-return]

    run = torch.compile(model, backend="eager")
    if first == "compile":
        run(torch.ones(3, 2))
    assert measured(model, run) == 1
    assert looks_at_hooks()  # what was compiled relies on it
    run(torch.ones(3, 2))
    other = torch.compile(twin, backend="eager")
    other(torch.ones(3, 2))
    assert measured(twin, other) == 1
    assert measured(model, run) == 1
