"""The default rules, and trainings: ill ones, each found by its rule and said in words, and healthy ones: silence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookstats import Snapshot, rules
from hookstats.rules import Finding
from tests.rules.trainings import OnDigits, Stream, digits, llama, mlp, train


@pytest.fixture(autouse=True)
def one_seed(one_thread: None) -> None:
    torch.manual_seed(0)


def named(snapshots: list[Snapshot], rule: str) -> list[Finding]:
    """Return the findings of one rule, of all default ones."""
    found = [finding for finding in rules.judge(snapshots) if finding.rule == rule]
    for finding in found:
        assert finding.step in range(len(snapshots))
        assert finding.rank == 0
    return found


def alarms(snapshots: list[Snapshot]) -> list[Finding]:
    return [finding for finding in rules.judge(snapshots) if finding.severity != "note"]


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def test_a_diverging_learning_rate_is_found_while_the_loss_is_still_finite() -> None:
    model = mlp()
    optimizer = sgd(model)

    def diverge(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.05 if step < 40 else 1.5

    snapshots = train(model, OnDigits(model), optimizer, 60, before=diverge)
    spike, *_ = named(snapshots, "loss-spike")
    assert 40 <= spike.step < 50
    assert any(
        each.severity == "critical" and "training diverges" in each.sentence for each in named(snapshots, "loss-spike")
    )
    exploding = named(snapshots, "exploding-gradients")
    assert [each.step for each in exploding]


def test_a_learning_rate_that_diverges_from_the_first_step_on_is_found() -> None:
    model = nn.Linear(64, 1)
    images, labels = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    snapshots = train(model, lambda step: (model(images)[:, 0] - labels).square().mean(), optimizer, 40)
    found = named(snapshots, "loss-spike")
    assert [(each.severity, each.site) for each in found][:1] == [("critical", None)]
    assert found[0].step < 10


def test_a_layer_that_is_cut_off_in_the_middle_of_training_is_found_against_its_past() -> None:
    model = Stream(blocks=4)

    def cut(step: int) -> None:
        if step == 40:
            with torch.no_grad():
                model.blocks[2].down.weight.fill_(0)
                model.blocks[2].down.weight.requires_grad_(False)

    found = named(train(model, OnDigits(model), sgd(model, 0.01), 60, before=cut), "vanishing-gradients")
    assert found[0].step == 44
    assert found[0].site is not None
    assert found[0].site.name.startswith("blocks.2.")


@pytest.mark.parametrize(("began", "told"), [(0, 19), (5, 104)])
def test_a_tanh_with_inputs_that_are_too_large_is_saturated(began: int, told: int) -> None:
    model = mlp(nn.Tanh)

    def enlarge(step: int) -> None:
        if step == began:
            with torch.no_grad():
                model[2].weight.mul_(1000)

    found = named(train(model, OnDigits(model), sgd(model, 1e-3), 110, enlarge), "saturated-channels")
    assert [(each.step, each.since, each.site) for each in found] == [(told, began, ("3", "output"))]
    assert ("from the start" in found[0].sentence) == (began == 0)
    assert "ends of the tanh" in found[0].sentence


def test_a_planted_massive_channel_is_found_by_its_number() -> None:
    model = Stream(blocks=4)

    def plant(step: int) -> None:
        if step == 20:
            with torch.no_grad():
                model.blocks[1].down.bias[17] = 3e4

    snapshots = train(model, OnDigits(model), sgd(model, 1e-3), 30, before=plant)
    outliers, massive = named(snapshots, "outlier-channels"), named(snapshots, "massive-activations")
    assert (outliers[0].step, outliers[0].site) == (22, ("blocks.1.down", "output"))
    assert outliers[0].sentence.startswith("channel 17 of the output of blocks.1.down reaches 30,00")
    assert {site for each in massive for site in each.sites} >= {("blocks.1.down", "output"), ("blocks.3", "output")}


class WideRange(nn.Module):
    """Values over many orders of magnitude."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (8 * x - 20).exp()


def test_a_layer_whose_values_do_not_fit_into_float8_is_found_in_float32() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), WideRange(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    found = named(train(model, OnDigits(model), sgd(model, 1e-3), 20), "low-precision-fit")
    (fit,) = [each for each in found if each.site == ("2", "output")]
    assert fit.step in range(16, 20)  # the fifth of its verdicts
    assert fit.severity == "note"
    assert fit.value > 0.3
    assert "in float8_e4m3fn (scale 2^" in fit.sentence


def test_corrupted_batches_are_found_as_spikes_of_loss_and_gradients() -> None:
    model = mlp()
    snapshots = train(model, OnDigits(model, bad=range(70, 73)), sgd(model, 0.01), 80)
    loss, norm = named(snapshots, "loss-spike"), named(snapshots, "gradient-norm-spike")
    assert [(each.step, each.severity) for each in loss] == [(70, "warning")]
    assert [(each.step, each.severity) for each in norm] == [(70, "note")]


def test_updates_that_are_too_large_for_the_weights_are_found() -> None:
    model = mlp(nn.Tanh)
    snapshots = train(model, OnDigits(model), torch.optim.Adam(model.parameters(), lr=0.1), 20)
    first = named(snapshots, "update-ratio")[0]
    assert first.step == 0
    assert first.value > 1
    assert set(first.sites) >= {("0.weight", "param_update"), ("2.weight", "param_update")}
    assert f" changed {first.site.name} by " in first.sentence


def test_updates_that_stay_large_for_ten_steps_are_found() -> None:
    model = mlp(nn.Tanh)
    snapshots = train(model, OnDigits(model), torch.optim.Adam(model.parameters(), lr=0.05), 20)
    found = named(snapshots, "update-ratio")
    assert [each.step for each in found if each.site == ("6.weight", "param_update")] == [9]
    assert all(0.1 < each.value < 1 for each in found)


@pytest.mark.parametrize("value", [0.0, 1e-6])
def test_parameters_that_begin_with_one_value_throughout_have_no_size_that_an_update_could_exceed(value: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[6].weight.fill_(value)
    assert not named(train(model, OnDigits(model), torch.optim.Adam(model.parameters()), 30), "update-ratio")


def test_the_digits_cnn_is_healthy() -> None:
    demo = pytest.importorskip("examples.digits")
    images, labels, *_ = demo.digits(torch.device("cpu"))
    model = demo.cnn()
    loss_of = OnDigits(model, shape=(1, 8, 8))
    loss_of.images, loss_of.labels = images, labels
    snapshots = train(model, loss_of, torch.optim.Adam(model.parameters(), lr=2e-3), 200)
    assert snapshots[-1].scalars["loss"] < 0.2
    assert alarms(snapshots) == []


def test_a_small_llama_in_bfloat16_is_healthy() -> None:
    snapshots = llama(torch.bfloat16, 200)
    assert snapshots[-1].scalars["loss"] < 0.6 * snapshots[0].scalars["loss"]
    assert alarms(snapshots) == []
