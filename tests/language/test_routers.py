"""tensors=("router",): how sure routers are, and how many tokens each expert gets."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Options, Snapshot, _native
from hookstats._warn import WarnOnce
from hookstats.language import rows
from hookstats.language.finding import routers

STRICT = Options(strict=True)
TOKENS, EXPERTS = 60, 8


class Router(nn.Module):
    """A router like torchtitan's: a gate inside, scores and indices and counts outside."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(16, EXPERTS, bias=False)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = self.gate(x).float().sigmoid()
        chosen = (scores if bias is None else scores + bias).topk(self.top_k, dim=-1).indices
        counts = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS)
        return scores.gather(1, chosen), chosen, counts


class Experts(nn.Module):
    """Their weights lie in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, 16, 16) / 4)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.einsum("tki,tk->ti", torch.einsum("ti,tkij->tkj", x, self.w[chosen]), weights)


class Fused(nn.Module):
    """A mixture whose bias steers what is chosen, as DeepSeek-V3's does."""

    def __init__(self, top_k: int = 2) -> None:
        super().__init__()
        self.experts = Experts()
        self.router = Router(top_k)
        self.register_buffer("bias", torch.linspace(-0.5, 0.5, EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, self.chosen, _ = self.router(x, self.bias)
        return x + self.experts(x, weights, self.chosen)


class Plain(nn.Module):
    """A router as in most tutorials: a Linear called gate, and a list of experts."""

    def __init__(self, top_k: int = 2) -> None:
        super().__init__()
        self.num_experts_per_tok = top_k
        self.gate = nn.Linear(16, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.logits = self.gate(x)
        weights, self.chosen = self.logits.softmax(-1).topk(self.num_experts_per_tok, dim=-1)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        return x + (every.gather(1, self.chosen[..., None].expand(-1, -1, 16)) * weights[..., None]).sum(1)


def model_of(kind: type[Any], **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(**options), kind(**options))


def batch(tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(1))


def load_of(snapshot: Snapshot, name: str) -> list[float]:
    stats = snapshot[name, "router.load"]
    tokens: list[float] = (stats.channels.mean * stats.channels.count).tolist()
    return tokens


@pytest.mark.parametrize(("kind", "name"), [(Fused, "router"), (Plain, "gate")])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_loads_are_those_of_what_was_chosen(kind: type[Any], name: str, top_k: int) -> None:
    model = model_of(kind, top_k=top_k)
    with hookstats.attach(model, tensors=("router",), options=STRICT) as monitor:
        model(batch()).sum().backward()
        snapshot = monitor.step()
    assert snapshot is not None
    for number in (0, 1):
        wanted = torch.bincount(model[number].chosen.flatten(), minlength=EXPERTS).tolist()
        assert load_of(snapshot, f"{number}.{name}") == wanted
        assert sum(wanted) == TOKENS * top_k


def test_entropy_and_margin_are_those_of_a_float64_softmax() -> None:
    model = model_of(Plain)
    with hookstats.attach(model, tensors=("router",), options=STRICT) as monitor:
        model(batch())
        snapshot = monitor.snapshot()
    logits = model[0].logits.detach().double()
    p, largest = logits.softmax(-1), logits.topk(3).values
    entropy, margin = -(p * p.log()).sum(-1), largest[:, 1] - largest[:, 2]
    for kind, values in (("router.entropy", entropy), ("router.margin", margin)):
        stats = snapshot["0.gate", kind].total
        assert stats.count == TOKENS
        assert stats.mean == pytest.approx(values.mean().item(), rel=1e-5)
        assert stats.min == pytest.approx(values.min().item(), rel=1e-3, abs=1e-5)
    with pytest.raises(ValueError, match="max_violation: expected statistics per channel, got totals alone"):
        snapshot["0.gate", "router.entropy"].max_violation  # noqa: B018


def test_forwards_of_a_step_add_up_and_recomputations_do_not() -> None:
    model = model_of(Fused)
    with hookstats.attach(model, tensors=("router",), options=STRICT) as monitor:
        total = torch.zeros(EXPERTS)
        for tokens in (10, 30):
            y = torch.utils.checkpoint.checkpoint(model, batch(tokens).requires_grad_(), use_reentrant=False)
            total += torch.bincount(model[1].chosen.flatten(), minlength=EXPERTS)
            y.sum().backward()
        snapshot = monitor.step()
    assert snapshot is not None
    assert load_of(snapshot, "1.router") == total.tolist()


def test_ignored_tokens_are_in_no_load() -> None:
    model = model_of(Fused)
    ignored = torch.zeros(4, TOKENS // 4, dtype=torch.bool)
    ignored[1, 5:] = True
    with hookstats.attach(model, tensors=("router",), options=STRICT) as monitor:
        with monitor.ignore(ignored):
            model(batch())
        snapshot = monitor.snapshot()
    left = model[0].chosen[~ignored.flatten()]
    assert load_of(snapshot, "0.router") == torch.bincount(left.flatten(), minlength=EXPERTS).tolist()
    assert snapshot["0.router", "router.entropy"].total.count == len(left)


@pytest.mark.parametrize(("kind", "name"), [(Fused, "router"), (Plain, "gate")])
def test_graphs_measure_what_eager_mode_does(kind: type[Any], name: str) -> None:
    found = []
    for compiled in (False, True):
        model = model_of(kind)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        with hookstats.attach(model, tensors=("router",), options=STRICT, every=1) as monitor:
            run(batch()).sum().backward()
            found.append(monitor.step())
    eager, graph = found
    for number in (0, 1):
        assert load_of(graph, f"{number}.{name}") == load_of(eager, f"{number}.{name}")
        for kind_of in ("router.entropy", "router.margin"):
            mine, wanted = graph[f"{number}.{name}", kind_of].total, eager[f"{number}.{name}", kind_of].total
            assert mine.count == wanted.count
            assert mine.mean == pytest.approx(wanted.mean, rel=1e-5)


@pytest.mark.parametrize("ignoring", [False, True])
def test_what_fails_inside_a_graph_is_told_and_becomes_no_number(
    ignoring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> torch.Tensor:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rows, "_warn_once", WarnOnce())
    model = model_of(Fused)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    ignored = torch.arange(TOKENS).reshape(4, -1) % 3 == 0
    found = []
    with hookstats.attach(model, tensors=("router",), options=STRICT, every=1) as monitor:
        for step in range(3):
            with monkeypatch.context() as patch, monitor.ignore(ignored) if ignoring else nullcontext():
                if step == 1:
                    patch.setattr(_native, "softmax_rows", fail)
                    with pytest.warns(UserWarning, match="not measured in a graph, by .*routers: .*no memory"):
                        run(batch()).sum().backward()
                else:
                    run(batch()).sum().backward()
            found.append(monitor.step())
        found += monitor.detach()
    before, failed, after = (each for each in found if each is not None)
    for number in (0, 1):
        for kind in ("router.entropy", "router.margin", "router.load"):
            site = f"{number}.router", kind
            assert failed[site].total.count == 0, site
            assert after[site].total.count == before[site].total.count > 0, site
        assert load_of(after, f"{number}.router") == load_of(before, f"{number}.router")


def test_what_is_a_router() -> None:
    model = nn.ModuleDict({"fused": Fused(3), "plain": Plain(1), "mlp": nn.Sequential(nn.Linear(16, EXPERTS))})
    found = routers(dict(model.named_modules()))
    assert {name: (each.experts, each.top_k) for name, each in found.items()} == {
        "fused.router": (EXPERTS, 3),
        "plain.gate": (EXPERTS, 1),
    }
    assert found["fused.router"].gate is model["fused"].router.gate
    with pytest.raises(ValueError, match="expected routers for 'router', found none"):
        hookstats.attach(model["mlp"], tensors=("router",))


def test_who_does_not_say_how_many_it_chooses_has_no_load() -> None:
    model = Plain()
    gate = model.gate
    del model.num_experts_per_tok
    with hookstats.attach(model, tensors=("router",), options=STRICT) as monitor:
        gate(batch())
        assert [site.tensor for site in monitor.snapshot().order] == ["router.entropy"]


def test_max_violation_and_the_share_of_dead_experts() -> None:
    def stats(*tokens: float) -> Any:
        return hookstats.measure(torch.tensor([tokens, tokens]), -1)

    assert stats(5.0, 5.0, 5.0, 5.0).max_violation == 0
    assert stats(0.0, 0.0, 0.0, 8.0).max_violation == 3
    assert stats(0.0, 2.0, 0.0, 8.0).dead_share == 0.5
    assert math.isnan(stats(0.0, 0.0).max_violation)


def test_tokens_that_were_dropped_are_in_no_load() -> None:
    class Dropping(Router):
        def forward(
            self, x: torch.Tensor, bias: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            scores, chosen, counts = super().forward(x, bias)
            self.said = chosen.clone()
            self.said[::3, 0] = -1
            return scores, self.said, counts

    mixture = Fused()
    mixture.router = Dropping(2)
    with hookstats.attach(mixture, tensors=("router",), options=STRICT) as monitor:
        mixture.router(batch(), None)
        snapshot = monitor.snapshot()
    said = mixture.router.said
    assert load_of(snapshot, "router") == torch.bincount(said[said >= 0], minlength=EXPERTS).tolist()


class ByHand(nn.Module):
    """A mixture in which no hook finds a router: the gate is a plain parameter."""

    def __init__(self, monitors: list[hookstats.Monitor], gives: str = "both") -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, 16, generator=torch.Generator().manual_seed(0)))
        self.monitors, self.gives = monitors, gives

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = x @ self.gate.T
        chosen = (logits + torch.linspace(-1, 1, EXPERTS)).topk(2, -1).indices
        self.logits, self.chosen = logits, chosen
        for monitor in self.monitors:
            if self.gives == "both":
                monitor.router("moe", logits=logits, chosen=chosen)
            elif self.gives == "logits":
                monitor.router("moe", logits=logits, top_k=2)
            else:
                monitor.router("moe", chosen=chosen, experts=EXPERTS)
        return x * logits.softmax(-1).gather(-1, chosen).sum(-1, keepdim=True)


@pytest.mark.parametrize("gives", ["both", "logits", "chosen"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_router_by_hand_is_measured_as_one_that_is_found(gives: str, compiled: bool) -> None:
    torch._dynamo.reset()
    monitors: list[hookstats.Monitor] = []
    model = ByHand(monitors, gives)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    with hookstats.attach(model, "*", tensors=("output",), options=STRICT, every=2) as monitor:
        monitors.append(monitor)
        model(batch())  # the sites are made in eager mode
        monitor.step()
        run(batch())
        assert monitor.step() is None  # not measured
        run(batch())
        snapshot = monitor.step()
        run(batch())
        assert monitor.step() is None
    of = model.logits.topk(2, -1).indices if gives == "logits" else model.chosen
    assert load_of(snapshot, "moe") == torch.bincount(of.flatten(), minlength=EXPERTS).tolist()
    sites = {site.tensor for site, stats in snapshot.items() if site.name == "moe" and stats.calls}
    if gives == "chosen":
        assert sites == {"router.load"}
        return
    assert sites == {"router.entropy", "router.margin", "router.load"}
    p, largest = model.logits.detach().double().softmax(-1), model.logits.detach().double().topk(3).values
    assert snapshot["moe", "router.entropy"].total.mean == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-5)
    assert snapshot["moe", "router.margin"].total.mean == pytest.approx(
        (largest[:, 1] - largest[:, 2]).mean().item(), rel=1e-5
    )


def test_a_router_by_hand_changes_no_bit_counts_recomputed_tokens_once_and_leaves_ignored_ones_out() -> None:
    monitors: list[hookstats.Monitor] = []
    model = ByHand(monitors)
    bare = ByHand([])
    x = batch().unflatten(0, (4, -1))
    bare(x).square().sum().backward()
    ignored = torch.zeros(4, TOKENS // 4, dtype=torch.bool)
    ignored[1, 5:] = True
    with hookstats.attach(model, "*", tensors=("output",), options=STRICT) as monitor:
        monitors.append(monitor)
        with monitor.ignore(ignored):
            torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False).square().sum().backward()
        snapshot = monitor.step()
    assert torch.equal(model.gate.grad, bare.gate.grad)  # type: ignore[arg-type]
    left = model.chosen[~ignored]
    assert load_of(snapshot, "moe") == torch.bincount(left.flatten(), minlength=EXPERTS).tolist()
    assert snapshot["moe", "router.entropy"].total.count == len(left)


L, C = torch.randn(5, 4), torch.zeros(5, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, TypeError, "router: expected logits, chosen or both, got neither"),
        ({"logits": 3}, TypeError, "router: logits: expected a tensor, got int"),
        ({"logits": L, "experts": 4.0}, TypeError, "router: experts: expected an int, got 4.0"),
        ({"logits": C}, TypeError, "router: logits: expected floating [..., experts], got torch.int64 of shape (5, 2)"),
        (
            {"logits": L[0, 0]},
            TypeError,
            "router: logits: expected floating [..., experts], got torch.float32 of shape ()",
        ),
        ({"chosen": L, "experts": 4}, TypeError, "router: chosen: expected integers [..., top_k], got torch.float32"),
        ({"chosen": C}, ValueError, "router: expected experts=, because chosen does not tell how many there are"),
        ({"logits": L, "experts": 5}, ValueError, "router: logits: expected 5 experts, got (5, 4)"),
        ({"logits": L, "top_k": 5}, ValueError, "router: top_k: expected at most the 4 experts, got 5"),
        ({"logits": L, "top_k": -1}, ValueError, "router: top_k: expected at most the 4 experts, got -1"),
        ({"chosen": C, "experts": 4, "top_k": 3}, ValueError, "router: chosen: expected 3 experts of each token"),
        ({"logits": L[:4], "chosen": C}, ValueError, "of the same tokens, got (4, 4) and (5, 2)"),
        ({"logits": L, "chosen": C.to("meta")}, ValueError, "on one device, got cpu and meta"),
    ],
)
def test_what_is_no_router_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with hookstats.attach(nn.Linear(2, 2), "*") as monitor:
        with pytest.raises(error, match=re.escape(message)):
            monitor.router("moe", **given)
        with pytest.raises(TypeError, match="router: expected a name, got 3"):
            monitor.router(3, logits=L)  # type: ignore[arg-type]


def test_a_router_by_hand_has_a_name_of_its_own_and_stays_the_same() -> None:
    model = model_of(Fused)
    with hookstats.attach(model, tensors=("router",)) as monitor:
        with pytest.raises(ValueError, match=r"router: expected a name that no watched router has, got '0\.router'"):
            monitor.router("0.router", logits=L)
        monitor.router("moe", logits=L, top_k=2)
        with pytest.raises(ValueError, match="expected 4 experts and top 2 of 'moe' as before, got 4 and 1"):
            monitor.router("moe", logits=L, top_k=1)
