"""Judge: rules over the steps of a run, one after another; each problem is reported when it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hookstats.numbers.fields import Site
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.snapshot import Snapshot
from hookstats.rules.engine import REGISTERED, Rule, Verdict
from hookstats.rules.finding import SEVERITIES, Finding
from hookstats.rules.memory import Memory, from_state, to_state
from hookstats.rules.samples import add_samples
from hookstats.rules.step import SiteIds, Step
from hookstats.rules.story import Plot

Function: TypeAlias = Callable[[Step], Verdict]  # one's own rule, without thresholds

_NOTHING: frozenset[str] = frozenset()
_ENDED = 20  # verdicts of a rule without a problem, after which it has ended
_GROWN = 10.0  # how much worse it must have become to be reported again


def defaults() -> list[Rule]:
    """Return the rules that judge where none are named: all of this package, as they are without arguments.

    Those that look nearer to the beginning of a causal chain come first.
    """
    return sorted((each for each in REGISTERED if each.is_ours), key=lambda each: each.depth)


def rules_of_laws() -> dict[str, Rule]:
    """Return the rule of each law that `hookstats.Options(laws={name: False})` declares as broken by design."""
    return {each.law: each for each in defaults() if each.law}


def drop_declared(rules: Iterable[Rule], laws: Mapping[str, bool]) -> list[Rule]:
    """Return the rules but for those of laws that are declared as broken by design. laws: of `hookstats.Options`."""
    return [rule for rule in rules if laws.get(rule.law, True)]


def rule_to_json(rule: str | Rule | Function) -> dict[str, Any]:
    """``{"rule": "module:name", "arguments": {...}}`` of a rule, or of a name. TypeError for others."""
    if isinstance(rule, str):
        return {"rule": rule, "arguments": {}}
    if isinstance(rule, Rule):
        return {"rule": f"{rule.function.__module__}:{rule.function.__qualname__}", "arguments": dict(rule.arguments)}
    raise TypeError(f'rules: expected one of hookstats.rules, or "module:function"; got {rule!r}')


def rule_from_json(d: Mapping[str, Any]) -> Rule | Function:
    """Return the rule that `rule_to_json` wrote. Imports the module; ValueError where it has no such thing."""
    module, _, name = d["rule"].partition(":")
    if not module or not name:
        raise ValueError(f'rules: expected "module:function", got {d["rule"]!r}')
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"rules: expected a function at {d['rule']!r}: {error}") from error
    if isinstance(found, Rule) and (not is_ours(d) or found.function.__module__ == module):
        try:
            return found(**d["arguments"])
        except TypeError as error:
            raise ValueError(
                f"rules: expected arguments of {d['rule']!r}, got {d['arguments']!r:.200}: {error}"
            ) from None
    if is_ours(d):
        raise ValueError(f"rules: expected a rule at {d['rule']!r}, got {found!r}")
    if not callable(found) or isinstance(found, type) or d["arguments"]:
        raise ValueError(f"rules: expected a function without arguments at {d['rule']!r}, got {found!r}")
    function: Function = found
    return function


def is_ours(d: Mapping[str, Any]) -> bool:
    """Return whether it is one of hookstats.rules: others are code of whoever wrote the name."""
    return isinstance(d["rule"], str) and d["rule"].startswith("hookstats.rules.")


class _Episode(NamedTuple):
    """A problem that goes on."""

    last: int  # of the rule's verdicts, when it was last seen
    severity: str  # when it was last reported
    value: float
    threshold: float

    def is_worse(self, finding: Finding) -> bool:
        """Return whether it has become more severe, or lies further beyond its threshold by a factor."""
        if SEVERITIES.index(finding.severity) > SEVERITIES.index(self.severity):
            return True
        if self.threshold == 0:
            return False
        now, before = abs(finding.value), abs(self.value)
        if now > abs(finding.threshold):
            return now >= _GROWN * before
        return now * _GROWN <= before and now < before


class _Ruling:
    """A rule, what it remembers, and what it has said."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._ask = partial(rule.function, **rule.arguments)
        self.memory = Memory()
        self.verdicts = 0
        self.episodes: dict[tuple[str, Site | None], _Episode] = {}
        self.seen = _NOTHING  # names of the findings of the last step that was judged, new or not

    def findings(self, step: Step) -> list[Finding]:
        """Return the findings that are new."""
        self.seen, memory = _NOTHING, self.memory
        memory.sites = len(step.sites)
        verdict = self._ask(step, memory) if self.rule.has_memory else self._ask(step)
        if verdict is None:
            return []
        self.verdicts += 1
        found = self.rule.findings(verdict, step, memory) if verdict else []
        if not found:
            return []
        new = [finding for finding in found if self._is_new(finding)]
        self.seen = frozenset(finding.rule for finding in found)
        return new

    def _is_new(self, finding: Finding) -> bool:
        if not isinstance(finding, Finding):
            raise TypeError(f"expected a Finding, got {finding!r}")
        key = (finding.rule, finding.site if self.rule.per_site else None)
        known = self.episodes.get(key)
        is_new = known is None or self.verdicts - known.last > _ENDED or known.is_worse(finding)
        if is_new or known is None:
            known = _Episode(self.verdicts, finding.severity, finding.value, finding.threshold)
        self.episodes[key] = known._replace(last=self.verdicts)
        return is_new

    def state(self) -> dict[str, Any]:
        kept = to_state((self.verdicts, self.episodes, dict(self.memory)))
        return {"name": self.rule.name, "arguments": to_state(dict(self.rule.arguments)), "kept": kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.verdicts, episodes, memory = from_state(state["kept"])
        self.episodes = {key: _Episode(*episode) for key, episode in episodes.items()}
        self.memory = Memory(memory)


class Judge:
    """Gives each step to the rules, and hands out what they find.

    A problem is a rule at a site, or a rule alone where it has ``per_site = False``. It is reported when it starts,
    again when it becomes more severe or its value ten times worse, and when it comes back after 20 verdicts of the rule
    without it.
    """

    def __init__(self, rules: Iterable[str | Rule | Function] | None = None, rank: int = 0, attempt: int = 0) -> None:
        """rules: of `hookstats.rules`, functions, or "module:function"; None: `defaults`. Windows are the judge's own.

        ValueError for a name that leads to no function.
        """
        self._sites = SiteIds()
        self._rank = rank
        self._attempt = attempt
        self._plot = Plot()
        self._rulings = [_Ruling(_as_rule(rule)) for rule in (defaults() if rules is None else rules)]
        self._failed: list[str] = []

    def judge(self, measured: Snapshot | StepFrame) -> list[Finding]:
        """Return the new findings of a step; steps come in order. A rule that raises is a finding, and goes."""
        step = Step(measured, self._sites, self._rank, self._attempt)
        self._sites.losses.push(step.read_scalar("loss").values())
        found: list[Finding] = []
        failed: list[Finding] = []
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            rulings = step.make_for_alike(self._applicable)
            for ruling in rulings:
                try:
                    found += ruling.findings(step)
                except Exception as error:
                    self._rulings.remove(ruling)
                    self._sites.forget()
                    name = ruling.rule.name
                    self._failed.append(name)
                    sentence = (
                        f"the rule {name} failed and does not judge any more: {error!r}. Fix it, or leave it out."
                    )
                    failed.append(step.finding(name, None, 1.0, 0.0, "warning", sentence))
        told = self._plot.tell(step.number, found, set().union(*(each.seen for each in rulings if each.seen)))
        return failed + [add_samples(finding, step) for finding in told]

    def _applicable(self, step: Step) -> list[_Ruling]:
        """Return the rules whose kinds of tensors came, with all of their rows where these are needed."""
        rulings = [each for each in self._rulings if not (each.rule.sums and step.is_sampled)]
        return [each for each in rulings if step.has_any(each.rule.of)]

    def state(self) -> dict[str, Any]:
        """All that the rules remember, for json.dumps: a judge that is given it by `restore` goes on as this one does.

        What a function or an object of one's own keeps by itself is not in it: a rule that is made by `rule` and keeps
        things in its `Memory` is.
        """
        return {
            "sites": [list(site) for site in self._sites.all],
            "losses": to_state(self._sites.losses),
            "rules": [ruling.state() for ruling in self._rulings],
            "failed": list(self._failed),
            "story": self._plot.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where a judge was when `state` was taken; before the first step. ValueError for anything else.

        Rules that were not there, or had other thresholds, begin with nothing.
        """
        try:
            self._sites.ids([Site(*site) for site in state["sites"]])
            self._sites.losses = from_state(state["losses"])
            self._failed = list(state["failed"])
            self._rulings = [each for each in self._rulings if each.rule.name not in self._failed]
            known = {(each["name"], str(each["arguments"])): each for each in state["rules"]}
            for ruling in self._rulings:
                own = known.get((ruling.rule.name, str(to_state(dict(ruling.rule.arguments)))))
                if own is not None:
                    ruling.restore(own)
            self._plot.restore(state["story"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"expected what `Judge.state` gave, got {state!r:.200}: {error!r}") from error


def judge(
    measured: Iterable[Snapshot | StepFrame], rules: Iterable[str | Rule | Function] | None = None
) -> list[Finding]:
    """The findings in the steps of a run, in order: see `Judge`."""
    judge = Judge(rules)
    return [finding for each in measured for finding in judge.judge(each)]


def _as_rule(rule: str | Rule | Function) -> Rule:
    """A function, or an object that is called, as a rule without arguments."""
    if isinstance(rule, str):
        rule = rule_from_json(rule_to_json(rule))
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, type) or not callable(rule):
        raise TypeError(f'rules: expected rules, functions or "module:function"; got {rule!r}')
    name = getattr(rule, "__qualname__", type(rule).__qualname__)
    return Rule(name, rule, per_site=getattr(rule, "per_site", True))
