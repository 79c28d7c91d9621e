"""One story: one problem is one finding, the cause is told, and what follows from it is kept with it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hookstats import Site
from hookstats.rules import Cause, Finding, Judge, Step, head, judge, story
from tests.rules.test_telling import steps

OUTPUTS = [Site(f"{i}", "output") for i in range(24)]


def deep(count: int) -> list:  # type: ignore[type-arg]
    """Snapshots of a model of 24 layers."""
    return steps(nn.Sequential(*(nn.Linear(2, 2) for _ in OUTPUTS)), [torch.ones(1, 2)] * count, tensors=["output"])


def found(plan: dict[int, list[tuple[str, int | None, str]]], count: int = 40) -> list[Finding]:
    """Judge findings (rule, site, severity), given by step."""

    def rule(step: Step) -> Iterator[Finding]:
        for name, site, severity in plan.get(step.number, []):
            yield step.finding(name, site, 2.0, 1.0, severity, f"{name} at {site}. Fix it.")

    return judge(deep(count), [rule])


def test_one_problem_at_many_sites_is_one_finding_that_lists_them_in_order_of_execution() -> None:
    (one,) = found({3: [("dead-channels", site, "warning") for site in range(24)]})
    assert (one.site, one.site_count, len(one.sites)) == (OUTPUTS[0], 24, 20)
    assert list(one.sites) == OUTPUTS[:20]
    assert one.sentence == ("dead-channels at 0. Fix it. The same holds at 23 other sites: 1, 2, 3 and 20 more.")


def test_two_problems_at_one_site_are_both_told_each_with_its_sites() -> None:
    def rule(step: Step) -> Iterator[Finding]:
        for site, value, text in ((0, 1.0, "It is off."), (0, 100.0, "It is stuck."), (1, 1.0, "It is off.")):
            yield step.finding("mine", site, value, 0.5, "warning", text)

    assert [(each.site, each.value, each.sentence) for each in judge(deep(1), [rule])] == [
        (OUTPUTS[0], 1.0, "It is off. The same holds at 1 other site: 1."),
        (OUTPUTS[0], 100.0, "It is stuck."),
    ]


def test_severities_and_rules_are_told_apart() -> None:
    told = found(
        {3: [("dead-channels", 0, "critical"), ("dead-channels", 1, "warning"), ("expert-load", 2, "warning")]}
    )
    assert [(each.rule, each.severity, each.because) for each in told] == [
        ("dead-channels", "critical", None),
        ("dead-channels", "warning", Cause("dead-channels", 3, OUTPUTS[0])),
        ("expert-load", "warning", Cause("dead-channels", 3, OUTPUTS[0])),
    ]


def test_of_what_follows_the_first_that_is_critical_is_news() -> None:
    told = found(
        {
            3: [("input-shift", 0, "warning"), ("dead-channels", 1, "warning")],
            4: [("loss-spike", None, "critical")],
            5: [("exploding-gradients", 2, "critical")],
        }
    )
    assert [(each.rule, each.is_news) for each in told] == [
        ("input-shift", True), ("dead-channels", False), ("loss-spike", True), ("exploding-gradients", False)
    ]  # fmt: skip
    assert [each.because for each in told[1:]] == 3 * [Cause("input-shift", 3, OUTPUTS[0])]
    assert [Finding.from_json(json.loads(json.dumps(each.to_json()))) for each in told] == told


def test_a_cause_comes_before_its_effect_in_one_step_and_later_sites_of_it_follow() -> None:
    told = found(
        {
            5: [("vanishing-gradients", 2, "warning"), ("dead-channels", 1, "warning")],
            9: [("dead-channels", 4, "warning"), ("low-precision-fit", 3, "note")],
        }
    )
    cause = Cause("dead-channels", 5, OUTPUTS[1])
    assert [(each.rule, each.because) for each in told] == [
        ("dead-channels", None),
        ("vanishing-gradients", cause),
        ("dead-channels", cause),
        ("low-precision-fit", cause),
    ]


@pytest.mark.parametrize(
    ("first", "second", "follows"),
    [
        (("loss-spike", None, "warning"), ("dead-channels", 1, "warning"), False),  # nearer to the beginning
        (("input-shift", None, "warning"), ("loss-spike", None, "critical"), True),
        (("input-shift", None, "note"), ("loss-spike", None, "warning"), False),  # a note explains notes alone
        (("dead-channels", 1, "warning"), ("dead-channels", 1, "critical"), False),  # it has become graver
        (("low-precision-fit", 1, "note"), ("massive-activations", 1, "note"), False),
    ],
)
def test_what_follows_from_what(first: tuple, second: tuple, follows: bool) -> None:  # type: ignore[type-arg]
    one, other = found({3: [first], 9: [second]})
    assert one.because is None
    assert other.because == (one.as_cause if follows else None)


def test_what_comes_long_after_a_problem_has_ended_stands_for_itself() -> None:
    told = found({3: [("input-shift", None, "warning")], 30: [("loss-spike", None, "warning")]})
    assert [each.because for each in told] == [None, None]


def test_what_goes_on_explains_what_comes_at_any_time() -> None:
    plan = {number: [("dead-channels", 1, "warning")] for number in range(3, 40)}
    plan[35] = [*plan[35], ("vanishing-gradients", 0, "warning")]
    assert [(each.step, each.because and each.because.step) for each in found(plan)] == [(3, None), (35, 3)]


def test_a_story_puts_earlier_findings_under_a_cause_that_was_certain_later() -> None:
    early = Finding("vanishing-gradients", 5, OUTPUTS[0], 1.0, 1.0, "warning", "They vanish. Fix it.")
    other = Finding("loss-spike", 2, None, 1.0, 1.0, "warning", "It jumped. Look.")
    cause = Finding("dead-channels", 20, OUTPUTS[1], 1.0, 1.0, "critical", "All are dead. Fix it.", since=3)
    effect = Finding("no-progress", 30, None, 1.0, 1.0, "note", "Nothing.", because=cause.as_cause)
    chapters = story([other, early, cause, effect])
    assert [(each.finding.rule, [effect.rule for effect in each.effects]) for each in chapters] == [
        ("dead-channels", ["vanishing-gradients", "no-progress"]),
        ("loss-spike", []),
    ]
    assert head([other, early, cause, effect]) == [
        "Since step 3: All are dead; what follows from it: vanishing-gradients, no-progress.",
        "In step 2: It jumped.",
    ]


def test_the_head_of_a_run_has_at_most_five_sentences() -> None:
    assert head([]) == ["No rule found anything wrong."]
    note = Finding("low-precision-fit", 0, OUTPUTS[0], 1.0, 1.0, "note", "It would not fit. Leave it out.")
    assert head([note]) == ["No rule found anything wrong; 1 note."]
    many = [Finding(f"rule{i}", i, None, 1.0, 1.0, "warning", f"Number {i}. Look.") for i in range(1, 8)]
    assert head([note, *many]) == [
        "In step 1: Number 1.",
        "In step 2: Number 2.",
        "In step 3: Number 3.",
        "4 other problems are listed below.",
        "1 note: nothing is wrong there.",
    ]


def test_findings_of_other_ranks_and_attempts_do_not_explain_each_other() -> None:
    cause = Finding("dead-channels", 5, OUTPUTS[0], 1.0, 1.0, "critical", "Dead.", since=0)
    early = [
        Finding("vanishing-gradients", 3, OUTPUTS[0], 1.0, 1.0, "warning", "They vanish.", rank, attempt)
        for rank, attempt in [(1, 0), (0, 1), (0, 0)]
    ]
    assert [len(chapter.effects) for chapter in story([*early, cause])] == [1, 0, 0]


def test_what_was_told_in_earlier_steps_stays_a_cause() -> None:
    measured = deep(12)

    def rule(step: Step) -> Iterator[Finding]:
        if step.number >= 3:
            yield step.finding("dead-channels", 1, 2.0, 1.0, "warning", "Dead.")
        if step.number == 11:
            yield step.finding("vanishing-gradients", 0, 2.0, 1.0, "warning", "They vanish.")

    judged = Judge([rule])
    for snapshot in measured[:10]:
        judged.judge(snapshot)
    assert [each.because for snapshot in measured[10:] for each in judged.judge(snapshot)] == [
        Cause("dead-channels", 3, OUTPUTS[1])
    ]


@pytest.mark.parametrize(("began", "follows"), [(20, True), (24, False)])
def test_what_begins_within_20_steps_of_its_cause_follows_from_it_though_it_is_certain_later(
    began: int, follows: bool
) -> None:
    def rule(step: Step) -> Iterator[Finding]:
        if step.number == 3:
            yield step.finding("input-shift", 0, 2.0, 1.0, "warning", "A batch.")
        if step.number == 35:
            yield step.finding("dead-channels", 1, 2.0, 1.0, "warning", "Dead.", since=began)

    cause, effect = judge(deep(40), [rule])
    assert effect.because == (cause.as_cause if follows else None)


def test_what_follows_from_an_effect_is_told_with_the_first_cause() -> None:
    first = Finding("input-shift", 30, OUTPUTS[0], 2.0, 1.0, "warning", "A batch.", since=20)
    second = Finding("dead-channels", 40, OUTPUTS[1], 2.0, 1.0, "warning", "Dead.", since=25)
    third = Finding("missing-gradients", 38, OUTPUTS[2], 2.0, 1.0, "warning", "Missing.", since=35)
    (chapter,) = story([third, second, first])  # the first one ended before the third began
    assert chapter.finding == first
    assert [each.rule for each in chapter.effects] == ["missing-gradients", "dead-channels"]
    assert all(each.because == first.as_cause for each in chapter.effects)


def test_what_began_before_a_problem_does_not_follow_from_it() -> None:
    def rule(step: Step) -> Iterator[Finding]:
        if step.number == 9:
            yield step.finding("exploding-gradients", 1, 2.0, 1.0, "warning", "Gradients.", since=7)
        if step.number == 10:
            yield step.finding("update-ratio", 2, 2.0, 1.0, "warning", "An update.", 6, 6)
            yield step.finding("loss-spike", None, 2.0, 1.0, "warning", "The loss.", since=7)

    told = judge(deep(12), [rule])
    assert [(each.rule, each.because) for each in told] == [
        ("exploding-gradients", None),
        ("update-ratio", None),
        ("loss-spike", Cause("update-ratio", 6, OUTPUTS[2])),
    ]
