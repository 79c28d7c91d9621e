"""Laws hold in every healthy training, however it is made; what breaks one is named, with its factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from hookstats import Snapshot
from hookstats.rules import Finding, bias_gradient, judge
from hookstats.rules.laws import find_sides_of_biases
from hookstats.rules.ratios import residuals
from hookstats.rules.step import SiteIds, Step
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
    before: Callable[[int], None] = lambda step: None,
) -> list[Finding]:
    return judge(snapshots_of(model, loss_of, steps, before), [bias_gradient])


def snapshots_of(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor] | None = None,
    steps: int = 40,
    before: Callable[[int], None] = lambda step: None,
) -> list[Snapshot]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return train(model, loss_of or OnDigits(model), optimizer, steps, before, tensors=KINDS)


def times(model: nn.Module, name: str, factor: float, since: int = 0) -> Callable[[int], None]:
    """Multiply the gradients of a module's parameters from a step on."""
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
    assert (found.site, found.severity, found.since, found.step) == (("5.bias", "param_grad"), "critical", 20, 21)
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
    assert "divided by the sum of its output's gradient, is 8 times what it is in 4 other layers" in found.sentence


def test_what_is_so_from_the_start_is_found_too_and_may_be_declared() -> None:
    ill = images()
    (found,) = judged(ill, before=times(ill, "3", 3.0))
    assert (found.site, found.severity, found.step) == (("3.bias", "param_grad"), "critical", 1)
    assert "It has been so from the start" in found.sentence
    assert 'declare it by Options(laws={"bias": False})' in found.sentence


class Residual(nn.Module):
    """A model whose last layer adds to a stream that a norm reads: it has no sum over the channels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.norm = nn.LayerNorm(32, elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        logits: torch.Tensor = self.head(self.norm(x + self.down(self.up(x).relu())))
        return logits


def in_channels(model: nn.Module, name: str, change: Callable[[torch.Tensor], None], since: int = 20) -> Any:
    """Change the gradient of a parameter from a step on."""
    now = [False]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        if now[0]:
            change(changed)
        return changed

    model.get_parameter(name).register_hook(hook)

    def before(step: int) -> None:
        now[0] = step >= since

    return before


def test_layers_whose_totals_cancel_are_judged_by_their_channels() -> None:
    ill = Residual()
    (found,) = judged(ill, before=times(ill, "down", 8.0, since=20))
    assert (found.site, found.severity, found.step) == (("down.bias", "param_grad"), "critical", 21)
    assert found.value == pytest.approx(8.0, rel=1e-3)
    assert judged(Residual()) == []


def test_channels_that_are_off_are_named_with_their_factor() -> None:
    ill = model()
    (found,) = judged(ill, before=in_channels(ill, "5.bias", lambda gradient: gradient[16:32].mul_(2)))
    assert (found.site, found.severity, found.step) == (("5.bias", "param_grad"), "critical", 21)
    assert "the gradient of 5.bias in channels 16 to 31 of 48 is 2 times" in found.sentence


def test_a_small_factor_is_a_warning_where_all_channels_agree_on_it() -> None:
    ill = model()
    (found,) = judged(ill, before=times(ill, "5", 1.2, since=20))
    assert (found.severity, found.step, found.value) == ("warning", 24, pytest.approx(1.2, rel=1e-3))


def test_channels_without_a_common_factor_are_a_warning() -> None:
    ill = model()

    def change(gradient: torch.Tensor) -> None:
        gradient[:12] += gradient.flip(0)[:12]

    (found,) = judged(ill, before=in_channels(ill, "5.bias", change))
    assert (found.site, found.severity, found.step) == (("5.bias", "param_grad"), "warning", 24)
    assert "is neither the sum of its output's gradient nor a multiple of it, since step 20" in found.sentence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_accumulated_gradients_a_layer_is_held_against_others_of_as_many_forwards(dtype: torch.dtype) -> None:
    found: list[list[Finding]] = []
    for factor in (1.0, 4.0):
        ill = model().to(dtype)
        data = OnDigits(ill)
        data.images = data.images.to(dtype)

        def loss_of(step: int, data: OnDigits = data) -> torch.Tensor:
            for _ in range(2):
                (data(step) / 3).backward()
            return data(step) / 3

        found.append(judged(ill, loss_of, before=times(ill, "5", factor, since=20)))
    healthy, (broken,) = found
    assert healthy == []
    assert (broken.site, broken.severity, broken.step) == (("5.bias", "param_grad"), "critical", 21)


def test_a_shared_layer_that_others_are_like_is_judged() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
            self.one, self.other = nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(3):
                x = self.other(x + self.one(x).relu())
            logits: torch.Tensor = self.head(x)
            return logits

    assert judged(Shared()) == []
    ill = Shared()
    (found,) = judged(ill, before=times(ill, "one", 3.0, since=20))
    assert (found.site, found.severity, found.step) == (("one.bias", "param_grad"), "critical", 21)


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


@pytest.mark.parametrize("microbatches", [1, 3])
def test_what_was_summed_in_bfloat16_is_known_by_its_bits(microbatches: int) -> None:
    """A LayerNorm under autocast, on a CPU: each row is rounded at the size of the sum, a float32 is what comes."""
    torch.manual_seed(0)
    healthy = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 10))
    largest = list[float]()

    def loss_of(step: int) -> torch.Tensor:
        losses = []
        for microbatch in range(microbatches):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(9 * step + microbatch))
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(cross_entropy(healthy(x).float(), x.argmax(1) % 10) / microbatches)
        return sum(losses)  # type: ignore[return-value]

    taken = train(healthy, loss_of, [], 8, tensors=KINDS)
    sites = SiteIds()
    for snapshot in taken:
        sides, _ = find_sides_of_biases(Step(snapshot, sites), "param_grad")
        assert sides is not None
        largest.append(float(residuals(sides, 1.0)[2].max()))
    assert max(largest) < 1


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
    snapshots = train(healthy, loss_of, optimizer, 150, tensors=KINDS)
    assert judge(snapshots, [bias_gradient]) == []


def test_channels_of_one_gradient_that_are_clipped_by_value_are_no_factor() -> None:
    healthy, x, _ = regression(2)
    last = healthy[4]
    with torch.no_grad():
        last.weight.copy_(last.weight[:1].expand(3, -1))
        last.bias.fill_(2.0)
    parameters = list(healthy.parameters())

    def loss_of(step: int) -> torch.Tensor:
        return mse_loss(healthy(x), torch.zeros(256, 3))

    def clip_and_step() -> None:  # measured between the two
        nn.utils.clip_grad_value_([last.bias], 0.5)
        step()

    optimizer = torch.optim.SGD(parameters, 1e-5)
    step, optimizer.step = optimizer.step, clip_and_step  # type: ignore[assignment]
    snapshots = train(healthy, loss_of, optimizer, 20, tensors=KINDS)
    assert last.bias.grad is not None
    assert bool((last.bias.grad.abs() == 0.5).all())
    assert judge(snapshots, [bias_gradient]) == []


def test_a_backward_that_reaches_no_parameter_is_not_judged() -> None:
    """Adversarial examples and gradient penalties do so: the output's gradient came twice, the bias's once."""
    body, x, y = regression(0)
    healthy = nn.ModuleDict({"body": body, "other": nn.Linear(20, 3)})

    def loss_of(step: int) -> torch.Tensor:
        changed = x[:64].clone().requires_grad_()
        torch.autograd.grad(mse_loss(body(changed), y[:64]), changed)
        return mse_loss(body(x), y) + mse_loss(healthy["other"](x), y)

    assert judged(healthy, loss_of, 60) == []
