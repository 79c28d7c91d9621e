"""Judging a training: its alarms, whether its illness was found, and what fewer measured steps would tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.illnesses.training import Training
from hookstats import Snapshot
from hookstats.rules import Finding


def thinned(snapshots: list[Snapshot], every: int) -> list[Snapshot]:
    """Keep every n-th step as measured, and the scalars of all others."""
    kept, earlier = [], {}
    for snapshot in snapshots:
        if snapshot.step % every:
            earlier[snapshot.step] = snapshot.scalars
        else:
            kept.append(Snapshot(replace(snapshot.frame, earlier_scalars=earlier)))
            earlier = {}
    return kept


def news(found: list[Finding]) -> list[Finding]:
    """Return the findings that stand for themselves."""
    return [each for each in found if each.because is None]


def alarms(found: list[Finding]) -> list[Finding]:
    """Return those that are worse than a note."""
    return [each for each in news(found) if each.severity != "note"]


def is_right(finding: Finding, illness: Training) -> bool:
    if finding.rule not in illness.rules or finding.step < illness.began:
        return False
    return illness.where is None or any(
        site.name == place or site.name.startswith(f"{place}.") for place in illness.where for site in finding.sites
    )


def diagnosis(findings: list[Finding], illness: Training) -> dict[str, Any]:
    found = news(findings)
    right = next((each for each in found if is_right(each, illness)), None)
    return {
        "found": right is not None,
        "rule": None if right is None else right.rule,
        "where": None if right is None or right.site is None else str(right.site),
        "late": None if right is None else right.step - illness.began,
        "before": len(alarms(found if right is None else found[: found.index(right)])),
        "told": len(alarms(found)),
        "notes": len(found) - len(alarms(found)),
        "all": [f"{each.rule}@{each.step}" for each in found],
    }
