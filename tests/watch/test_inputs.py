"""Inputs of modules, the module's own share of an input's gradient, and tensors that are tapped."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Site
from tests.conftest import check
from tests.models import images, small_cnn
from tests.plain import hearing

INPUTS = ("input", "grad_input")


def gradients(fn: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of the sum of squares of fn's output, by plain autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(fn(*leaves).square().sum(), leaves)


def test_several_inputs_have_numbers_and_names() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Any, *rest: Any, mask: Any = None, options: Any = None, flag: bool = True) -> Any:
            return x + rest[0] if rest else x + (0 if mask is None else mask)

    model = Mixed()
    mon = hookstats.attach(model, "", tensors=INPUTS, every=1)
    a, b, c = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    model(a, b).sum().backward()
    order = ["input.0", "input.1", "grad_input.1", "grad_input.0"]
    assert mon.step().order == [Site("", kind) for kind in order]
    model(a, mask=b, options={"bias": (c, 1)}, flag=False).sum().backward()
    taken = mon.step()
    assert {site.tensor for site in taken.order} == {
        "input.0",
        "input.mask",
        "input.options.bias.0",
        "grad_input.0",
        "grad_input.mask",
    }
    check(taken["", "input.mask"], b, -1)
    model(a, flag=False).sum().backward()
    assert {site.tensor for site in mon.step().order} == {"input", "grad_input"}


def test_convolutions_norms_and_embeddings() -> None:
    model = small_cnn()
    mon = hookstats.attach(model, tensors="input")
    x = images()
    model(x)
    taken = mon.snapshot()
    check(taken["0", "input"], x, 1)
    assert len(taken["1", "input"].channels.count) == 8
    assert len(taken["7", "input"].channels.count) == 12 * 16
    embedding = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    mon = hookstats.attach(embedding, tensors="input", options=hookstats.Options(strict=True))
    assert mon.sites == [("1", "input")]
    embedding(torch.tensor([1, 2]))
    assert mon.snapshot()["1", "input"].calls == 1


def test_an_input_is_measured_before_a_module_overwrites_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    mon = hookstats.attach(model, tensors=("input", "output", "grad_input"))
    x = torch.randn(6, 4)
    before = model[0](x).detach().clone()
    model(x).sum().backward()
    check(mon.snapshot()["1", "input"], before, -1)
    check(mon.snapshot()["1", "output"], before.relu(), -1)
    assert mon.snapshot()["1", "grad_input"].calls == 0  # autograd knows an overwritten alias only as its base
    gradient = model[0].weight.grad
    mon.detach()
    (expected,) = torch.autograd.grad(model(x).sum(), model[0].weight)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=0)


def test_paused_and_in_other_steps_the_module_gets_its_own_tensor() -> None:
    seen = []
    model = nn.Linear(4, 4)
    mon = hookstats.attach(model, tensors=INPUTS, every=1)
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.randn(3, 4, requires_grad=True)
    with mon.paused():
        model(x)
    assert seen.pop() is x
    model(x)
    assert seen.pop() is not x


class Attention(nn.Module):
    def __init__(self, monitors: list[Any]) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.monitors = monitors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.project(x) @ x.mT
        for mon in self.monitors:
            scores = mon.tap(scores, "scores")
        return scores.softmax(-1) @ x


def test_a_tapped_tensor_and_its_gradient_are_measured() -> None:
    torch.manual_seed(0)
    monitors: list[Any] = []
    model, x = Attention(monitors), torch.randn(2, 5, 8)
    scores = (model.project(x) @ x.mT).detach()
    (gradient,) = gradients(lambda s: s.softmax(-1) @ x, scores)
    monitors.append(hookstats.attach(model, every=1))
    model(x).square().sum().backward()
    taken = monitors[0].step()
    check(taken["scores", "output"], scores, -1)
    check(taken["scores", "grad_output"], gradient, -1)
    assert taken["scores", "output"].channels is not None
    for _ in range(2):
        model(x)
    assert monitors[0].step()["scores", "output"].calls == 2
    monitors[0].detach()
    model(x)
    assert monitors[0].snapshot().step == 1  # nothing in the step after it


def test_a_tap_gives_back_the_tensor_itself_and_says_what_it_expects() -> None:
    model = nn.Linear(4, 4)
    mon = hookstats.attach(model)
    x = torch.randn(3, 4)
    assert mon.tap(x, "x") is x
    with pytest.raises(TypeError, match="expected a tensor and a name, got list and 'x'"):
        mon.tap([x], "x")
    with pytest.raises(ValueError, match="no watched module has, got ''"):
        mon.tap(x, "")
    check(mon.snapshot()["x", "output"], x, -1)
    mon.tap(x, "rows", channel_dim=0)
    check(mon.snapshot()["rows", "output"], x, 0)


def test_a_tap_in_a_compiled_model_that_has_run_eagerly_once() -> None:
    torch.manual_seed(0)
    monitors: list[Any] = []
    model, x = Attention(monitors), torch.randn(2, 5, 8)
    monitors.append(hookstats.attach(model, every=1))
    model(x).square().sum().backward()
    expected = monitors[0].step()
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).square().sum().backward()
    taken = monitors[0].step()
    for kind in ("output", "grad_output"):
        assert taken["scores", kind].calls == 1
        assert taken["scores", kind].total.rms == pytest.approx(expected["scores", kind].total.rms, rel=1e-5)


def test_what_never_fires_is_named_once() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    mon = hookstats.attach(model, ["used", "unused"], every=1)
    x = torch.randn(3, 4)
    for _ in range(2):
        model["used"](x)
        mon.step()
    model["used"](x)
    with pytest.warns(UserWarning, match="in 3 measured steps nothing came from used grad_output, unused"):
        mon.step()
    with hearing() as told:
        for _ in range(3):
            model["used"](x)
            mon.step()
    assert told == []


@pytest.mark.parametrize(
    ("model", "run", "why"),
    [
        (nn.MultiheadAttention(4, 2), lambda m: m(*[torch.randn(3, 4)] * 3), "nothing came from out_proj output"),
        (
            nn.Linear(4, 4),
            lambda m: m(torch.empty(0, 4)),
            r"nothing came from \(model\) output: .* an expert without tokens",
        ),
        (nn.Linear(4, 4), lambda m: torch.func.vmap(m)(torch.randn(3, 4)), r"or a tensor inside torch\.func$"),
        (
            nn.Linear(4, 4),
            lambda m: m.eval()(torch.randn(3, 4)),
            "the model is in evaluation mode, .*: call model.train",
        ),
    ],
    ids=["a module that is never called", "no tokens", "torch.func", "evaluation mode"],
)
def test_a_silent_site_is_named_with_what_may_be_the_reason(model: nn.Module, run: Any, why: str) -> None:
    mon = hookstats.attach(model, "*", tensors="output", every=1)
    for _ in range(2):
        run(model)
        mon.step()
    run(model)
    with pytest.warns(UserWarning, match=why):
        mon.step()
    assert "did not fire: " in mon.snapshot().table()


def test_what_needs_no_gradient_is_not_named() -> None:
    """A frozen layer and what comes behind it, the batch, a table of constants."""

    class Table(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.detach().cos(), x.detach().sin()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.frozen, self.act = Table(), nn.Linear(4, 4).requires_grad_(False), nn.ReLU()
            self.head, self.detached = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cos, sin = self.table(x)
            self.detached(x).detach()
            return self.head(self.act(self.frozen(x)) * cos + sin)

    model = Model()
    mon = hookstats.attach(model, tensors=("output", "grad_output", "grad_input"), every=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            model(torch.randn(3, 4)).sum().backward()
            mon.step()
    (said,) = [str(warning.message) for warning in told]
    assert "nothing came from detached grad_output:" in said
    assert ("head", "grad_output") in mon.snapshot().order


class Custom(nn.Module):
    """A module that runs a given function."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


def test_one_tensor_in_several_places_stays_one() -> None:
    seen: list[bool] = []

    def same(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(q is k is v)
        return q + k + v

    model = Custom(same)
    hookstats.attach(model, "", tensors=INPUTS)
    h = torch.randn(3, 4, requires_grad=True)
    model(h, h, v=h).sum().backward()
    assert seen == [True]
    torch.manual_seed(0)
    attention, results = nn.MultiheadAttention(8, 2, batch_first=True), []
    for watched in (False, True):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        if watched:
            hookstats.attach(attention, "", tensors=INPUTS)
        attention(*[x * 1] * 3)[0].square().sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


@pytest.mark.parametrize("container", [list, tuple, lambda values: {"a": values[0]}])
def test_of_tensors_in_containers_there_is_no_share_of_the_gradient(container: Any) -> None:
    model = Custom(lambda values: 2 * (values["a"] if isinstance(values, dict) else values[0]))
    mon = hookstats.attach(model, "", tensors=INPUTS)
    h = torch.randn(3, 4, requires_grad=True) * 1
    (model(container([h])) + 100 * h).sum().backward()
    assert [site.tensor.partition(".")[0] for site in mon.snapshot().order] == ["input"]


def test_parameters_are_handed_on_as_they_are() -> None:
    kinds: list[type] = []
    model = Custom(lambda w: kinds.append(type(w)) or w * 2)
    hookstats.attach(model, "", tensors=INPUTS)
    model(nn.Parameter(torch.randn(3))).sum().backward()
    assert kinds == [nn.Parameter]


def test_a_container_that_cannot_be_walked_does_not_stop_the_forward() -> None:
    class Broken(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise RuntimeError("not today")

    model = Custom(lambda x, broken: x + 1)
    mon = hookstats.attach(model, "", tensors=INPUTS)
    with pytest.warns(UserWarning, match="not today"):
        model(torch.randn(3), broken=Broken(a=1)).sum()
    assert mon.skipped


def test_a_tap_that_cannot_be_made_does_not_stop_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    mon = hookstats.attach(nn.Linear(4, 4), every=1)
    assert mon.tap(torch.empty(3, 4, device="meta"), "shape").is_meta
    x = torch.randn(3, 4)

    def no_memory(*args: Any) -> Any:
        raise MemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(mon._store, "place", no_memory)
        with pytest.warns(UserWarning, match="not measured: 'x': no memory left"):
            assert mon.tap(x, "x") is x
    assert mon.step() is not None
    mon.tap(x, "x")
    assert mon.step()["x", "output"].calls == 1
