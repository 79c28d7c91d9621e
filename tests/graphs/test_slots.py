"""The operator of graphs finds its site by a slot as it runs, and does there what eager mode does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import hookstats
from tests.plain import OF_OUTPUTS, hearing

pytestmark = pytest.mark.usefixtures("fresh_compiler")

OBSERVE = torch.ops.hookstats.observe
ROWS = (torch.tensor([1, 3, 0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))  # two of four count


def watched() -> tuple[nn.Module, Any, hookstats.Monitor]:
    """A model of one layer, its hook, and its monitor."""
    model = nn.Sequential(nn.Linear(3, 3))
    monitor = hookstats.attach(model, ["0"], tensors=OF_OUTPUTS, every=1)
    (hook,) = model[0]._forward_hooks.values()
    return model, hook, monitor


def test_a_slot_stands_for_a_hook_and_rows_and_paths_for_what_of_a_tensor_counts() -> None:
    _, hook, monitor = watched()
    x = torch.randn(4, 3)
    OBSERVE(x, hook.slot)
    OBSERVE(x, hook.slot, *ROWS)
    OBSERVE(2 * x, hook.gradient_slot)
    OBSERVE(x.half(), hook.slot, ".a", "", None, None)
    OBSERVE(x, hook.slot, ".a", "", *ROWS)
    with monitor.paused():
        OBSERVE(x, hook.slot)
        OBSERVE(x, hook.slot, ".b", "", None, None)
    taken = monitor.snapshot()
    found = {tuple(site): (taken[site].calls, taken[site].total.count) for site in taken.order}
    assert found == {
        ("0", "output"): (2, 18),
        ("0", "grad_output"): (1, 12),
        ("0", "output.a"): (2, 18),
    }
    both = torch.cat([x, x[[1, 3]]]).double()
    assert taken["0", "output"].total.rms == pytest.approx(both.square().mean().sqrt().item())
    assert taken["0", "grad_output"].total.abs_max == pytest.approx(2 * x.abs().max().item())


class Double(nn.Module):
    """An output whose channels no type tells: what ran before does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_where_gradients_alone_are_watched_their_channels_are_found_in_the_forward() -> None:
    found = []
    for prepare in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)):
        model = nn.Sequential(nn.Conv1d(3, 8, 1), Double())
        monitor = hookstats.attach(model, tensors="grad_output", every=1)
        prepare(model)(torch.randn(4, 3, 5)).square().mean().backward()
        taken = monitor.snapshot()
        found.append(
            {site: (taken[site].channel_dim, taken[site].channels.mean.size) for site in monitor.sites if site.name}
        )
    assert found == [{("0", "grad_output"): (1, 8), ("1", "grad_output"): (1, 8)}] * 2


def test_the_operators_keep_what_torch_asks_of_operators() -> None:
    _, hook, _ = watched()
    x = torch.randn(4, 3, requires_grad=True)
    torch.library.opcheck(OBSERVE.default, (x, hook.slot))
    torch.library.opcheck(OBSERVE.rows, (x, hook.slot, *ROWS))
    torch.library.opcheck(OBSERVE.part, (x, hook.slot, ".a", "", None, None))
    version = hook.slot._version
    OBSERVE(x, hook.slot)
    assert hook.slot._version == version  # or a graph's backward would refuse what its forward saved


def test_a_slot_of_a_hook_that_is_no_more_stands_for_nothing() -> None:
    model, hook, monitor = watched()
    slot = hook.slot
    monitor.detach()
    del model, hook, monitor
    gc.collect()
    with hearing() as told:
        OBSERVE(torch.randn(4, 3), slot)
        OBSERVE(torch.randn(4, 3), slot, ".a", "", None, None)
    assert told == []


def test_a_hook_that_is_being_deleted_is_no_more() -> None:
    model, hook, monitor = watched()
    slot, seen = hook.slot, []
    x = torch.randn(4, 7)  # which fits no site, so that Python is asked
    dying = weakref.ref(hook, lambda _: seen.append(OBSERVE(x, slot)))
    model[0]._forward_hooks.clear()
    del hook
    gc.collect()
    assert dying() is None
    assert seen == [None]
    assert monitor.snapshot().order == []
    assert monitor.skipped == {}


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="needs torch 2.13: docs/limits.md")
def test_inside_a_vmap_nothing_is_measured_and_graphs_are_made() -> None:
    model = nn.Linear(4, 4)
    monitor = hookstats.attach(model, tensors=OF_OUTPUTS, every=1)

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    given = dict(model.named_parameters()), torch.randn(3, 4)
    compiled = torch.compile(per_sample, backend="aot_eager")(*given)
    for name, gradient in per_sample(*given).items():
        torch.testing.assert_close(compiled[name], gradient)
    assert monitor.snapshot().order == []


@pytest.mark.parametrize("strict", [False, True])
def test_an_expert_without_tokens_is_silent_in_graphs_too(strict: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU())
    options = hookstats.Options(strict=strict)
    monitor = hookstats.attach(model, tensors=OF_OUTPUTS, every=1, options=options)
    run = torch.compile(model, backend="aot_eager", dynamic=True)
    for rows in (0, 3, 0):
        run(torch.randn(rows, 4)).sum().backward()
        run(torch.randn(2, rows, 4)).sum().backward()
    taken = monitor.snapshot()
    assert {taken[site].total.count for site in taken.order} == {72}
    assert monitor.skipped == {}


@pytest.mark.parametrize("wrong", [torch.zeros(1), torch.zeros(2, dtype=torch.int64)])
def test_what_is_no_slot_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="slot: expected one int64, got "):
        OBSERVE(torch.randn(4, 3), wrong)


class Widths(nn.Module):
    """One module that is given tensors of two widths."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(self.act(x))))


class Mixed(nn.Module):
    """Puts out what can be measured beside what cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.whole = Several(), Integers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        several = self.parts(x)
        return several["x"] * self.whole(x).unsqueeze(-1) + several["rows"][0]


class Waves(nn.Module):
    """Complex numbers on the way, which are not measured."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.turn = nn.Linear(16, 16), Turned()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.turn(self.up(x)))


class Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x.sin())


class Several(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": x.sin(), "rows": (x.cos(), x.argmax(-1)), "none": x[:0]}


class Integers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


def trained(make: Callable[[], nn.Module], tensors: Any, backend: str | None) -> list[Any]:
    """Train three steps of two microbatches; return their numbers, and what was left out."""
    torch.manual_seed(0)
    model = make()
    monitor = hookstats.attach(model, tensors=tensors, every=1)
    run: Any = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    said: list[Any] = []
    for step in range(3):
        x = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(step))
        for each in x:
            run((each * 1.0).requires_grad_()).square().mean().backward()
        taken = monitor.step()
        for site in sorted(taken.order):
            stats = taken[site]
            width = None if stats.channels is None else len(stats.channels.count)
            said.append(
                (step, tuple(site), stats.calls, stats.total.count, width, pytest.approx(stats.total.rms, 1e-5))
            )
        said += [(step, tuple(site), skipped) for site, skipped in sorted(taken.skipped.items())]
    monitor.detach()
    return said


def nested() -> nn.Module:
    return nn.Sequential(Widths(), Widths())


@pytest.mark.parametrize(
    ("make", "tensors", "backend"),
    [(make, OF_OUTPUTS, "aot_eager") for make in (Widths, Mixed, Waves, nested)]
    + [(Mixed, OF_OUTPUTS, "eager"), (Widths, "grad_output", "aot_eager")]
    + [(make, ("input", "grad_input", "output"), "aot_eager") for make in (Waves, nested)],
)
def test_compiled_from_the_start_a_model_says_what_it_says_in_eager_mode(
    make: Callable[[], nn.Module], tensors: Any, backend: str
) -> None:
    with hearing():
        assert trained(make, tensors, backend) == trained(make, tensors, None)


def test_under_inductor_two_forwards_may_come_before_their_backwards() -> None:
    """Autograd would refuse the second backward where torch's own kernels copy what an operator may change."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    monitor = hookstats.attach(model, tensors=OF_OUTPUTS, every=1)
    run = torch.compile(model, fullgraph=True)
    losses = [run(torch.randn(4, 16)).square().mean() for _ in range(2)]
    for loss in losses:
        loss.backward()
    taken = monitor.step()
    assert {taken[site].calls for site in taken.order} == {2}
    assert len(taken.order) == 4


def test_slots_lie_where_a_graph_takes_them_as_they_are() -> None:
    """Inductor copies what lies at no whole 16 bytes; mode="reduce-overhead" refuses a graph that writes to it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    hookstats.attach(model, tensors=OF_OUTPUTS, every=1)
    addresses: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        addresses.extend(each.data_ptr() for each in inputs if each.dtype == torch.int64)
        return graph

    torch.compile(model, backend=compiler)(torch.randn(4, 3, requires_grad=True))
    assert len(set(addresses)) >= 4  # of two layers, each of the output and of its gradient
    assert all(address % 16 == 0 for address in addresses)
