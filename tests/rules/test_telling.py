"""Judging: what a rule sees, when a finding is told, and what is said of the first tensor that is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import hookstats
from hookstats import Site, Snapshot
from hookstats.rules import Cause, Finding, Judge, Step, judge, nonfinite, rule_from_json, rule_to_json


def steps(model: nn.Module, batches: list[torch.Tensor], **arguments: Any) -> list[Snapshot]:
    """One backward a batch; no parameter changes."""
    snapshots: list[Snapshot] = []
    with hookstats.attach(model, every=1, sinks=snapshots.append, **arguments) as monitor:
        for batch in batches:
            model(batch).sum().backward()
            monitor.step()
    return snapshots


def told(rule: Any, count: int = 1) -> list[Finding]:
    return judge(steps(nn.Sequential(nn.Linear(2, 2)), [torch.ones(1, 2)] * count), [rule])


def at(steps: set[int], value: float = 2.0, severity: str = "warning") -> Any:
    """A rule that finds something at the first site in these steps."""

    def found(step: Step) -> Iterator[Finding]:
        if step.number in steps:
            yield step.finding("some", 0, value, 1.0, severity, "it is ill")

    return found


def test_a_problem_is_told_when_it_begins_and_not_while_it_goes_on() -> None:
    assert [finding.step for finding in told(at(set(range(3, 30))), 30)] == [3]
    (snapshot,) = steps(nn.Sequential(nn.Linear(2, 2)), [torch.ones(1, 2)])
    assert [(each.step, each.rank) for each in Judge([at({0})], rank=3).judge(snapshot)] == [(0, 3)]


def test_a_problem_is_told_again_when_it_comes_back_after_twenty_steps_without_it() -> None:
    assert [finding.step for finding in told(at({1, 21, 50}), 60)] == [1, 50]


def test_a_problem_is_told_again_when_it_becomes_ten_times_worse_or_more_severe() -> None:
    def grows(step: Step) -> Iterator[Finding]:
        value, severity = {0: (2, "note"), 1: (19, "note"), 2: (20, "note"), 3: (1e-9, "warning")}[step.number]
        yield step.finding("large", 0, value, 1.0, severity, "")

    def falls(step: Step) -> Iterator[Finding]:
        yield step.finding("small", 0, [0.5, 0.06, 0.05, 0.04][step.number], 0.9, "note", "")

    assert [finding.step for finding in told(grows, 4)] == [0, 2, 3]
    assert [finding.step for finding in told(falls, 4)] == [0, 2]


def test_steps_of_which_a_rule_could_not_judge_do_not_end_a_problem() -> None:
    def sometimes(step: Step) -> list[Finding] | None:
        return [step.finding("some", 0, 2.0, 1.0, "note", "")] if step.number % 40 == 0 else None

    assert [finding.step for finding in told(sometimes, 100)] == [0]


def test_a_rule_that_raises_is_a_finding_and_the_others_go_on() -> None:
    def broken(step: Step) -> list[Finding]:
        raise ZeroDivisionError("oh")

    snapshots = steps(nn.Sequential(nn.Linear(2, 2)), [torch.ones(1, 2)] * 4)
    first, second = judge(snapshots, [broken, at({2})])
    assert first.step == 0
    assert "broken failed" in first.sentence
    assert "ZeroDivisionError('oh')" in first.sentence
    assert (second.step, second.rule) == (2, "some")


def test_each_judge_has_windows_of_its_own() -> None:
    snapshots = steps(nn.Sequential(nn.Linear(2, 2)), [torch.ones(1, 2)] * 3)
    snapshots[1].scalars["loss"] = math.nan
    rule = nonfinite
    for _ in range(2):
        (found,) = judge(snapshots[1:], [rule])
        assert "In step" not in found.sentence
        judge(snapshots[:1], [rule])


def test_ids_stay_when_sites_appear_later_or_are_missing() -> None:
    seen: list[tuple[list[Site], list[float]]] = []

    def looks(step: Step) -> list[Finding]:
        fired = [step.sites[i] for i in step.order]
        assert [i for i, calls in enumerate(step.calls) if calls] == sorted(step.order.tolist())
        seen.append((fired, [float(step.totals.abs_max[step.sites.index(site)]) for site in step.sites]))
        return []

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    snapshots = steps(model, [torch.ones(1, 2)] * 3)
    later = [snapshots[0].select("1*"), snapshots[1], snapshots[2].select("0*")]
    assert judge(later, [looks]) == []
    for snapshot, (fired, largest) in zip(later, seen, strict=True):
        assert fired == snapshot.order
        assert sorted(value for value in largest if not math.isnan(value)) == sorted(
            stats.total.abs_max for stats in snapshot.values() if stats.calls
        )
    assert len(seen[0][1]) < len(seen[1][1]) == len(seen[2][1])


def test_a_rule_by_name_is_the_same_as_the_rule() -> None:
    assert rule_from_json(json.loads(json.dumps(rule_to_json(nonfinite(overflows=3))))) == nonfinite(overflows=3)
    assert rule_from_json(rule_to_json("math:floor")) is math.floor
    for wrong in ("floor", "math:", "math:flour", "no.such:thing", "math:pi"):
        with pytest.raises(ValueError, match="expected"):
            Judge([wrong])
    with pytest.raises(TypeError, match="expected rules, functions"):
        Judge([Judge])  # type: ignore[list-item]


def test_a_finding_is_read_as_it_was_written_and_nothing_else_is() -> None:
    sites, because = (Site("a", "output"), Site("b", "output")), Cause("input-shift", 4, Site("", "input"))
    for site, others in ((sites[0], (1, sites, 24, because)), (None, ())):
        finding = Finding("some", 3, site, math.inf, 1.0, "note", "Look.", 2, 1, *others)
        assert Finding.from_json(json.loads(json.dumps(finding.to_json(), allow_nan=False))) == finding
    good = Finding("some", 3, None, 2.0, 1.0, "note", "Look.").to_json()
    for name, wrong in [
        ("step", 1.5), ("step", True), ("site", ["a"]), ("site", "ab"), ("value", "x"), ("value", None),
        ("value", 10**400),        ("severity", "bad"), ("sentence", 3), ("rank", None), ("more", 1),
        ("since", "3"), ("sites", [["a"]]), ("because", ["a", 1]), ("because", [1, 1, None]),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="expected"):
            Finding.from_json(good | {name: wrong})


class Root(nn.Module):
    """A square root, whose gradient is infinite at 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


def test_what_begins_in_backward_is_said_to() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Root())
    with torch.no_grad():
        model[0].weight.fill_(0)
        model[0].bias.fill_(0)
    (finding,) = judge(steps(model, [torch.ones(3, 2)] * 2), [nonfinite])
    assert finding.site == Site("0", "grad_output")
    assert "It began in backward, where all outputs are finite" in finding.sentence


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.eye(2, dtype=torch.bool), -math.inf)


class Logarithm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


def test_minus_infinity_from_the_first_step_on_is_a_mask_and_later_is_none() -> None:
    masked = nn.Sequential(nn.Linear(2, 2), Masked(), nn.Softmax(-1))
    assert judge(steps(masked, [torch.ones(2, 2)] * 3), [nonfinite]) == []
    ones, zeros = torch.ones(2, 2, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
    (finding,) = judge(steps(nn.Sequential(Logarithm()), [ones, zeros]), [nonfinite])
    assert (finding.step, finding.site, finding.value) == (1, Site("0", "output"), 4)
    assert "are an infinity" in finding.sentence


def test_minus_infinity_beside_nan_is_no_mask() -> None:
    both = torch.tensor([[0.0, -1.0], [0.0, 0.0]], requires_grad=True)
    (finding,) = judge(steps(nn.Sequential(Logarithm()), [both]), [nonfinite])
    assert (finding.step, finding.site, finding.value) == (0, Site("0", "output"), 4)


@pytest.mark.parametrize("overflows", [3, 16])
def test_a_step_that_the_grad_scaler_skips_is_a_note_until_it_skips_too_many(overflows: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Root())
    with torch.no_grad():
        model[0].weight.fill_(0)
        model[0].bias.fill_(0)
    snapshots = steps(model, [torch.ones(3, 2)] * 5)
    for snapshot in snapshots:
        snapshot.frame.overflowed = True
    found = judge(snapshots, [nonfinite(overflows=overflows)])
    expected = [(0, "note"), (2, "critical")] if overflows == 3 else [(0, "note")]
    assert [(finding.step, finding.severity) for finding in found] == expected
