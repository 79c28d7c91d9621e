"""The engine: what a rule is, and what all rules share, so that a rule itself is a function over a step's arrays.

@rule(of="output")
def massive_activations(step, value=100.0, consecutive_steps=3):
    ill = step.totals.abs_max > value
    judged = step.find_fired("output")
    return Ill(ill, "{tensor} reaches {value}", step.totals.abs_max, value, judged=judged, steps=consecutive_steps)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array, Counts
from hookstats.rules.finding import Finding
from hookstats.rules.formatting import number, percent, tensor_of
from hookstats.rules.memory import Memory
from hookstats.rules.step import Mask, Step

Texts: TypeAlias = NDArray[np.str_]
_MOST = 2**31 - 1
_FORWARD = 3
REGISTERED: list[Rule] = []  # all that `rule` has made, each as it is without arguments


class _Words(dict[str, Any]):
    """Fillings of a sentence: numbers and texts of the place that it speaks of."""

    def __init__(self, step: Step, ill: Ill, told: Any, place: int, since: int) -> None:
        super().__init__(ill.words, value=ill.value, threshold=ill.threshold, since=str(since))
        self._step, self._told, self._place = step, told, place

    def __missing__(self, key: str) -> Any:
        if key == "names":
            return self._step.name_sites(self._told)
        site = self._step.sites[self._place]
        return {"tensor": tensor_of(site), "name": site.name, "module": site.name or "the model"}[key]

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        value = _take(found(self._told) if callable(found) else found, self._place)
        return value if isinstance(value, str) else _Number(value)


class _Number(float):
    """A number in a sentence: "{value}" as `number` writes it, "{value:%}" in percent."""

    def __format__(self, spec: str) -> str:
        return percent(float(self)) if spec == "%" else number(float(self))


@dataclass(slots=True)
class Ill:
    """The places where a rule sees its problem in a step, and the sentence for them. The engine makes findings of it.

    ``where``: a mask over ids of sites ``[n]``, or a bool for the step as a whole. ``say``: the sentence, in which
    ``{tensor}``, ``{name}``, ``{value}``, ``{threshold}``, ``{since}`` and the ``words`` are filled in; or a function
    that gives it for a site's id and the step since which it is so. ``words``: numbers, texts, arrays ``[n]``, or
    functions of a site's id. ``value``, ``threshold``, ``severity``: of the finding, one or ``[n]``.

    ``judged``: where the problem could have been seen; other sites' streaks wait. None: everywhere. ``steps``: in how
    many verdicts in a row it must be seen; 0: each verdict stands for itself, and ``since`` says when it began (a
    number or ``[n]``; None: in this step). ``over``: how many steps of the run it must have lasted, measured or not.
    ``key`` tells a rule's several streaks apart.

    ``together``: one finding for all sites, at the first in order of execution; then functions get the list of their
    ids, and ``{names}`` names some. ``site``: of a step as a whole, the id of the site that is named; ``sites``: those
    that are listed; ``at``: the step that it is of.
    """

    where: Mask | bool | np.bool_
    say: str | Callable[[Any, int], str]
    value: Array | Counts | float = 1.0
    threshold: Array | float = 0.0
    severity: str | Texts = "warning"
    judged: Mask | None = None
    steps: int = 0
    over: float = 0.0
    since: Counts | int | None = None
    key: str = ""
    together: bool = False
    site: int | None = None
    at: int | None = None
    sites: Sequence[int] = ()
    words: Mapping[str, Any] = field(default_factory=dict)

    def findings(self, name: str, step: Step, memory: Memory) -> list[Finding]:
        """Return the findings of the sites where it has lasted for long enough, in order of execution."""
        where, since = self.where, self.since
        streak = memory.streak(self.key) if self.steps else None
        if not isinstance(where, np.ndarray):
            if not where and (streak is None or not streak.goes_on):
                return []
            where = np.array([bool(where)])
        if streak is not None:
            where, since = streak.push(step.number, where, self.judged, self.steps, self.over), streak.since
        if not np.count_nonzero(where):
            return []
        if not isinstance(self.where, np.ndarray):
            of_step = int(since[0]) if isinstance(since, np.ndarray) else since
            told = list(self.sites) if self.sites else self.site
            return [self._make_finding(name, step, told, self.site, of_step, self.site or 0, self.sites)]
        sites = step.put_in_order(where)
        if self.together:
            return [self._make_finding(name, step, sites, sites[0], since, sites[0], sites)] if sites else []
        return [self._make_finding(name, step, site, site, since, site) for site in sites]

    def _make_finding(
        self, name: str, step: Step, told: Any, site: int | None, since: Any, place: int, sites: Sequence[int] = ()
    ) -> Finding:
        """told: what the sentence is made for. place: of its numbers in arrays."""
        number_of = step.number if self.at is None else self.at
        began = number_of if since is None else int(_take(since, place))
        severity = str(_take(self.severity, place))
        say, numbers = self.say, (float(_take(self.value, place)), float(_take(self.threshold, place)))
        words = _Words(step, self, told, place, began)
        sentence = say.format_map(words) if isinstance(say, str) else say(told, began)
        return step.finding(name, site, *numbers, severity, sentence, self.at, began, sites)


def _take(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, np.ndarray) else values


Verdict: TypeAlias = Ill | Finding | Iterable[Ill | Finding] | None


@dataclass(frozen=True)
class Rule:
    """A rule with its thresholds: ``massive_activations`` as it is, ``massive_activations(value=50.0)`` with another.

    ``name``: of its findings, that of the function with dashes. ``function``: of a `Step`, of a `Memory` if it takes
    one, and of the ``arguments``. It returns None where a step says nothing of its problem, an `Ill`, a Finding (see
    `Step.finding`), or several of these. ``of``: kinds of tensors; a step without any of them is not looked at.
    ``per_site``: whether the same problem at another site is another one. ``depth``: how near to the beginning of a
    causal chain it looks: 0 what comes in, 1 and 2 the optimizer and the parameters, 3 forward, 4 backward, 5 and more
    what comes out. ``is_cause``: whether anything follows from what it finds. ``law``: of `Options.laws`. ``sums``: it
    needs sums over all rows of activations or their gradients; a step of which only some rows were read is left out.
    """

    name: str
    function: Callable[..., Verdict]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    of: tuple[str, ...] = ()
    per_site: bool = True
    depth: int = _FORWARD
    is_cause: bool = True
    law: str = ""
    sums: bool = False
    has_memory: bool = False

    @property
    def is_ours(self) -> bool:
        """Return whether it is of hookstats.rules."""
        return self.function.__module__.startswith("hookstats.rules.")

    def __call__(self, **arguments: Any) -> Rule:
        """Return the rule with other thresholds. ValueError for what is no number of the default's type."""
        for name, value in arguments.items():
            if name not in self.arguments:
                known = ", ".join(self.arguments) or "no arguments"
                raise TypeError(f"{self.function.__name__}: expected {known}; got {name!r}")
            _check(f"{self.function.__name__}: {name}", type(self.arguments[name]), value)
        return replace(self, arguments={**self.arguments, **arguments})

    def __repr__(self) -> str:
        return f"{self.function.__name__}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def findings(self, verdict: Ill | Finding | Iterable[Ill | Finding], step: Step, memory: Memory) -> list[Finding]:
        """Return what it has found, of what its function said of a step."""
        if isinstance(verdict, Ill):
            return verdict.findings(self.name, step, memory)
        findings: list[Finding] = []
        for each in (verdict,) if isinstance(verdict, Finding) else verdict:
            findings += each.findings(self.name, step, memory) if isinstance(each, Ill) else [each]
        return findings


def depth(name: str) -> int:
    """Return how near to the beginning of a causal chain the rule of these findings looks; a stranger's at forward."""
    return next((each.depth for each in REGISTERED if each.name == name), _FORWARD)


def is_cause(name: str) -> bool:
    """Return whether anything follows from the findings of this name."""
    return all(each.is_cause for each in REGISTERED if each.name == name)


def rule(
    *,
    of: str | tuple[str, ...] = (),
    per_site: bool = True,
    depth: int = _FORWARD,
    is_cause: bool = True,
    law: str = "",
    sums: bool = False,
) -> Callable[[Callable[..., Verdict]], Rule]:
    """Make a `Rule` of a function: its defaults are the thresholds, its docstring is its page in the book of rules.

    of: a kind of tensors, or several, without which a step is not looked at. The others: see `Rule`.
    """

    def make(function: Callable[..., Verdict]) -> Rule:
        kinds = (of,) if isinstance(of, str) else of
        parameters = inspect.signature(function).parameters
        arguments = {name: each.default for name, each in parameters.items() if each.default is not each.empty}
        name = function.__name__.strip("_").replace("_", "-")
        made = Rule(name, function, arguments, kinds, per_site, depth, is_cause, law, sums, "memory" in parameters)
        REGISTERED.append(made)
        return made

    return make


def _check(where: str, kind: type, value: object) -> None:
    is_number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is int and not (is_number and 0 <= value <= _MOST):  # type: ignore[operator]
        raise ValueError(f"{where}: expected an int from 0 to {_MOST}, got {value!r}")
    if kind is float and not (is_number and value == value):
        raise ValueError(f"{where}: expected a number, got {value!r}")
    if kind is str and not isinstance(value, str):
        raise ValueError(f"{where}: expected a string, got {value!r}")
