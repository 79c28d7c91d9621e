"""Laws hold in every healthy training, however it is made; what breaks one is named, with its factor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from hookstats.rules import Finding, bias_gradient, judge
from tests.rules.trainings import OnDigits, train

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("output", "grad_output", "param_grad")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.LayerNorm(48), nn.GELU()),
        *(nn.Linear(48, 48), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(48, 10)),
    )


def images() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)),
        *(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)),
    )


def judged(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor] | None = None,
    steps: int = 40,
    before: Callable[[int], None] | None = None,
) -> list[Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return judge(train(model, loss_of or OnDigits(model), optimizer, steps, before, KINDS), [bias_gradient])


def times(model: nn.Module, name: str, factor: float, since: int = 0) -> Callable[[int], None]:
    """What multiplies the gradients of a module's parameters from a step on."""
    now = [1.0]
    for parameter in model.get_submodule(name).parameters():
        parameter.register_hook(lambda gradient: gradient * now[0])

    def before(step: int) -> None:
        now[0] = factor if step >= since else 1.0

    return before


@pytest.mark.parametrize("factor", [8.0, 0.125, -1.0])
def test_a_layer_whose_gradients_are_multiplied_is_named_with_its_factor(factor: float) -> None:
    ill = model()
    (found,) = judged(ill, before=times(ill, "5", factor, since=20))
    assert (found.site, found.severity, found.since, found.step) == (("5.bias", "param_grad"), "warning", 20, 24)
    assert found.value == pytest.approx(factor, rel=1e-3)
    size = {8.0: "8", 0.125: "1/8", -1.0: "-1"}[factor]
    assert f"the gradient of 5.bias is {size} times the sum of its output's gradient" in found.sentence
    assert "a hook on these parameters" in found.sentence


def test_where_all_gradients_are_clipped_a_layer_is_held_against_the_others() -> None:
    ill = model()
    for each in ill.parameters():
        each.register_hook(lambda gradient: 0.03 * gradient)
    (found,) = judged(ill, before=times(ill, "5", 8.0, since=20))
    assert (found.site, found.since, found.value) == (("5.bias", "param_grad"), 20, pytest.approx(8.0, rel=1e-3))
    assert "over the sum of its output's gradient, is 8 times what it is in 2 other layers" in found.sentence


def test_what_is_so_from_the_start_may_be_meant() -> None:
    ill = images()
    (found,) = judged(ill, before=times(ill, "3", 3.0))
    assert (found.site, found.severity) == (("3.bias", "param_grad"), "note")
    assert "It has been so from the start" in found.sentence


def test_healthy_trainings_keep_the_law() -> None:
    for healthy in (model(), images()):
        assert judged(healthy) == []
        data = OnDigits(healthy)

        def in_bfloat16(step: int, data: OnDigits = data) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return data(step)

        assert judged(healthy, in_bfloat16) == []


@pytest.mark.parametrize("how", ["accumulated", "clipped", "of two ranks", "grown"])
def test_other_ways_to_train_keep_it_or_are_not_judged(how: str) -> None:
    healthy = model()
    data = OnDigits(healthy)
    scale = [1.0]
    for each in healthy.parameters():
        if how == "clipped":
            each.register_hook(lambda gradient: 0.03 * gradient)
        if how == "of two ranks":  # the mean with the gradient of other data, which this process does not see
            each.register_hook(lambda gradient: (gradient + gradient.std() * torch.randn_like(gradient)) / 2)
    if how == "grown":  # as a scale that a module learns
        healthy[5].bias.register_hook(lambda gradient: gradient * scale[0])

    def loss_of(step: int) -> torch.Tensor:
        scale[0] *= 1.02
        if how == "accumulated":
            for _ in range(3):
                chosen = torch.randint(len(data.labels), (32,))
                (cross_entropy(healthy(data.images[chosen]), data.labels[chosen]) / 4).backward()
        return data(step)

    assert judged(healthy, loss_of) == []


def regression(seed: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A model, and all the data, which are in each step."""
    torch.manual_seed(seed)
    x = torch.randn(256, 20)
    y = 0.1 * torch.randn(256, 3) + x[:, :3] + 1
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)), x, y


@pytest.mark.parametrize("how", ["one group", "each", "values"])
def test_clipping_in_parts_is_told_nothing_where_gradients_hardly_vary(how: str) -> None:
    healthy, x, y = regression(1)
    parameters = list(healthy.parameters())

    def loss_of(step: int) -> torch.Tensor:
        return mse_loss(healthy(x), y)

    def clip_and_step() -> None:  # measured between the two
        if how == "values":
            nn.utils.clip_grad_value_(parameters, 0.02)
        for group in {"one group": [parameters[:4]], "each": [[each] for each in parameters]}.get(how, []):
            nn.utils.clip_grad_norm_(group, 0.1 if how == "one group" else 0.2)
        step()

    optimizer = torch.optim.SGD(parameters, 0.05)
    step, optimizer.step = optimizer.step, clip_and_step  # type: ignore[assignment]
    snapshots = train(healthy, loss_of, optimizer, 150, None, KINDS)
    assert judge(snapshots, [bias_gradient]) == []


def test_a_backward_that_reaches_no_parameter_is_not_judged() -> None:
    """Of adversarial examples, of a gradient penalty: the gradient of the output came twice, the bias's once."""
    body, x, y = regression(0)
    healthy = nn.ModuleDict({"body": body, "other": nn.Linear(20, 3)})

    def loss_of(step: int) -> torch.Tensor:
        changed = x[:64].clone().requires_grad_()
        torch.autograd.grad(mse_loss(body(changed), y[:64]), changed)
        return mse_loss(body(x), y) + mse_loss(healthy["other"](x), y)

    assert judged(healthy, loss_of, 60) == []
