"""Tests of the most common mistakes: nothing learns, or the data are wrong. Each training has a healthy twin."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hookstats import Snapshot
from hookstats.rules import Finding, judge, story
from hookstats.watch.arguments import DEFAULT_TENSORS
from tests.rules.fleet.models import GPT
from tests.rules.trainings import OnDigits, mlp, train

pytestmark = pytest.mark.usefixtures("one_thread")


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 60,
    loss_of: Callable[[int], torch.Tensor] | None = None,
    before: Callable[[int], None] | None = None,
) -> list[Snapshot]:
    torch.manual_seed(0)
    return train(model, loss_of or OnDigits(model), optimizer, steps, before, DEFAULT_TENSORS)


def told(snapshots: list[Snapshot]) -> list[Finding]:
    """Return the findings that follow from no other and are more than a note."""
    return [each for each in judge(snapshots) if each.because is None and each.severity != "note"]


def only(snapshots: list[Snapshot], rule: str) -> Finding:
    """The one finding that is told, of this rule."""
    found = told(snapshots)
    assert [each.rule for each in found] == [rule], [str(each) for each in found]
    return found[0]


def named(snapshots: list[Snapshot], rule: str) -> list[Finding]:
    return [each for each in judge(snapshots) if each.rule == rule]


def sgd(parameters: object, lr: float = 0.05, **how: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr, momentum=0.9, **how)  # type: ignore[arg-type]


def test_a_healthy_training_is_told_nothing() -> None:
    model = mlp()
    assert told(run(model, sgd(model.parameters()), 120)) == []


def test_a_layer_that_no_optimizer_has_is_named() -> None:
    model = mlp()
    optimizer = sgd([p for name, p in model.named_parameters() if not name.startswith("2.")])
    found = only(run(model, optimizer), "unchanged-parameters")
    assert [site.name for site in found.sites] == ["2.weight", "2.bias"]
    assert (found.step, found.since, found.severity) == (20, 1, "warning")
    assert found.sentence.startswith("2.weight, 2.bias never changed, although gradients arrive and other parameters")


@pytest.mark.parametrize("kind", ["another model", "learning rate"])
def test_a_model_of_which_nothing_changes_is_critical(kind: str) -> None:
    model, other = mlp(), mlp()
    optimizer = sgd(other.parameters()) if kind == "another model" else sgd(model.parameters(), 0.0)
    found = only(run(model, optimizer, 110), "unchanged-parameters")
    assert found.severity == "critical"
    assert found.sentence.startswith("no parameter of the model has ever changed, although gradients arrive.")
    # what nobody zeroes grows, as it does while gradients are accumulated
    assert found.step == (100 if kind == "another model" else 29)


def test_a_learning_rate_that_becomes_zero_in_the_middle_is_found_since_then() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def stop(step: int) -> None:
        if step == 30:
            optimizer.param_groups[0]["lr"] = 0.0

    found = only(run(model, optimizer, 100, before=stop), "unchanged-parameters")
    assert (found.since, found.severity) == (30, "critical")
    assert "no parameter has changed since step 30" in found.sentence


def test_a_group_that_is_frozen_in_the_middle_is_named_since_then() -> None:
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters()}]
    optimizer = torch.optim.SGD(groups, 0.05)

    def stop(step: int) -> None:
        if step == 30:
            optimizer.param_groups[0]["lr"] = 0.0

    found = [each for each in told(run(model, optimizer, 80, before=stop)) if each.site.name == "0.weight"]
    assert [(each.rule, each.since) for each in found] == [("unchanged-parameters", 30)]


def test_what_is_frozen_on_purpose_is_no_problem() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    assert told(run(model, sgd([p for p in model.parameters() if p.requires_grad]))) == []


def test_updates_of_bfloat16_that_are_lost_to_rounding_are_found_with_their_dtype() -> None:
    model = mlp().bfloat16()
    images = OnDigits(model)
    images.images = images.images.bfloat16()
    found = only(run(model, torch.optim.Adam(model.parameters(), 1e-6), 120, images), "lost-updates")
    assert "in bfloat16 a change below 1/512 of a value is lost to rounding" in found.sentence
    assert "0.weight" in [site.name for site in found.sites]


def test_bfloat16_with_updates_that_are_large_enough_is_healthy() -> None:
    model = mlp().bfloat16()
    images = OnDigits(model)
    images.images = images.images.bfloat16()
    snapshots = run(model, torch.optim.Adam(model.parameters(), 1e-3), 120, images)
    assert named(snapshots, "lost-updates") == []
    assert told(snapshots) == []


class Cut(nn.Module):
    """The path from the loss ends between two layers."""

    def __init__(self, cut: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x).relu()).relu()
        y: torch.Tensor = self.three(x.detach() if self.cut else x)
        return y


def test_a_detach_in_forward_is_found_where_it_is() -> None:
    model = Cut()
    found = only(run(model, sgd(model.parameters())), "missing-gradients")
    assert {site.name for site in found.sites} == {"one.weight", "one.bias", "two.weight", "two.bias"}
    assert "The way back from the loss ends between two and three" in found.sentence
    healthy = Cut(False)
    assert told(run(healthy, sgd(healthy.parameters()))) == []


def test_weights_that_are_all_zero_are_found() -> None:
    model = mlp()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    (chapter,) = story(judge(run(model, sgd(model.parameters()))))
    assert (chapter.finding.rule, chapter.finding.site) == ("dead-channels", ("0", "output"))
    assert "are dead: all of its weights are 0" in chapter.finding.sentence
    (missing,) = [each for each in chapter.effects if each.rule == "missing-gradients"]
    assert "only a gradient that is 0" in missing.sentence


@pytest.mark.parametrize("rows", [slice(None), slice(3, 4)])
def test_a_batch_or_an_image_that_is_too_large_is_named_as_the_batch(rows: slice) -> None:
    model = mlp()
    loss = OnDigits(model)

    def loss_of(step: int) -> torch.Tensor:
        chosen = torch.randint(len(loss.labels), (64,))
        images = loss.images[chosen].clone()
        if step == 37:
            images[rows] *= 1000
        return cross_entropy(model(images), loss.labels[chosen])

    found = only(run(model, sgd(model.parameters(), 1e-3), 60, loss_of), "input-shift")
    assert (found.step, found.site) == (37, ("", "input"))
    assert found.sentence.startswith("the batch of step 37 is not like those before it")


def test_an_input_that_becomes_constant_is_found() -> None:
    model = mlp()
    loss = OnDigits(model)

    def loss_of(step: int) -> torch.Tensor:
        chosen = torch.randint(len(loss.labels), (64,))
        return cross_entropy(model(loss.images[chosen] * (step < 30)), loss.labels[chosen])

    found = only(run(model, sgd(model.parameters()), 60, loss_of), "constant-input")
    assert (found.since, found.step, found.site) == (30, 34, ("", "input"))


def test_images_that_are_all_the_same_are_found_and_a_mask_of_ones_is_not() -> None:
    model = mlp()
    loss = OnDigits(model)

    def loss_of(step: int) -> torch.Tensor:
        return cross_entropy(model(torch.zeros(64, 64)), loss.labels[torch.randint(len(loss.labels), (64,))])

    found = only(run(model, sgd(model.parameters()), 40, loss_of), "constant-input")
    assert (found.step, found.site) == (4, ("0", "output"))

    class Masked(nn.Sequential):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = super().forward(x * mask)
            return y

    masked = Masked(*mlp())

    def masked_loss(step: int) -> torch.Tensor:
        chosen = torch.randint(len(loss.labels), (64,))
        return cross_entropy(masked(loss.images[chosen], torch.ones(64, 64)), loss.labels[chosen])

    assert told(run(masked, sgd(masked.parameters()), 40, masked_loss)) == []


def test_images_from_0_to_255_are_a_note() -> None:
    model = nn.Sequential(nn.BatchNorm1d(64), *mlp())
    loss = OnDigits(model)
    loss.images = 255 * loss.images
    (found,) = named(run(model, sgd(model.parameters()), 30, loss), "unscaled-input")
    assert (found.step, found.severity, found.site) == (4, "note", ("", "input"))


def test_gradients_that_nobody_zeroes_are_found() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    assert only(run(model, optimizer, 80), "growing-gradients").step < 60


def test_weight_decay_that_is_too_strong_is_found() -> None:
    model = mlp()
    found = only(run(model, torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5), 100), "shrinking-weights")
    assert "weight decay is stronger than the gradient" in found.sentence


@pytest.mark.parametrize("classes", [2, 10])
def test_a_softmax_before_the_cross_entropy_is_found(classes: int) -> None:
    model = nn.Sequential(*mlp()[:-1], nn.Linear(64, classes), nn.Softmax(-1))
    loss = OnDigits(model)
    loss.labels = loss.labels % classes
    found = only(run(model, torch.optim.Adam(model.parameters(), 1e-4), 40, loss), "probabilities-as-logits")
    assert (found.step, found.site) == (9, (str(len(model) - 1), "output"))


def test_a_sigmoid_before_the_cross_entropy_is_found() -> None:
    model = nn.Sequential(*mlp(), nn.Sigmoid())
    found = only(run(model, torch.optim.Adam(model.parameters(), 1e-4), 40), "probabilities-as-logits")
    assert (found.step, found.site) == (9, (str(len(model) - 1), "output"))


def test_one_sample_in_every_row_is_found() -> None:
    model = mlp()
    data = OnDigits(model)

    def loss_of(step: int) -> torch.Tensor:
        chosen = torch.randint(len(data.labels), (64,))
        return cross_entropy(model(data.images[chosen[:1]].expand(64, -1)), data.labels[chosen])

    found = only(run(model, sgd(model.parameters(), 1e-3), 20, loss_of), "constant-input")
    assert (found.step, found.site) == (4, ("0", "output"))


def test_a_layer_whose_gradients_alone_are_not_zeroed_is_named() -> None:
    model = mlp()
    data, kept = OnDigits(model), list[torch.Tensor]()

    def loss_of(step: int) -> torch.Tensor:
        if kept:  # what the optimizer has zeroed comes back
            model[2].weight.grad, model[2].bias.grad = kept
        chosen = torch.randint(len(data.labels), (64,))
        return cross_entropy(model(data.images[chosen]), data.labels[chosen])

    def keep(step: int) -> None:
        if step:
            kept[:] = [model[2].weight.grad.clone(), model[2].bias.grad.clone()]

    found = only(run(model, torch.optim.Adam(model.parameters(), 1e-4), 40, loss_of, keep), "growing-gradients")
    assert [site.name for site in found.sites] == ["2.bias"]
    assert "the gradients of 2.bias are added to those of the steps before" in found.sentence


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_model_that_is_sure_from_the_start_is_a_note(scale: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[-1].weight *= scale
    found = named(run(model, sgd(model.parameters(), 1e-3), 3), "initial-loss")
    assert [(each.step, each.site, each.severity) for each in found] == (
        [(0, (str(len(model) - 1), "output"), "note")] if scale > 1 else []
    )


def test_a_likelihood_of_probabilities_is_healthy() -> None:
    model = nn.Sequential(*mlp(), nn.Softmax(-1))
    data = OnDigits(model)

    def loss_of(step: int) -> torch.Tensor:
        chosen = torch.randint(len(data.labels), (64,))
        return nn.functional.nll_loss(model(data.images[chosen]).log(), data.labels[chosen])

    assert told(run(model, sgd(model.parameters(), 1e-3), 60, loss_of)) == []


def test_labels_that_do_not_belong_to_their_images_are_no_progress() -> None:
    model = mlp()
    data = OnDigits(model)

    def loss_of(step: int) -> torch.Tensor:
        chosen = torch.randint(len(data.labels), (64,))
        return cross_entropy(model(data.images[chosen]), data.labels[torch.randint(len(data.labels), (64,))])

    (found,) = named(run(model, sgd(model.parameters(), 1e-3), 130, loss_of), "no-progress")
    assert (found.severity, found.site) == ("note", None)


def test_the_embedding_of_tokens_that_do_not_come_is_no_problem() -> None:
    model = GPT()
    ids = torch.randint(8, (512,))

    def loss_of(step: int) -> torch.Tensor:
        return model.loss(ids[: 8 * 33].view(8, 33))

    assert told(run(model, torch.optim.SGD(model.parameters(), 0.01), 60, loss_of)) == []
