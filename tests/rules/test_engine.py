"""The engine of rules: streaks, what is said of several sites, what a rule remembers, a judge that goes on later."""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.illnesses import ILL
from hookstats import Site, Snapshot
from hookstats.numbers.fields import STATISTICS
from hookstats.rules import Finding, Ill, Judge, Memory, Step, judge, rule, rule_from_json, rule_to_json
from hookstats.rules.history import Course, Window
from hookstats.rules.memory import from_state, to_state
from hookstats.rules.step import SiteIds
from tests.cluster import drifting
from tests.language import trainings
from tests.rules.test_guards import step_of


def steps(sizes: list[dict[str, float]], tensor: str = "output") -> list[Snapshot]:
    """Make steps, each with a module's output that holds one value throughout."""
    return [
        step_of(number, {(name, tensor): size * torch.ones(4, 2) for name, size in each.items()})
        for number, each in enumerate(sizes)
    ]


@rule(of="output")
def large_outputs(step: Step, value: float = 10.0, consecutive_steps: int = 2) -> Ill:
    """Say where an output is large."""
    largest, judged = step.totals.abs_max, step.find_fired("output")

    def say(site: int, since: int) -> str:
        return f"{step.sites[site].name} reaches {largest[site]:g} since step {since}"

    return Ill(largest > value, say, largest, value, judged=judged, steps=consecutive_steps)


@rule(of="output", per_site=False)
def large_together(step: Step, value: float = 10.0) -> Ill:
    """Say it once of all."""
    largest = step.totals.abs_max
    return Ill(largest > value, lambda sites, since: f"{len(sites)} of them", largest, value, "note", together=True)


def test_what_a_step_knows_is_asked_for_by_position_or_by_name() -> None:
    step = Step(steps([{"a": 1, "b": 20}])[0], SiteIds())
    for ask in (step.is_kind, step.find_fired, step.find_finite, step.list_finite, step.find_finite_ids):
        found = ask(kind="output")
        assert list(found) == list(ask("output"))
        assert len(found) == 2
    assert step.find_finite(kind="output") is step.find_finite("output")
    with pytest.raises(TypeError, match="missing a required argument: 'kind'"):
        step.find_finite(of="output")


def test_a_rule_is_told_of_sites_that_are_ill_for_long_enough_and_since_when() -> None:
    taken = steps([{"a": 1, "b": 20}, {"a": 20, "b": 20}, {"b": 20}, {"a": 20, "b": 1}])
    found = judge(taken, [large_outputs])
    assert [(each.rule, each.step, each.since, each.site) for each in found] == [
        ("large-outputs", 1, 0, Site("b", "output")),
        ("large-outputs", 3, 1, Site("a", "output")),  # silent in step 2, so its streak has waited
    ]
    assert found[0].sentence == "b reaches 20 since step 0"
    assert [each.step for each in judge(taken, [large_outputs(consecutive_steps=3)])] == [2]
    assert judge(taken, [large_outputs(value=30.0)]) == []


def test_a_sentence_is_filled_with_the_numbers_of_its_site_whatever_the_sites_are_called() -> None:
    @rule(of="output")
    def tells(step: Step, together: int = 0) -> Ill:
        largest = step.totals.abs_max
        words = {"half": largest / 2, "who": lambda told: f"{{{told}}}", "where": "{tensor}", "share": 0.125}
        say = "{tensor}, {name}: {value} > {threshold} since {since}, {half}, {who}, {where}, {share:%}"
        say = "{names}: {value}, {who}" if together else say
        return Ill(largest > 2, say, largest, 2, steps=2, together=bool(together), words=words)

    taken = steps([{"a": 1, "b{0}": 20000, "c": 3}] * 2)
    assert [each.sentence for each in judge(taken, [tells])] == [
        "the output of b{0}, b{0}: 20,000 > 2 since 0, 10,000, {1}, {tensor}, 12 % The same holds at 1 other site: c."
    ]
    assert [each.sentence for each in judge(taken, [tells(together=1)])] == ["b{0}, c: 20,000, {[1, 2]}"]


def test_what_is_said_of_all_sites_together_lists_them_in_order_of_execution() -> None:
    (found,) = judge(steps([{"a": 1, "b": 20, "c": 30}]), [large_together])
    assert (found.sentence, found.value, found.severity) == ("2 of them", 20, "note")
    assert found.sites == (Site("b", "output"), Site("c", "output"))
    assert found.site_count == 2


def test_a_step_without_its_kind_of_tensors_is_no_verdict() -> None:
    seen: list[int] = []

    @rule(of=("param", "output"))
    def looks(step: Step) -> list[Finding]:
        seen.append(step.number)
        return [step.finding("looks", 0, 1.0, 0.0, "note", "")] if step.number in (0, 41) else []

    taken = steps([{"a": 1.0}])
    taken += [step_of(number, {("a", "grad_output"): torch.ones(4, 2)}) for number in range(1, 41)]
    taken += [step_of(41, {("a", "output"): torch.ones(4, 2)})]
    assert [each.step for each in judge(taken, [looks])] == [0]  # it has not been away for 20 verdicts
    assert seen == [0, 41]


def test_a_rule_and_its_thresholds_go_through_json() -> None:
    written = json.loads(json.dumps(rule_to_json(large_outputs(value=30.0))))
    assert written == {"rule": f"{__name__}:large_outputs", "arguments": {"value": 30.0, "consecutive_steps": 2}}
    assert rule_from_json(written) == large_outputs(value=30.0)
    with pytest.raises(ValueError, match=r"expected arguments of .*large_outputs"):
        rule_from_json({**written, "arguments": {"other": 1}})


def test_what_a_rule_remembers_goes_through_json_as_it_is() -> None:
    memory = Memory(
        number=3, real=0.1, text="x", nothing=None, flag=True, bad=[math.nan, math.inf, -math.inf],
        of_sites={2: (1, 2.5), 7: (3, 4.5)}, some={1, 5}, last=deque([1.0, 2.0], maxlen=2),
        mask=np.array([True, False]), values=np.array([[0.1, math.nan], [1e-300, -0.0]]),
    )  # fmt: skip
    memory.course("loss", 4).push(2.0)
    again = Memory(from_state(json.loads(json.dumps(to_state(dict(memory))))))
    assert list(again) == list(memory)
    for name in ("number", "real", "text", "nothing", "flag", "of_sites", "some", "last"):
        assert again[name] == memory[name], name
        assert type(again[name]) is type(memory[name]), name
    assert again["last"].maxlen == 2
    assert repr(again["bad"]) == repr(memory["bad"])
    for name in ("mask", "values"):
        assert again[name].dtype == memory[name].dtype
        assert again[name].tobytes() == memory[name].tobytes()
        again[name][0] = 0  # can be written to
    assert again.course("loss", 4).level == 2.0
    with pytest.raises(TypeError, match="a rule's memory: expected numbers"):
        to_state({"step": object()})
    for bad in ({"array": [1]}, {"Judge": {}}, {"a": 1, "b": 2}, {"array": ["<f8", [3], ""]}):
        with pytest.raises(ValueError, match=r"a rule's memory: expected what was written by `Judge.state`"):
            from_state(bad)


def judged_in_pieces(snapshots: list[Snapshot], rules: list[Any] | None = None) -> list[Finding]:
    """Each step by a new judge, that goes on where the one before was."""
    state, found = None, list[Finding]()
    for snapshot in snapshots:
        one = Judge(rules)
        if state is not None:
            one.restore(json.loads(state))
        found += one.judge(snapshot)
        state = json.dumps(one.state())
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "make",
    [
        lambda: ILL["jump_of_a_language_model"].run().snapshots,
        lambda: ILL["relus_that_adam_has_killed"].run().snapshots,
        lambda: ILL["gradients_of_one_layer_times_eight.mlp"].run().snapshots[:60],
        lambda: drifting.snapshots("a_rank_that_clips_alone"),
        lambda: trainings.ILL["a_balancing_loss_of_the_wrong_sign"](),
        lambda: trainings.ILL["a_learning_rate_of_queries_and_keys_that_spikes"](),
    ],
    ids=["jump", "dead", "biases", "drift", "experts", "attention"],
)
def test_a_judge_that_is_stopped_at_any_step_and_restored_finds_the_same(make: Any) -> None:
    snapshots = make()
    expected = judge(snapshots)
    assert expected
    assert judged_in_pieces(snapshots) == expected


def test_what_was_told_and_what_it_explains_are_restored_too() -> None:
    @rule()
    def says(step: Step) -> list[Finding]:
        if step.number == 1:
            return [step.finding("nonfinite", 0, 1.0, 0.0, "critical", "the cause")]
        again = step.number in (2, 12, 40)
        return [step.finding("dead-channels", 0, 1.0, 0.0, "warning", "an effect")] if again else []

    taken = steps([{"a": 1.0}] * 41)
    found = judged_in_pieces(taken, [says])
    assert found == judge(taken, [says])
    assert [each.step for each in found] == [1, 2, 40]  # told again after 20 verdicts without it
    assert found[1].because == found[0].as_cause


def test_a_rule_that_failed_and_one_with_other_thresholds_are_not_restored() -> None:
    @rule()
    def broken(step: Step) -> None:
        raise ZeroDivisionError("oh")

    taken = steps([{"a": 20.0}] * 4)
    assert [each.step for each in judged_in_pieces(taken, [broken])] == [0]
    first = Judge([large_outputs])
    first.judge(taken[0])
    same, other = Judge([large_outputs]), Judge([large_outputs(value=15.0)])
    for one in (same, other):
        one.restore(json.loads(json.dumps(first.state())))
    assert [len(one.judge(taken[1])) for one in (same, other)] == [1, 0]


@pytest.mark.parametrize("bad", [None, [], {}, {"sites": 1}, {"sites": [], "failed": [], "rules": [{}], "story": {}}])
def test_what_is_no_state_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"expected what `Judge.state` gave, got"):
        Judge().restore(bad)


def test_the_median_of_a_window_is_that_of_its_values_as_of_some_steps_ago() -> None:
    generator = np.random.default_rng(0)
    window, pushed, ages = Window(40, min_history=5), list[list[list[float]]](), list[int]()
    for step in range(300):
        sites = 3 if step < 30 else 6
        pushed.append([[] for _ in range(6)] if not pushed else [list(each) for each in pushed[-1]])
        median = window.median(sites, is_exact=False)
        assert np.isnan(median[[len(each) < 5 for each in pushed[-1][:sites]]]).all()

        def expected(values: list[float]) -> float:
            return sorted(values[-40:])[(min(len(values), 40) - 1) // 2] if len(values) >= 5 else math.nan

        of = [[expected(each) for each in before[:sites]] for before in pushed[-17:]]  # of each of the last steps
        ages.append(min(age for age, each in enumerate(of[::-1]) if np.array_equal(median, each, equal_nan=True)))
        if step % 50 == 49:
            assert np.array_equal(window.median(sites), of[-1], equal_nan=True)
        values, ids = generator.standard_normal(sites), np.flatnonzero(generator.random(sites) < 0.8)
        window.push(values, ids)
        for site in ids.tolist():
            pushed[-1][site].append(float(values[site]))
    assert max(ages[:20]) <= 3  # an eighth of what there is
    assert 0 < max(ages) < 16


def test_a_course_keeps_what_it_would_compute_from_all_of_its_values() -> None:
    generator = np.random.default_rng(0)
    course, values = Course(20), list[tuple[float, float]]()
    near: list[float] = []
    for step in range(200):
        value = float(np.exp(generator.standard_normal()))
        if 80 <= step < 90:
            value -= 1.0  # some are negative, and later forgotten
        if near:
            values.append((value, float(np.median(near[-8:]))))
        near.append(value)
        course.push(value)
        past = np.array(values[-20:])
        if len(past) < 5:
            continue
        in_logs = bool((past > 0).all()) and min(near[-8:]) > 0
        distances = np.log(past[:, 0] / past[:, 1]) if in_logs else past[:, 0] - past[:, 1]
        deviation = 1.4826 * np.median(np.abs(distances - np.median(distances)))
        usual = max(float(np.median(distances)), 0.0)
        beyond = usual + max(6 * deviation, 2 * max(distances.max() - usual, 0.0))
        level = float(np.median(near[-8:]))
        assert course.in_logs == in_logs
        assert course.level == level
        assert course.deviation == pytest.approx(deviation, rel=1e-12)
        assert course.limit(6.0, 2.0) == pytest.approx(level * np.exp(beyond) if in_logs else level + beyond, rel=1e-9)
        for value in np.geomspace(1e-3, 1e3, 50).tolist():  # what is held without a deviation is within the limit
            assert not course.is_surely_usual(value, 2.0) or value <= course.limit(6.0, 2.0)


def test_what_follows_from_which_sites_fired_is_made_once_for_all_steps_that_agree_in_it() -> None:
    made: list[list[str]] = []

    def names_of_outputs(step: Step) -> list[str]:
        made.append([step.sites[site].name for site in step.list_finite("output")])
        return made[-1]

    @rule()
    def names(step: Step) -> Ill:
        found = step.make_for_alike(names_of_outputs)
        return Ill(True, lambda site, since: f"{', '.join(found)}", step.number + 1.0)

    judge_of_names, nan = Judge([names]), math.nan
    both, first = {"a": 1.0, "b": 1.0}, {"a": 1.0}
    measured = steps([both, both, first, both, both, both, {"a": nan, "b": 1.0}, {"c": 1.0, **both}, both])
    measured[4].frame.order = measured[4].frame.order[::-1].copy()
    said = ["a, b", "a, b", "a", "a, b", "b, a", "a, b", "b", "c, a, b", "a, b"]
    for each, expected in zip(measured, said, strict=True):
        assert judge_of_names._rulings[0].rule.function(Step(each, judge_of_names._sites)).say(0, 0) == expected
    with pytest.raises(ValueError, match="read-only"):
        Step(measured[0], judge_of_names._sites).find_fired("output")[:] = True
    assert made == [["a", "b"], ["a"], ["b", "a"], ["b"], ["c", "a", "b"], ["a", "b"]]  # the last: a site more is known


def test_the_totals_of_a_step_are_those_of_its_snapshot_silent_sites_included() -> None:
    sites = SiteIds()
    for each in steps([{"a": 2.0, "b": 3.0}, {"b": -1.0, "c": 0.0}, {"c": math.inf}]):
        step = Step(each, sites)
        for site, stats in each.items():
            for name in STATISTICS:
                value, expected = getattr(step.totals, name)[step.sites.index(site)], getattr(stats.total, name)
                assert value == expected or (math.isnan(value) and math.isnan(expected)), (site, name)
        assert np.isnan(step.totals.mean[step.totals.count == 0]).all()
        assert np.isnan(step.totals.rms[step.totals.count == 0]).all()
