"""Gradients that are right fulfil the identities to rounding, and wrong ones are named."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hookstats
from hookstats.rules.identities import compare
from hookstats.rules.step import SiteIds, Step
from tests import ranks
from tests.identities.models import Llama, RMSNorm, ids, loss_of
from tests.identities.trainings import found_once, times
from tests.rules.trainings import train as measured

pytestmark = pytest.mark.usefixtures("one_thread")


def train(model: nn.Module, autocast: bool = False, scale: float = 1.0) -> None:
    for number in range(2):  # microbatches
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = loss_of(model, ids(2 + number))
        (loss * scale).backward()


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast", "scaled", "clipped by the norm", "after training"])
def test_gradients_that_are_right_are_silent(how: str) -> None:
    model, found = copy.deepcopy(found_once())
    if how == "bfloat16":
        model.bfloat16()
    if how == "after training":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(30):
            optimizer.zero_grad()
            loss_of(model, ids()).backward()
            optimizer.step()

    def run() -> None:
        train(model, autocast=how == "autocast", scale=2.0**12 if how == "scaled" else 1.0)
        if how == "clipped by the norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    checked = found.check(run, model)
    assert checked, checked
    assert checked.judged == len(found) == 11


@pytest.mark.parametrize("copies", [2, 32])  # of many rows, squares are taken of some
def test_gradients_that_cancel_are_silent(copies: int) -> None:
    """All data in each batch, and labels that contradict each other: sums vanish, their roundings do not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    x, y = torch.randn(64, 8).repeat(copies, 1), torch.arange(64 * copies) // 64 % 2
    found = hookstats.find_identities(model, lambda: model(x))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def run() -> None:
        F.cross_entropy(model(x), y).backward()

    for _ in range(400):
        optimizer.zero_grad()
        run()
        optimizer.step()
    assert found.check(run), found.check(run)


FAULTS: dict[str, tuple[str, float, Any]] = {  # and the places of it
    "up x2": ("layers.1.mlp.up_proj.weight", 2.0, ...),
    "down lost half": ("layers.0.mlp.down_proj.weight", 0.5, ...),
    "values x4": ("layers.0.attention.v_proj.weight", 4.0, ...),
    "norm averaged": ("layers.1.norm1.weight", 0.25, ...),
    "head x1.01": ("head.weight", 1.01, ...),
    "keys of one head": ("layers.1.attention.k_proj.weight", 0.0, slice(0, 8)),
    "one element": ("layers.0.mlp.up_proj.weight", -3.0, (5, 7)),
}


def check_with(fault: str) -> Any:
    model, found = found_once()
    name, factor, places = FAULTS[fault]

    def run() -> None:
        train(model)
        times(name, factor, places=places)(0, model)

    return found.check(run)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_gradient_that_is_wrong_is_named_with_its_factor(fault: str) -> None:
    (name, factor, places), checked = FAULTS[fault], check_with(fault)
    assert checked.breaks, "nothing was found"
    assert all(name in each.identity.parameters for each in checked.breaks), checked
    if places is ...:
        assert all(dict(each.suspects)[name] == pytest.approx(factor, rel=1e-3) for each in checked.breaks)
        assert f"the gradient of {name} looks {factor:.3g} times as large as it should be" in str(checked)


def test_a_side_that_another_identity_has_cleared_is_not_named() -> None:
    name, factor, _ = FAULTS["down lost half"]
    (broken,) = check_with("down lost half").breaks  # the norm and its readers, up among them, agree
    assert broken.suspects == ((name, pytest.approx(factor)),)


def test_a_norm_that_is_stored_less_one_is_judged_by_what_it_multiplies() -> None:
    torch.manual_seed(0)
    model = Llama(offset=1.0)
    found = hookstats.find_identities(model, lambda: model(ids()))
    assert found.check(lambda: train(model))


def test_the_sums_that_differ_are_named() -> None:
    checked = check_with("one element")
    (up,) = [each for each in checked.breaks if each.identity.module == "layers.0.mlp.up_proj"]
    assert up.groups.tolist() == [5]
    assert "1 of 64 sums differ" in str(up)


def test_a_model_without_identities_is_no_error_and_proves_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), torch.randn(5, 3)
    checked = hookstats.find_identities(model, lambda: model(x)).check(lambda: model(x).sum().backward())
    assert not checked
    assert (checked.judged, checked.breaks) == (0, [])


class Tasks(nn.Module):
    """A second head reads the trunk as soon as there is a second task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 2)
        self.is_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x).relu()
        out: torch.Tensor = self.first(hidden).sum() + (self.second(hidden).sum() if self.is_second else 0)
        return out


def test_a_head_that_is_added_later_is_said_and_its_trunk_is_not_judged() -> None:
    torch.manual_seed(0)
    model, x = Tasks(), torch.randn(16, 8)
    found = hookstats.find_identities(model, lambda: model(x))
    assert found.check(lambda: model(x).backward())
    model.is_second = True
    checked = found.check(lambda: model(x).backward())
    assert (checked.judged, checked.breaks) == (0, [])
    assert "second.weight did not run when identities were found" in next(iter(checked.left_out.values()))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    options = hookstats.Options(identities=found, strict=True)
    taken = measured(
        model, lambda step: model(x), optimizer, 4, lambda step: setattr(model, "is_second", step > 1), options=options
    )
    assert [len(compare(Step(each, SiteIds()))) for each in taken] == [1, 1, 0, 0]


def same_gradients(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = dict(of_gradients(model))
    return now.keys() == before.keys() and all(torch.equal(gradient, before[name]) for name, gradient in now.items())


def of_gradients(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, each.grad) for name, each in model.named_parameters() if each.grad is not None]


class WrongNorm(torch.autograd.Function):
    """An RMSNorm whose backward forgets the projection, as a fused kernel has done."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, scale = ctx.saved_tensors
        rows = gradient.flatten(0, 1)
        # Of the last block of rows, the gradient of the weight is lost.
        of_weight = (rows * (x * scale).flatten(0, 1))[: len(rows) - len(rows) % 16].sum(0)
        return gradient * weight * scale, of_weight


def test_a_kernel_whose_backward_loses_rows_is_found_in_one_step() -> None:
    class Norm(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = WrongNorm.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return out

    torch.manual_seed(0)
    model = Llama()
    model.layers[1].norm2 = Norm(32)
    found = hookstats.find_identities(model, lambda: model(ids()))
    checked = found.check(lambda: train(model))
    assert {name for each in checked.breaks for name in each.identity.parameters} == {
        f"layers.1.{each}.weight" for each in ("norm2", "mlp.gate_proj", "mlp.up_proj")
    }


class Detached(nn.Module):
    """A branch whose last layer gets an input without a gradient, where somebody has put a detach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other, self.is_cut = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(8, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        out: torch.Tensor = self.other(x) + self.last(hidden.detach() if self.is_cut else hidden)
        return out


def test_a_gradient_that_does_not_come_or_is_0_is_named_and_all_that_are_0_prove_nothing() -> None:
    torch.manual_seed(0)
    model, x = Detached(), torch.randn(16, 8)
    found = hookstats.find_identities(model, lambda: model(x))
    assert found.check(lambda: model(x).sum().backward())
    model.is_cut = True
    (broken,) = found.check(lambda: model(x).sum().backward()).breaks
    assert [name for name, factor in broken.suspects if factor == 0] == ["first.weight", "first.bias"]
    assert "that of first.weight is 0" in str(broken)
    checked = found.check(lambda: (model(x) * 0).sum().backward())
    assert (checked.judged, bool(checked)) == (0, False)


def test_rows_without_a_gradient_are_no_channels() -> None:
    """The number of rows equals that of channels, half are padding: rounding is measured along the channels."""
    torch.manual_seed(0)
    model, x, mask = (
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)),
        torch.randn(4096, 4),
        torch.ones(4096, 1),
    )
    mask[:2048] = 0
    found = hookstats.find_identities(model, lambda: model(x))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = (mask * (model(x) - x.sin().sum(1, keepdim=True)).square()).mean()
        value.backward()
        return value

    optimizer.step(loss)  # until gradients have cancelled
    assert found.check(loss), found.check(loss)


def test_wrapped_and_sparse_models_are_checked() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)), torch.randint(0, 20, (3, 5))
    found = hookstats.find_identities(model, lambda: model(x))
    assert found.check(lambda: model(x).square().sum().backward(), torch.compile(model, backend="eager"))


def test_changes_of_all_gradients_one_by_one_are_said_as_such() -> None:
    model, found = found_once()

    def run() -> None:
        train(model)
        for each in model.parameters():
            nn.utils.clip_grad_norm_([each], 1e-3)

    checked = found.check(run)
    assert len(checked.breaks) > 5
    assert "look first for what changes gradients after backward, parameter by parameter" in str(checked)


def test_what_has_no_or_no_finite_gradient_is_not_judged() -> None:
    model, found = copy.deepcopy(found_once())
    dict(model.named_parameters())["layers.0.mlp.up_proj.weight"].requires_grad_(False)

    def run() -> None:
        train(model)
        gradient = model.head.weight.grad
        assert gradient is not None
        gradient[0, 0] = torch.nan

    checked = found.check(run, model)
    assert checked.judged == 8
    assert sorted(checked.left_out.values()) == ["layers.0.mlp.up_proj.weight is frozen"] * 2 + [
        "the gradient of head.weight is not finite"
    ]
    assert "3 were not judged" in str(checked)


class Experts(nn.Module):
    """Each token goes to one of three experts, by its first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, y = (x[:, 0].clamp(0, 2.9)).long(), self.norm(x)
        out = torch.zeros_like(y)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(y[rows]))
        return out


def test_an_expert_that_had_no_token_makes_no_false_alarm() -> None:
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(30, 8)
    some, every = x.clone(), x.clone()
    some[:, 0], every[:, 0] = torch.arange(30) % 2, torch.arange(30) % 3
    found = hookstats.find_identities(model, lambda: model(some))
    assert len(found) == 1
    assert found.check(lambda: model(some).square().sum().backward())
    checked = found.check(lambda: model(every).square().sum().backward())
    assert (checked.judged, checked.breaks) == (0, [])
    assert list(checked.left_out.values()) == [
        "experts.2.weight did not run when identities were found; find them with a batch that reaches it"
    ]
    assert hookstats.find_identities(model, lambda: model(every)).check(lambda: model(every).square().sum().backward())


def test_gradients_of_before_are_put_back_and_hooks_are_gone() -> None:
    model, found = copy.deepcopy(found_once())
    train(model)
    before = {name: gradient.clone() for name, gradient in of_gradients(model)}
    assert found.check(lambda: train(model), model)
    assert same_gradients(model, before)

    def fail() -> None:
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        found.check(fail, model)
    assert same_gradients(model, before)
    assert not any(each._forward_hooks for each in model.modules())


def test_another_model_and_a_run_without_a_backward_are_refused() -> None:
    _, found = found_once()
    with pytest.raises(ValueError, match="expected a model with the parameter"):
        found.check(lambda: None, nn.Linear(2, 2))
    checked = found.check(lambda: None)
    assert not checked
    assert checked.judged == 0
    assert set(checked.left_out.values()) == {"its gradients are 0"}


def shards(rank: int, world: int) -> list[Any]:
    """FSDP2 over two ranks: right, and with gradients of one layer's shards on one rank counted twice."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = Llama()
    found = hookstats.find_identities(model, lambda: model(ids()))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)

    def wrong() -> None:
        train(model)
        gradient = dict(model.named_parameters())["layers.1.mlp.up_proj.weight"].grad
        assert isinstance(gradient, DTensor)
        if rank == 1:
            gradient.to_local().mul_(2)

    right, broken = found.check(lambda: train(model)), found.check(wrong)
    return [
        right.judged,
        len(right.breaks),
        sorted(broken.breaks[0].groups.tolist()),
        broken.breaks[0].identity.parameters,
    ]


def test_shards_of_fsdp2_are_judged_as_a_whole() -> None:
    for judged, breaks, groups, parameters in ranks.run(shards, 2):
        assert (judged, breaks) == (11, 0)
        assert groups == list(range(32, 64))  # the rows of rank 1
        assert parameters[0] == "layers.1.mlp.up_proj.weight"
