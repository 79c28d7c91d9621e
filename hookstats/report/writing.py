"""From a recorded run to its page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hookstats.numbers.fields import Counts, Site
from hookstats.numbers.kinds import is_of_module, kind_of
from hookstats.report import detail, planes
from hookstats.report.page import page
from hookstats.report.pair import Pair
from hookstats.report.record import Recorded
from hookstats.rules import Chapter, Finding, head, story

_FINDINGS = 2000  # on a page: the gravest, and what follows from them
_TEXT = 20_000  # characters of settings


def html(recorded: Recorded, second: Recorded | None = None) -> str:
    """The page of a run, and how far a second one is from it. ValueError where it holds no step, or no site."""
    if not len(recorded.steps) or not recorded.sites:
        raise ValueError(
            f"expected a run in which something was measured; {recorded.name} holds {len(recorded.steps)} steps of "
            f"{len(recorded.sites)} sites"
        )
    record, blobs = contents(recorded, second)
    return page(record, blobs)


def contents(recorded: Recorded, second: Recorded | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What a page is made from: JSON, and bytes by name."""
    record, blobs = of_all_sites(recorded, second)
    details, pictures = detailed(recorded, record, blobs)
    return record | details, blobs | pictures


def of_all_sites(recorded: Recorded, second: Recorded | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The same without what `detailed` says."""
    pair = None if second is None else Pair(recorded, second)
    run = recorded if pair is None else pair.first
    bad = planes.bad_of(run)
    blobs: dict[str, bytes] = {}
    for key in planes.STATISTICS:
        blobs |= planes.heatmap(run, key, bad)
    blobs |= planes.lines(run)
    count = run.statistic("count")
    record = overview(run, float(np.nansum(count + bad)), (~np.isnan(count)).sum(axis=1))
    if pair is not None:
        blobs |= pair.blobs((bad, planes.bad_of(pair.second)))
        record |= _of_both(pair)
    return record, blobs


def _of_both(pair: Pair) -> dict[str, Any]:
    """What of a page's JSON is other where a second run is on it, too."""
    place = {site: i for i, site in enumerate(pair.sites)}
    ordered = pair.rows()
    first = pair.a.steps
    return {
        "rows": [place[ordered[i]] for i in in_order(ordered)],
        "measured": [int(first[0]), int(first[-1]), len(first)],
        "statistics": planes.told(is_pair=True),
        "other": pair.told()
        | {"head": head(pair.b.findings, _last_loss(pair.b)), "chapters": chapters_of(pair.b, place)[0]},
    }


def detailed(
    recorded: Recorded, record: Mapping[str, Any], blobs: Mapping[str, bytes]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What is told of some sites only, and its bytes. record, blobs: of its page, where its sites are the first."""
    codes = np.frombuffer(blobs["rms.relative"], np.uint8).reshape(len(record["sites"]), -1)[: len(recorded.sites)]
    details, pictures = detail.details(recorded, planes.restless(codes))
    windows = detail.windows(recorded, planes.line_columns(len(recorded.sites)))
    return {"details": details, "windows": windows, "precision": detail.precision(recorded)}, pictures


def overview(recorded: Recorded, values: float, fired: Counts) -> dict[str, Any]:
    """The JSON of a page without what `detailed` says.

    values: how many were read in all; fired ``[n]``: in how many steps each site was not silent.
    """
    columns = planes.line_columns(len(recorded.sites))
    steps = recorded.steps
    chapters, left_out = chapters_of(recorded, {site: i for i, site in enumerate(recorded.sites)})
    return {
        "name": recorded.name,
        "written": round(time.time()),
        "sites": [list(site) for site in recorded.sites],
        "rows": in_order(recorded.sites),
        "steps": [int(steps[0]), int(steps[-1]), len(steps)],
        "begin": steps[recorded.begin(planes.COLUMNS)].tolist(),
        "line_begin": steps[recorded.begin(columns)].tolist(),
        "times": None if recorded.times is None else [float(recorded.times[0]), float(recorded.times[-1])],
        "values": values,
        "readings": int(fired.sum()),
        "fired": fired.tolist(),
        "statistics": planes.told(),
        "scalars": planes.scalars(recorded),
        "head": head(recorded.findings, _last_loss(recorded)),
        "chapters": chapters,
        "left_out": left_out,
        "skipped": [[*site, why.reason, why.times, since] for site, why, since in recorded.skipped],
        "settings": _short(recorded.settings),
        "other": None,
    }


def _last_loss(recorded: Recorded) -> tuple[int, float] | None:
    found = recorded.scalars.get("loss")
    return (int(found[0][-1]), float(found[1][-1])) if found is not None and len(found[0]) else None


def chapters_of(recorded: Recorded, place: Mapping[Site, int]) -> tuple[list[dict[str, Any]], int]:
    """The story as JSON, and how many findings have no room in it. place: of sites."""
    chapters = _chapters(recorded)
    told = [
        {"finding": _told(each.finding, place), "effects": [_told(effect, place) for effect in each.effects]}
        for each in chapters
    ]
    return told, len(recorded.findings) - sum(1 + len(each.effects) for each in chapters)


def _chapters(recorded: Recorded) -> list[Chapter]:
    """The story of the run, as much of it as a page holds: what stands for itself goes before what follows."""
    chapters = story(recorded.findings)[:_FINDINGS]
    room = _FINDINGS - len(chapters)
    result = []
    for each in chapters:
        result.append(Chapter(each.finding, each.effects[:room]))
        room -= len(result[-1].effects)
    return result


def _told(finding: Finding, place: Mapping[Site, int]) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "step": finding.step,
        "since": finding.since,
        "site": None if finding.site is None else place.get(finding.site),
        "sites": [place[site] for site in finding.sites if site in place],
        "site_count": finding.site_count,
        "severity": finding.severity,
        "sentence": finding.sentence,
        "rank": finding.rank,
        "attempt": finding.attempt,
    }


def in_order(sites: list[Site]) -> list[int]:
    """Sites in the order in which their modules are executed: a gradient beside what it is the gradient of."""
    forward = [site for site in sites if not kind_of(site.tensor).is_gradient and is_of_module(site.tensor)]
    backward = [site for site in sites if kind_of(site.tensor).is_gradient and is_of_module(site.tensor)][::-1]
    place: dict[str, int] = {}
    for site in [*forward, *backward]:
        place.setdefault(site.name, len(place))
    for site in sites:  # a parameter or a buffer stands where its module does
        place.setdefault(site.name, place.get(site.name.rpartition(".")[0], len(place)))
    return sorted(range(len(sites)), key=lambda i: (place[sites[i].name], i))


def _short(value: Any, depth: int = 0) -> Any:
    """As JSON of which a page can show all."""
    if isinstance(value, Mapping) and depth < 6:
        return {str(key): _short(each, depth + 1) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and depth < 6:
        return [_short(each, depth + 1) for each in value[:1000]]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and np.isfinite(value):
        return value
    return str(value)[:_TEXT]
