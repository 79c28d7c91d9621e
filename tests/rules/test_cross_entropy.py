"""The gradient of a mean over tokens weighs all of them alike, and by 1 together; another denominator is named."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import hookstats
from hookstats import Snapshot
from hookstats.rules import Finding, cross_entropy_gradient, judge
from hookstats.watch.given_loss import GivenLoss
from tests.rules.tokens import CLASSES, FAULTS, HEALTHY, TENSORS, Loss, mean, snapshots, summed
from tests.rules.trainings import train

pytestmark = pytest.mark.usefixtures("one_thread")

WAYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": torch.bfloat16},
    "compiled": {"compiled": True},
    "padded": {"padded": True},
    "float64": {"dtype": torch.float64},
}


def cases(losses: Iterable[str]) -> list[Any]:
    """Each loss in float32, and the first of them in all ways."""
    first, *others = losses
    ways = WAYS | {"scaler": {"autocast": torch.float16}}
    found = [(first, name, how) for name, how in ways.items()] + [(each, "float32", {}) for each in others]
    return [pytest.param(loss, how, id=f"{loss}-{name}") for loss, name, how in found]


def run(loss: str | Loss, how: dict[str, Any], **more: Any) -> list[Snapshot]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if how.get("autocast") == torch.float16 else None
    return snapshots(loss, **how, scaler=scaler, **more)


def judged(taken: list[Snapshot]) -> list[Finding]:
    return judge(taken, rules=[cross_entropy_gradient])


def number_of(snapshot: Snapshot, name: str) -> Any:
    return snapshot["", f"token_weights.{name}"].total


@pytest.mark.parametrize(("name", "how"), cases(HEALTHY))
def test_a_mean_over_tokens_is_told_nothing(name: str, how: dict[str, Any]) -> None:
    taken = run(HEALTHY[name], how)
    assert [each for each in judged(taken) if each.severity != "note"] == []
    for each in taken:
        least = number_of(each, "least")
        assert least.count == 4
        assert least.mean * 4 == pytest.approx(1, rel=5e-3 if "dtype" in how or "autocast" in how else 1e-5)


# Each sums over 96 tokens of a microbatch, or 8 (12 - 3.5) = 68 on average where some are padding.
FACTORS = {
    "losses_that_are_summed": (96.0, "summed instead of averaged"),
    "microbatches_that_are_added_up": (4.0, "divide each loss by 4"),
    "losses_that_are_divided_by_tokens_twice": (1 / 96, "over the number of tokens"),
    "losses_that_are_divided_by_microbatches_twice": (0.25, "over the number of microbatches"),
    "losses_times_1.2": (1.2, "Check what multiplies"),
}
PADDED = {"losses_that_are_summed": 68.0, "losses_that_are_divided_by_tokens_twice": 0.014968}  # a mean of quotients


@pytest.mark.parametrize(
    ("name", "how"), [*cases(FAULTS), ("losses_that_are_divided_by_tokens_twice", WAYS["padded"])], ids=str
)
def test_another_denominator_is_found_with_its_factor_and_its_cause(name: str, how: dict[str, Any]) -> None:
    found = [each for each in judged(run(name, how)) if each.severity != "note"]
    assert len(found) == 1
    factor, cause = FACTORS[name]
    if "padded" in how:
        factor = PADDED.get(name, factor)
    assert found[0].value == pytest.approx(factor, rel=0.03)
    assert found[0].severity == ("warning" if name == "losses_times_1.2" else "critical")
    assert (found[0].since, found[0].step) == (0, 1)
    assert cause in found[0].sentence


@pytest.mark.parametrize("lengths", [(12, 12, 12, 48), (12, 12, 12, 15)])
def test_microbatches_that_are_averaged_one_by_one_weigh_tokens_differently(lengths: tuple[int, ...]) -> None:
    (found,) = judged(snapshots(HEALTHY["mean of means"], lengths=lengths))
    assert found.value == pytest.approx(max(lengths) / 12, rel=1e-3)
    assert found.severity == ("warning" if found.value > 1.5 else "note")
    assert f"over 96 to {8 * max(lengths)} tokens" in found.sentence
    assert judged(snapshots(HEALTHY["mean over all tokens"], lengths=lengths)) == []


OTHERS: dict[str, Loss] = {
    "label smoothing": lambda logits, targets, count: mean(logits, targets, label_smoothing=0.1),
    "weights of classes": lambda logits, targets, count: mean(logits, targets, weight=1 + torch.arange(CLASSES) / 4),
    "z-loss": lambda logits, targets, count: mean(logits, targets) + 0.01 * logits.logsumexp(-1).square().mean(),
    "soft cap": lambda logits, targets, count: mean(0.5 * (logits / 0.5).tanh(), targets),
    "soft targets": lambda logits, targets, count: cross_entropy(
        logits.flatten(0, 1), logits.detach().roll(1, -1).flatten(0, 1).softmax(-1)
    ),
    "squares": lambda logits, targets, count: logits.square().mean(),
    "no gradient": lambda logits, targets, count: 0.0 * logits.sum(),
    "reward": lambda logits, targets, count: -mean(logits, targets),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_plain_cross_entropy_is_not_judged(name: str) -> None:
    taken = snapshots(OTHERS[name])
    assert {number_of(each, "each").max for each in taken} == {0.0}
    assert judged(taken) == []


@pytest.mark.parametrize("given", [lambda loss: 8 * loss, lambda loss: 96 * loss, lambda loss: 0.4 * loss])
def test_a_loss_that_is_not_the_mean_is_not_judged(given: Any) -> None:
    taken = snapshots(lambda logits, targets, count: summed(logits, targets), given=given)
    assert all(number_of(each, "each").count == 4 for each in taken)
    assert judged(taken) == []


def test_a_loss_that_may_be_what_was_differentiated_is_not_judged() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    torch.nn.init.normal_(model.weight)

    def loss_of(step: int) -> torch.Tensor:  # of two microbatches of two rows, that vary more than by the factor 2
        losses = [cross_entropy(model(torch.randn(2, 8)), torch.randint(3, (2,))) for _ in range(2)]
        return sum(losses)  # type: ignore[return-value]

    assert judged(train(model, loss_of, [], 20, tensors=TENSORS)) == []


def test_the_loss_may_be_given_as_a_number_or_as_the_part_that_was_differentiated() -> None:
    for given in (lambda loss: loss.item(), lambda loss: loss / 4):
        assert judged(snapshots(HEALTHY["mean of means"], given=given)) == []
        (found,) = judged(snapshots("losses_that_are_summed", given=given))
        assert found.value == pytest.approx(96, rel=1e-3)


def test_one_step_alone_is_not_told() -> None:
    taken = snapshots("microbatches_that_are_added_up")
    assert judged(taken[:1]) == []
    assert len(judged(taken[:2])) == 1


# Without weights of tokens: one backward a step, of a loss that is given with its grad_fn.
BY_NORM: dict[str, Any] = {"tensors": ("output", "grad_output"), "lengths": (12,)}


def times(factor: float) -> Loss:
    return lambda logits, targets, count: factor * mean(logits, targets)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "autocast", "padded", "float64"])
def test_by_default_the_gradient_is_held_against_its_loss(name: str) -> None:
    how = WAYS[name] | BY_NORM
    is_in_bfloat16 = name == "bfloat16"  # its softmax, too: then nothing is said
    taken = snapshots(times(1), **how, steps=24)
    assert judged(taken) == []
    assert [each.scalars.get("cross_entropy.3") for each in taken] == [None if is_in_bfloat16 else 96.0] * 24
    (found, *_) = judged(snapshots(times(3), **how)) or [None]
    assert (found is None) == is_in_bfloat16
    if found is not None:
        assert (found.severity, found.site.name, found.step, found.since) == ("critical", "3", 1, 0)
        assert found.value == pytest.approx(3, rel=0.02)  # 1 - p is about the same in all rows, at the beginning


def test_what_a_size_alone_tells_of_a_denominator() -> None:
    (found,) = judged(snapshots(times(96), **BY_NORM))
    assert found.value == pytest.approx(96, rel=0.02)
    assert "There are 96 rows: the losses are summed instead of averaged." in found.sentence
    (found,) = judged(snapshots(times(1 / 96), **BY_NORM))
    assert (found.severity, found.step) == ("warning", 1)
    assert found.value == pytest.approx(1 - 1 / CLASSES, rel=0.02)  # 1 - p, where all classes are as likely
    assert "omething divides it twice" in found.sentence
    several = BY_NORM | {"lengths": (12,) * 4}
    assert judged(snapshots(times(1), **several)) == []  # a norm of 2 is allowed for each
    assert judged(snapshots(times(96), **several))[0].value == pytest.approx(93, rel=0.02)


def test_a_large_power_of_two_may_be_a_scale() -> None:
    assert judged(snapshots(times(2.0**16), **BY_NORM)) == []


def test_a_gradient_whose_signs_do_not_balance_is_told() -> None:
    def loss(logits: torch.Tensor, targets: torch.Tensor, count: int) -> torch.Tensor:
        seen = logits.view_as(logits)
        seen.register_hook(lambda gradient: gradient.clamp(-5e-3, 5e-3))  # those of targets are about -1 / 96
        return mean(seen, targets)

    (found,) = judged(snapshots(loss, **BY_NORM))
    assert (found.severity, found.site.name) == ("warning", "3")
    assert "has a sum of 3" in found.sentence


GIVEN: dict[str, Any] = {
    "without its grad_fn": {"given": lambda loss: loss.detach()},
    "no mean of torch's cross_entropy, but of MulBackward0": {"given": lambda loss: 2 * loss},
    "no mean of torch's cross_entropy, but of NllLossBackward0": {"reduction": "sum"},
    "through TanhBackward0": {"shown": lambda logits: logits.tanh()},
    "in float32": {"shown": lambda logits: logits.bfloat16()},
}


@pytest.mark.parametrize("why", GIVEN)
def test_why_a_loss_is_not_held_against_its_gradient(why: str) -> None:
    torch.manual_seed(0)
    usual: dict[str, Any] = {"given": lambda loss: loss, "shown": lambda logits: logits, "reduction": "mean"}
    head, how = torch.nn.Linear(8, 5), usual | GIVEN[why]
    loss = cross_entropy(how["shown"](head(torch.randn(4, 8))), torch.arange(4), reduction=how["reduction"])
    found = GivenLoss(head)
    assert found.scalars(how["given"](loss)) == {}
    assert why in found.problem
    assert found.scalars(cross_entropy(head(torch.randn(4, 8)), torch.arange(4))) == {"cross_entropy.": 4}
    assert found.problem == ""


@pytest.mark.parametrize("every", [1, 10])
def test_a_step_that_is_one_of_several_microbatches_is_not_judged(every: int) -> None:
    torch.manual_seed(0)
    net, taken = torch.nn.Linear(8, 5), list[Snapshot]()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with hookstats.attach(net, every=every, sinks=taken.append) as monitor:
        for step in range(60):
            loss = cross_entropy(net(torch.randn(1, 8)), torch.randint(5, (1,)))
            (loss / 4).backward()
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            monitor.step(loss=loss)
    assert judged(taken) == []


def test_what_the_weights_of_tokens_know_to_be_no_cross_entropy_is_not_judged_by_its_norm() -> None:
    net = torch.nn.Linear(8, 5)

    def loss_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:  # of two parts, of which one is given
        logits = net(torch.randn(64, 8))
        loss = cross_entropy(logits, torch.randint(5, (64,)))
        return loss, loss + 2 * logits.logsumexp(-1).square().mean()

    for tensors, count in ((("grad_output",), 1), (TENSORS, 0)):
        torch.manual_seed(0)
        net.reset_parameters()
        assert len(judged(train(net, loss_of, torch.optim.SGD(net.parameters(), 0.01), 4, tensors=tensors))) == count


def test_where_no_updates_are_measured_it_is_judged_after_some_steps() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 5)

    def loss_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        loss = cross_entropy(net(torch.randn(1, 8)), torch.randint(5, (1,)))
        return loss, loss / 4

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    (found,) = judged(train(net, loss_of, optimizer, 20, tensors=("grad_output", "param_sample")))
    assert found.step == 9
