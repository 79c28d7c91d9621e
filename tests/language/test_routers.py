"""tensors=("router",): how sure routers are, and how many tokens each expert gets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Options, Snapshot
from hookstats.language.finding import routers

STRICT = Options(strict=True)
TOKENS, EXPERTS = 60, 8


class Router(nn.Module):
    """As torchtitan has it: a gate inside, scores and indices and counts outside."""

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
    """As in most tutorials: a Linear called gate, and a list of experts."""

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
    assert stats.channels is not None
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
    assert eager is not None
    assert graph is not None
    for number in (0, 1):
        assert load_of(graph, f"{number}.{name}") == load_of(eager, f"{number}.{name}")
        for kind_of in ("router.entropy", "router.margin"):
            mine, wanted = graph[f"{number}.{name}", kind_of].total, eager[f"{number}.{name}", kind_of].total
            assert mine.count == wanted.count
            assert mine.mean == pytest.approx(wanted.mean, rel=1e-5)


def test_training_does_not_change_by_one_bit() -> None:
    gradients = []
    for watched in (False, True):
        model = model_of(Fused)
        monitor = hookstats.attach(model, tensors=("router",), options=STRICT) if watched else None
        model(batch()).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        if monitor:
            monitor.detach()
    for bare, watched_too in zip(*gradients, strict=True):
        assert bare is not None
        assert watched_too is not None
        assert torch.equal(bare, watched_too)


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
