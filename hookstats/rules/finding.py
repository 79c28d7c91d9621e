"""Finding: what a rule has to say of a step, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hookstats.numbers.fields import Site

SEVERITIES = ("note", "warning", "critical")  # ascending
MOST_SITES = 20  # that a finding lists; ``site_count`` is the number of all


class Cause(NamedTuple):
    """Names the finding from which another one follows."""

    rule: str
    step: int
    site: Site | None

    def __str__(self) -> str:
        return f"{self.rule} in step {self.step}" + ("" if self.site is None else f" ({self.site})")


@dataclass(frozen=True)
class Finding:
    """A problem that a rule found in a step.

    ``rule``: its name. ``step``: in which it happened; the loss of a step that was not measured is judged with the
    next one that is. ``site``: where, None for the whole step. ``value``: what was measured, and ``threshold``: what it
    was compared with. ``severity``: "note" (good to know, nothing is wrong), "warning" (training suffers) or "critical"
    (training is lost unless somebody acts). ``sentence``: what it means and what to do. ``rank``: of the process;
    ``attempt``: how often the run had been resumed.

    ``since``: the step in which it began, which may be long before it was certain. ``sites``: all sites of it, ``site``
    first, then in order of execution; at most 20, and ``site_count`` says how many there are.
    ``sample_ids``: of what a single batch can set off, where ids of samples were given to `Monitor.step`: those of the
    samples that stand out, the farthest first, if a site keeps samples apart (``monitor.tap(x, name, channel_dim=0)``);
    else those of all samples of the step.
    ``because``: the earlier finding that this one follows from; None: it stands for itself. ``is_news``: whether it is
    told while training goes on: what follows from something else is not, unless it is the first in that story to be
    critical.
    """

    rule: str
    step: int
    site: Site | None
    value: float
    threshold: float
    severity: str
    sentence: str
    rank: int = 0
    attempt: int = 0
    since: int | None = None
    sites: tuple[Site, ...] = ()
    site_count: int = 0
    because: Cause | None = None
    is_news: bool = True
    sample_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity: expected one of {', '.join(SEVERITIES)}; got {self.severity!r}")
        if self.since is None:
            object.__setattr__(self, "since", self.step)
        if self.site is not None and not self.sites:
            object.__setattr__(self, "sites", (self.site,))
            object.__setattr__(self, "site_count", 1)

    def __str__(self) -> str:
        follows = "" if self.because is None else f" It follows from {self.because}."
        return f"step {self.step}, {self.severity}, {self.rule}: {self.sentence}{follows}"

    @property
    def as_cause(self) -> Cause:
        """The name by which others refer to it in their ``because``."""
        return Cause(self.rule, self.step, self.site)

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's types; NaN and infinities as strings, so that every reader of JSON takes them."""
        numbers = {name: _number_to_json(getattr(self, name)) for name in ("value", "threshold")}
        because = None if self.because is None else [*self.because[:2], _site_to_json(self.because.site)]
        sites = [_site_to_json(site) for site in self.sites]
        lists = {"sites": sites, "sample_ids": list(self.sample_ids)}
        return {**vars(self), "site": _site_to_json(self.site), **lists, "because": because, **numbers}

    @classmethod
    def from_json(cls, d: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_json` wrote; ValueError for anything else."""
        if not isinstance(d, Mapping) or set(d) != set(cls.__dataclass_fields__):
            raise ValueError(f"expected a finding's {', '.join(cls.__dataclass_fields__)}; got {d!r:.200}")
        for name, (is_right, what) in _EXPECTED.items():
            if not is_right(d[name]):
                raise ValueError(f"{name} of a finding: expected {what}, got {d[name]!r:.200}")
        because, sites = d["because"], tuple(Site(*site) for site in d["sites"])
        because = None if because is None else Cause(because[0], because[1], _read_site(because[2]))
        told = {"because": because, "sites": sites, "sample_ids": tuple(d["sample_ids"]), "site": _read_site(d["site"])}
        return cls(**{**d, **told, "value": float(d["value"]), "threshold": float(d["threshold"])})


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and isinstance(value, bool) == (bool in kinds)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return _is(int, float)(value) and abs(value) < 2**1023  # an int may have hundreds of digits


def _is_site(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is(str), value))


def _is_cause(value: Any) -> bool:
    is_list = isinstance(value, list) and len(value) == 3 and _is(str)(value[0]) and _is(int)(value[1])
    return value is None or (is_list and (value[2] is None or _is_site(value[2])))


_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("rule", "severity", "sentence"), (_is(str), "a string")),
    **dict.fromkeys(("step", "rank", "attempt", "since", "site_count"), (_is(int), "an int")),
    **dict.fromkeys(("value", "threshold"), (_is_number, "a number")),
    "is_news": (_is(bool), "true or false"),
    "site": (lambda value: value is None or _is_site(value), "[name, tensor] or null"),
    "sites": (lambda value: isinstance(value, list) and all(map(_is_site, value)), "a list of [name, tensor]"),
    "sample_ids": (lambda value: isinstance(value, list) and all(map(_is(int), value)), "a list of ints"),
    "because": (_is_cause, "[rule, step, site] or null"),
}


def _site_to_json(site: Site | None) -> list[str] | None:
    return None if site is None else list(site)


def _read_site(value: Any) -> Site | None:
    return None if value is None else Site(*value)


def _number_to_json(number: float) -> float | str:
    return float(number) if math.isfinite(number) else str(float(number))
