"""Finding: what a rule has to say of a step, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hookstats.numbers.fields import Site

SEVERITIES = ("note", "warning", "critical")  # ascending


@dataclass(frozen=True)
class Finding:
    """What a rule found in a step.

    ``rule``: its name. ``step``: in which it happened; the loss of a step that was not measured is judged with the
    next one that is. ``site``: where, None for the whole step. ``value``: what was measured, and ``threshold``: what it
    was compared with. ``severity``: "note" (good to know, nothing is wrong), "warning" (training suffers) or "critical"
    (training is lost unless somebody acts). ``sentence``: what it means and what to do. ``rank``: of the process;
    ``attempt``: how often the run had been resumed.
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

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity: expected one of {', '.join(SEVERITIES)}; got {self.severity!r}")

    def __str__(self) -> str:
        return f"step {self.step}, {self.severity}, {self.rule}: {self.sentence}"

    def to_json(self) -> dict[str, Any]:
        """For json.dumps; NaN and infinities as strings, so that every reader of JSON takes them."""
        numbers = {name: _written(getattr(self, name)) for name in ("value", "threshold")}
        return {**vars(self), "site": None if self.site is None else list(self.site), **numbers}

    @classmethod
    def from_json(cls, d: Mapping[str, Any]) -> Finding:
        """What `to_json` gave; ValueError for anything else."""
        if not isinstance(d, Mapping) or set(d) != set(cls.__dataclass_fields__):
            raise ValueError(f"expected a finding's {', '.join(cls.__dataclass_fields__)}; got {d!r:.200}")
        for name in ("rule", "severity", "sentence"):
            if not isinstance(d[name], str):
                raise ValueError(f"{name} of a finding: expected a string, got {d[name]!r:.200}")
        for name in ("step", "rank", "attempt"):
            if not isinstance(d[name], int) or isinstance(d[name], bool):
                raise ValueError(f"{name} of a finding: expected an int, got {d[name]!r:.200}")
        site = d["site"]
        if site is not None:
            if not (isinstance(site, list) and len(site) == 2 and all(isinstance(part, str) for part in site)):
                raise ValueError(f"site of a finding: expected [name, tensor] or null, got {site!r:.200}")
            site = Site(*site)
        return cls(**{**d, "site": site, **{name: _read(name, d[name]) for name in ("value", "threshold")}})


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
