"""Judge: rules over the steps of a run, one after another; each problem is reported when it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from hookstats.numbers.fields import Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.snapshot import Snapshot
from hookstats.rules.activations import DeadChannels, SaturatedChannels
from hookstats.rules.answers import InitialLoss, NoProgress, ProbabilitiesAsLogits
from hookstats.rules.arriving import GrowingGradients, MissingGradients
from hookstats.rules.attention import AttentionEntropy, AttentionLogits, AttentionSink
from hookstats.rules.experts import DeadExperts, ExpertLoad
from hookstats.rules.finding import SEVERITIES, Finding
from hookstats.rules.gradients import ExplodingGradients, VanishingGradients
from hookstats.rules.inputs import ConstantInput, InputShift, UnscaledInput
from hookstats.rules.laws import BiasGradient, ReducedGradient, ReplicaDrift
from hookstats.rules.learning import LostUpdates, ShrinkingWeights, UnchangedParameters
from hookstats.rules.moments import SecondMoment
from hookstats.rules.nonfinite import NonFinite
from hookstats.rules.outliers import MassiveActivations, OutlierChannels
from hookstats.rules.precision import LowPrecisionFit
from hookstats.rules.residual import ResidualDrift
from hookstats.rules.samples import named
from hookstats.rules.spikes import GradientNormSpike, LossSpike
from hookstats.rules.step import Sites, Step
from hookstats.rules.story import Plot
from hookstats.rules.updates import UpdateRatio

Rule: TypeAlias = Callable[[Step], Iterable[Finding] | None]

_ENDED = 20  # verdicts of a rule without a problem, after which it has ended
_GROWN = 10.0  # how much worse it must have become to be reported again


def defaults() -> list[Rule]:
    """The rules that judge where none are named, each as it is without arguments."""
    return [
        NonFinite(),
        ReplicaDrift(),
        InputShift(),
        ConstantInput(),
        UnscaledInput(),
        GrowingGradients(),
        BiasGradient(),
        ReducedGradient(),
        UnchangedParameters(),
        LostUpdates(),
        ShrinkingWeights(),
        MissingGradients(),
        ProbabilitiesAsLogits(),
        InitialLoss(),
        LossSpike(),
        GradientNormSpike(),
        ExplodingGradients(),
        VanishingGradients(),
        DeadChannels(),
        SaturatedChannels(),
        MassiveActivations(),
        OutlierChannels(),
        LowPrecisionFit(),
        UpdateRatio(),
        SecondMoment(),
        AttentionLogits(),
        AttentionEntropy(),
        AttentionSink(),
        ExpertLoad(),
        DeadExperts(),
        ResidualDrift(),
        NoProgress(),
    ]


def rule_to_json(rule: str | Rule) -> dict[str, Any]:
    """``{"rule": "module:name", "arguments": {...}}`` of one of our rules, or of a name. TypeError for others."""
    if isinstance(rule, str):
        return {"rule": rule, "arguments": {}}
    if not dataclasses.is_dataclass(rule) or isinstance(rule, type):
        raise TypeError(f'rules: expected one of hookstats.rules, or "module:function"; got {rule!r}')
    arguments = {each.name: getattr(rule, each.name) for each in dataclasses.fields(rule) if each.init}
    return {"rule": f"{type(rule).__module__}:{type(rule).__qualname__}", "arguments": arguments}


def rule_from_json(d: Mapping[str, Any]) -> Rule:
    """What `rule_to_json` gave. Imports the module; ValueError where it has no such thing."""
    module, _, name = d["rule"].partition(":")
    if not module or not name:
        raise ValueError(f'rules: expected "module:function", got {d["rule"]!r}')
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"rules: expected a function at {d['rule']!r}: {error}") from error
    if is_ours(d):
        if not (isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module):
            raise ValueError(f"rules: expected a rule at {d['rule']!r}, got {found!r}")
        try:
            ours: Rule = found(**d["arguments"])  # type: ignore[assignment]
        except TypeError as error:
            raise ValueError(
                f"rules: expected arguments of {d['rule']!r}, got {d['arguments']!r:.200}: {error}"
            ) from None
        return ours
    if not callable(found) or isinstance(found, type) or d["arguments"]:
        raise ValueError(f"rules: expected a function without arguments at {d['rule']!r}, got {found!r}")
    function: Rule = found
    return function


def is_ours(d: Mapping[str, Any]) -> bool:
    """Whether it is one of hookstats.rules: others are code of whoever wrote the name."""
    return isinstance(d["rule"], str) and d["rule"].startswith("hookstats.rules.")


class _Episode(NamedTuple):
    """A problem that goes on."""

    last: int  # of the rule's verdicts, when it was last seen
    reported: Finding  # the latest that was


class _Ruling:
    """A rule, and what it has said."""

    def __init__(self, rule: Rule, name: str) -> None:
        self.rule = rule
        self.name = name
        self.verdicts = 0
        self.episodes: dict[tuple[str, Site | None], _Episode] = {}
        self.seen: set[str] = set()  # names of the findings of the last step, new or not
        self.per_site = getattr(rule, "per_site", True)

    def findings(self, step: Step) -> list[Finding]:
        """Those that are new."""
        self.seen = set()
        said = self.rule(step)
        if said is None:
            return []
        self.verdicts += 1
        new = []
        for finding in said:
            if self._is_new(finding):
                new.append(finding)
            self.seen.add(finding.rule)
        return new

    def _is_new(self, finding: Finding) -> bool:
        if not isinstance(finding, Finding):
            raise TypeError(f"expected a Finding, got {finding!r}")
        key = (finding.rule, finding.site if self.per_site else None)
        known = self.episodes.get(key)
        is_new = known is None or self.verdicts - known.last > _ENDED or _is_worse(finding, known.reported)
        reported = finding if is_new or known is None else known.reported
        self.episodes[key] = _Episode(self.verdicts, reported)
        return is_new


def _is_worse(finding: Finding, than: Finding) -> bool:
    """More severe; or, where there is a threshold, further beyond it by a factor."""
    if SEVERITIES.index(finding.severity) > SEVERITIES.index(than.severity):
        return True
    if than.threshold == 0:
        return False
    now, before = abs(finding.value), abs(than.value)
    if now > abs(finding.threshold):
        return now >= _GROWN * before
    return now * _GROWN <= before and now < before


class Judge:
    """Gives each step to the rules, and hands out what they find.

    A problem is a rule at a site, or a rule alone where it has ``per_site = False``. It is reported when it starts,
    again when it becomes more severe or its value ten times worse, and when it comes back after 20 verdicts of the rule
    without it.
    """

    def __init__(self, rules: Iterable[str | Rule] | None = None, rank: int = 0, attempt: int = 0) -> None:
        """rules: of `hookstats.rules`, functions, or "module:function"; None: `defaults`. Windows are the judge's own.

        ValueError for a name that leads to no function.
        """
        self._sites = Sites()
        self._rank = rank
        self._attempt = attempt
        self._plot = Plot()
        self._rulings = [_Ruling(_fresh(rule), _name(rule)) for rule in (defaults() if rules is None else rules)]

    def judge(self, measured: Snapshot | StepFrame) -> list[Finding]:
        """What is new in a step; steps come in order. Never raises: a rule that does is a finding, and is left out."""
        step = Step(measured, self._sites, self._rank, self._attempt)
        found: list[Finding] = []
        failed: list[Finding] = []
        for ruling in list(self._rulings):
            try:
                found += ruling.findings(step)
            except Exception as error:
                self._rulings.remove(ruling)
                sentence = (
                    f"the rule {ruling.name} failed and does not judge any more: {error!r}. Mend it, or leave it out."
                )
                failed.append(step.finding(ruling.name, None, 1.0, 0.0, "warning", sentence))
        told = self._plot.tell(step.number, found, set().union(*(ruling.seen for ruling in self._rulings)))
        return failed + [named(finding, step) for finding in told]

    def rebuild(self, measured: Iterable[Snapshot | StepFrame]) -> None:
        """Fills the rules' windows with the steps before those that are to be judged, when a run is resumed.

        What is found in them was reported then. The last 200 measured steps are enough, and before them the first 10,
        from which `LossSpike` knows where the loss began, and `UpdateRatio` how parameters did.
        """
        for each in measured:
            self.judge(each)


def judge(measured: Iterable[Snapshot | StepFrame], rules: Iterable[str | Rule] | None = None) -> list[Finding]:
    """The findings in the steps of a run, in order: see `Judge`."""
    judge = Judge(rules)
    return [finding for each in measured for finding in judge.judge(each)]


def _fresh(rule: str | Rule) -> Rule:
    """With windows of its own."""
    if isinstance(rule, str):
        return rule_from_json(rule_to_json(rule))
    if isinstance(rule, type) or not callable(rule):
        raise TypeError(f'rules: expected rules, functions or "module:function"; got {rule!r}')
    return dataclasses.replace(rule) if dataclasses.is_dataclass(rule) else rule


def _name(rule: str | Rule) -> str:
    return rule if isinstance(rule, str) else getattr(rule, "__qualname__", type(rule).__qualname__)
