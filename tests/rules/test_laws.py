"""Laws hold in every healthy training, however it is made; what breaks one is named, with its factor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hookstats.rules import BiasGradient, Finding, judge
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
    return judge(train(model, loss_of or OnDigits(model), optimizer, steps, before, KINDS), [BiasGradient()])


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


@pytest.mark.parametrize(
    "how",
    [
        "accumulated",
        "clipped",
        "of two ranks",
        "each clipped",
        "values clipped",
        "adversarial",
        "grown",
        "of one value",
    ],
)
def test_other_ways_to_train_keep_it_or_are_not_judged(how: str) -> None:
    healthy = model()
    data = OnDigits(healthy)
    parameters = list(healthy.parameters())
    if how == "clipped":
        for each in parameters:
            each.register_hook(lambda gradient: 0.03 * gradient)
    if how == "of two ranks":  # the mean with the gradient of other data, which this process does not see
        for each in parameters:
            each.register_hook(lambda g: (g + g.std() * torch.randn_like(g)) / 2)
    if how == "each clipped":
        for each in parameters:
            each.register_hook(lambda gradient: gradient * (0.01 / gradient.norm().clamp(min=0.01)))
    if how == "values clipped":
        for each in parameters:
            each.register_hook(lambda gradient: gradient.clamp(-2e-3, 2e-3))
    scale = [1.0]
    if how == "grown":  # as a scale that a module learns
        healthy[5].bias.register_hook(lambda gradient: gradient * scale[0])
    if how == "of one value":
        parameters[0].data.zero_()

    def loss_of(step: int) -> torch.Tensor:
        scale[0] *= 1.03
        if how == "accumulated":
            for _ in range(3):
                chosen = torch.randint(len(data.labels), (32,))
                (cross_entropy(healthy(data.images[chosen]), data.labels[chosen]) / 4).backward()
        if how == "adversarial":
            images = data.images[:64].clone().requires_grad_()
            torch.autograd.grad(cross_entropy(healthy(images), data.labels[:64]), images)
        return data(step)

    assert judged(healthy, loss_of) == []


@pytest.mark.parametrize("how", ["one group", "each", "values"])
def test_clipping_in_parts_is_no_warning_even_where_all_data_are_in_each_step(how: str) -> None:
    healthy = model()
    data = OnDigits(healthy)

    def all_data(step: int) -> torch.Tensor:
        healthy[7].eval()
        return cross_entropy(healthy(data.images), data.labels)

    def clip(*_: object) -> None:
        groups = {"one group": [[*healthy.parameters()][:6]], "each": [[each] for each in healthy.parameters()]}
        for group in groups.get(how, []):
            nn.utils.clip_grad_norm_(group, 0.02)
        if how == "values":
            nn.utils.clip_grad_value_(healthy.parameters(), 0.002)

    optimizer = torch.optim.SGD(healthy.parameters(), 0.05, momentum=0.9)
    optimizer.register_step_pre_hook(clip)
    found = judge(train(healthy, all_data, optimizer, 120, None, KINDS), [BiasGradient()])
    assert [each for each in found if each.severity != "note"] == []
