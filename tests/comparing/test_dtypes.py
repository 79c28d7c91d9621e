"""Comparisons with coarser dtypes: twins of ten kinds of models agree, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Site, Snapshot, compare
from tests.comparing import twins
from tests.snapshots import snapshot

NEEDS_TRANSFORMERS = ("gpt2", "llama")


@cache
def fine(name: str, tokens: str = "random", scale: float = 0.0) -> list[Snapshot]:
    return twins.train(name, tokens=tokens, scale=scale, steps=2)


@pytest.mark.parametrize("amp", [True, False], ids=["autocast", "weights"])
@pytest.mark.parametrize("name", twins.MODELS)
def test_float32_and_bfloat16_twins_agree_forward_and_backward(name: str, amp: bool) -> None:
    if name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers")
    with torch.backends.mkldnn.flags(enabled=name != "lstm"):  # whose kernel refuses bfloat16 on some CPUs
        found = compare(fine(name), twins.train(name, "bfloat16", amp=amp, steps=2), dtype="bfloat16")
        assert found.first is None, str(found.first)


@pytest.mark.parametrize("name", ["mlp", "resnet", "gpt", "vit"])
def test_float32_and_float16_twins_agree(name: str) -> None:
    low = twins.train(name, "float16", scale=4096.0, steps=2)
    found = compare(fine(name, scale=4096.0), low, dtype="float16")
    assert found.first is None, str(found.first)


@pytest.mark.parametrize("tokens", ["padded", "equal"])
def test_twins_agree_where_tokens_repeat_so_that_rows_share_their_roundings(tokens: str) -> None:
    for name in ("gpt", "moe"):
        low = twins.train(name, "bfloat16", amp=True, tokens=tokens, steps=2)
        found = compare(fine(name, tokens), low, dtype="bfloat16")
        assert found.first is None, str(found.first)


def of_unit_variance(model: nn.Module) -> None:
    """Instead of a GPT's small initial values, with which attention hardly chooses."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)


def of_a_gpt(model: nn.Module) -> None:
    pass


@cache
def once(begin: Callable[[nn.Module], None], amp: bool, fault: str = "") -> list[Snapshot]:
    def change(model: Any) -> None:
        begin(model)
        with torch.no_grad():
            FAULTS.get(fault, lambda block: None)(model.blocks[1])

    dtype = "bfloat16" if amp else "float32"
    return twins.train("gpt", dtype, amp=amp, change=change, steps=1, seed=int(fault == "seed"))


def transpose(block: Any) -> None:
    block.attn.proj.weight.copy_(block.attn.proj.weight.T.clone())


def scatter(block: Any) -> None:
    weight = block.feed.up.weight
    weight.mul_(1 + 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)))


FAULTS: dict[str, Callable[[Any], object]] = {
    "relu": lambda block: setattr(block.feed, "act", nn.ReLU()),
    "silu": lambda block: setattr(block.feed, "act", nn.SiLU()),
    "tanh": lambda block: setattr(block.feed, "act", nn.GELU(approximate="tanh")),
    "scale": lambda block: setattr(block.attn, "scale", 1.0),
    "mask": lambda block: setattr(block.attn, "causal", False),
    "head": lambda block: setattr(block.attn, "masked", 1),
    "eps": lambda block: setattr(block.norm1, "eps", 1e-2),
    "norm": lambda block: setattr(block, "norm2", nn.Identity()),
    "dropout": lambda block: setattr(block.drop, "p", 0.1),
    "two percent": lambda block: block.feed.up.weight.mul_(1.02),
    "scattered": scatter,
    "transposed": transpose,
}


@pytest.mark.parametrize(
    ("fault", "begin", "site"),
    [
        ("relu", of_a_gpt, Site("blocks.1.feed.act", "output")),
        ("silu", of_a_gpt, Site("blocks.1.feed.act", "output")),
        ("scale", of_unit_variance, Site("blocks.1.attn.proj", "output")),
        ("mask", of_unit_variance, Site("blocks.1.attn.proj", "output")),
        ("head", of_unit_variance, Site("blocks.1.attn.proj", "output")),
        ("transposed", of_unit_variance, Site("blocks.1.attn.proj", "output")),
        ("eps", of_a_gpt, Site("blocks.1.norm1", "output")),
        ("norm", of_a_gpt, Site("blocks.1.feed.up", "output")),
        ("two percent", of_a_gpt, Site("blocks.1.feed.up", "output")),
        ("dropout", of_a_gpt, Site("blocks.1.feed.down", "grad_output")),
        ("seed", of_a_gpt, Site("tokens", "output")),
    ],
)
def test_a_fault_in_an_autocast_program_is_named_where_it_first_shows(
    fault: str, begin: Callable[[nn.Module], None], site: Site
) -> None:
    assert compare(once(begin, amp=False), once(begin, amp=True), dtype="bfloat16").first is None
    found = compare(once(begin, amp=False), once(begin, amp=True, fault=fault), dtype="bfloat16").first
    assert found.site == site, str(found)


@pytest.mark.parametrize("fault", ["tanh", "scattered"])
def test_what_changes_elements_by_no_more_than_bfloat16_does_is_found_in_float32_alone(fault: str) -> None:
    assert compare(once(of_a_gpt, amp=False), once(of_a_gpt, amp=True, fault=fault), dtype="bfloat16").first is None

    def change(model: Any) -> None:
        with torch.no_grad():
            FAULTS[fault](model.blocks[1])

    found = compare(once(of_a_gpt, amp=False), twins.train("gpt", change=change, steps=1)).first
    assert found.site.name == {"tanh": "blocks.1.feed.act", "scattered": "blocks.1.feed.up"}[fault]


def trained_before_a_norm(flipped: bool, dropped: bool = False) -> list[Snapshot]:
    """A model with a bias whose gradient is rounding alone: a norm takes it out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GELU(), nn.Flatten(), nn.Linear(3136, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    snapshots: list[Snapshot] = []
    tensors = ("output", "grad_output", "param_grad", "update_sample", "optimizer")
    with hookstats.attach(model, every=1, tensors=tensors, sinks=snapshots.append) as monitor:
        x, y = twins.batch("cnn", 0, 16), torch.arange(16) % 10
        x, y = (x.flip(0), y.flip(0)) if flipped else (x, y)
        nn.functional.cross_entropy(model(x), y).backward()
        if dropped:
            model[4].bias.grad.mul_(0.99)
        optimizer.step()
        monitor.step()
    return snapshots


def test_gradients_that_are_rounding_alone_are_judged_by_their_terms_and_what_is_made_of_them_too() -> None:
    found = compare(trained_before_a_norm(False), trained_before_a_norm(True))
    assert found.first is None, str(found.first)
    assert not found.is_equal
    wrong = compare(trained_before_a_norm(False), trained_before_a_norm(True, dropped=True)).first
    assert wrong.site == Site("4.bias", "param_grad")


@pytest.mark.parametrize("differing", [Site("layer", "output"), Site("weight", "param_grad")], ids=str)
@pytest.mark.parametrize("kind", ["update_sample", "optimizer.exp_avg"])
def test_what_is_measured_of_a_parameter_is_judged_as_one_and_not_as_an_activation(kind: str, differing: Site) -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    coarse = x.reshape(256, 2).bfloat16()

    def judge_pair(kind: str, dtype: str | None) -> tuple[float, str]:
        layer, gradient = Site("layer", "output"), Site("weight", "param_grad")
        one = {Site("weight", kind): coarse, layer: x, gradient: x}
        first = compare(snapshot(0, one), snapshot(0, one | {differing: 3 * x}), dtype=dtype).first
        assert first.site == differing
        return first.allowed, first.rounded_to

    for dtype in (None, "bfloat16"):
        assert judge_pair(kind, dtype) == judge_pair("param", dtype)


def test_rows_that_are_zero_throughout_are_no_kink_but_single_zeros_are() -> None:
    """Gradients that differ by 1 % of their rms: a flip of a ReLU explains it, a masked row does not."""

    def gradient(x: torch.Tensor, mask: torch.Tensor, shift: float) -> Snapshot:
        model = nn.Linear(16, 16, bias=False)
        with hookstats.attach(model, tensors="grad_output") as monitor:
            (model(x) * (1 + shift) * mask).sum().backward()
            return monitor.snapshot()

    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    rows = (torch.arange(64) % 2).float()[:, None].expand(64, 16)
    single = (torch.arange(64)[:, None] // (1 + torch.arange(16)) % 2).float()
    for mask, parts in ((rows, True), (single, False)):
        found = compare(gradient(x, mask, 0.0), gradient(x, mask, 0.01), dtype="bfloat16")
        assert (found.first is not None) == parts, str(found)
