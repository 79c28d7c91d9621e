"""Finding: what a rule has to say of a step, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        numbers = {name: _written(getattr(self, name)) for name in ("value", "threshold")}
        because = None if self.because is None else [*self.because[:2], _site_written(self.because.site)]
        sites = [_site_written(site) for site in self.sites]
        lists = {"sites": sites, "sample_ids": list(self.sample_ids)}
        return {**vars(self), "site": _site_written(self.site), **lists, "because": because, **numbers}

    @classmethod
    def from_json(cls, d: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_json` wrote; ValueError for anything else."""
        if not isinstance(d, Mapping) or set(d) != set(cls.__dataclass_fields__):
            raise ValueError(f"expected a finding's {', '.join(cls.__dataclass_fields__)}; got {d!r:.200}")
        for kind, names in _FIELDS_OF.items():
            for name in names:
                _check(name, d[name], kind)
        for each in d["sample_ids"]:
            _check("sample_ids", each, int)
        because = d["because"]
        if because is not None:
            _check("because", because, list)
            if len(because) != 3:
                raise ValueError(f"because of a finding: expected [rule, step, site] or null, got {because!r:.200}")
            _check("because", because[0], str)
            _check("because", because[1], int)
            because = Cause(because[0], because[1], _site_read("because", because[2]))
        sites = tuple(site for each in d["sites"] if (site := _site_read("sites", each)) is not None)
        numbers = {name: _read(name, d[name]) for name in ("value", "threshold")}
        told = {**d, "sites": sites, "sample_ids": tuple(d["sample_ids"]), "because": because, **numbers}
        return cls(**{**told, "site": _site_read("site", d["site"])})


_FIELDS_OF: dict[type, tuple[str, ...]] = {
    str: ("rule", "severity", "sentence"),
    int: ("step", "rank", "attempt", "since", "site_count"),
    bool: ("is_news",),
    list: ("sites", "sample_ids"),
}
_KINDS = {str: "a string", int: "an int", bool: "true or false", list: "a list"}


def _check(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        raise ValueError(f"{name} of a finding: expected {_KINDS[kind]}, got {value!r:.200}")


def _site_written(site: Site | None) -> list[str] | None:
    return None if site is None else list(site)


def _site_read(name: str, value: Any) -> Site | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)):
        raise ValueError(f"{name} of a finding: expected [name, tensor] or null, got {value!r:.200}")
    return Site(*value)


def _written(number: float) -> float | str:
    return float(number) if math.isfinite(number) else str(float(number))


def _read(name: str, value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and value in ("nan", "inf", "-inf")):
        try:
            return float(value)
        except OverflowError:  # an int of hundreds of digits
            pass
    raise ValueError(f"{name} of a finding: expected a number, got {value!r:.200}")
