"""Details of some sites: channels and histograms over time, top channels, single steps near findings."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from hookstats.numbers.fields import Array, Site, Stats
from hookstats.numbers.site_stats import SiteStats
from hookstats.report.planes import round_number
from hookstats.report.record import Recorded
from hookstats.report.reducing import FIRST, LAST, Codes, absolute_rows, edges, largest
from hookstats.rules import SEVERITIES

_WORST = 20  # sites beside those with findings
_STEPS = 128  # columns of a picture of channels, or of a histogram
_CHANNELS = 512  # rows of a picture of channels: several channels share one beyond that, the largest of them
_BINS = 96  # rows of a picture of a linear histogram
_BYTES = 3 << 20  # of all such pictures, before they are compressed: then the sites that were chosen first are told
_TOP = 8  # channels
_AROUND = 40  # measured steps to either side of a finding
_FAINTEST = -20.0  # log2 of the smallest share of a histogram that has a colour
_TOP_STATISTICS = ("rms", "abs_max", "mean", "std", "zeros")


def choose_sites(recorded: Recorded, restless: Array) -> list[int]:
    """Places of sites whose pictures have room in a file, as far as the last step tells. restless:
    `planes.measure_unrest`.

    Those that matter most go first: with findings, the worst, then the others.
    """
    place = {site: i for i, site in enumerate(recorded.sites)}
    found = [place[finding.site] for finding in recorded.findings if finding.site in place]
    found += [place[site] for finding in recorded.findings for site in finding.sites if site in place]
    worst = np.argsort(-restless, kind="stable").tolist()
    kin = {recorded.sites[i].name for i in [*found, *worst[:_WORST]]}
    near = [i for i, site in enumerate(recorded.sites) if site.name in kin]  # the gradient beside its activation
    sizes: dict[Site, int] = {}
    for snapshot in recorded.snapshots(_steps(recorded)[-1:], recorded.sites):
        sizes = {site: sum(len(column) for _, column in _columns(snapshot[site])) for site in snapshot}
    room, chosen = _BYTES, []
    for i in dict.fromkeys([*found, *worst[:_WORST], *near, *worst]):
        size = sizes.get(recorded.sites[i], 0) * len(_steps(recorded))
        if 0 < size <= room:
            chosen.append(i)
            room -= size
    return chosen


def _steps(recorded: Recorded) -> list[int]:
    """Columns of the pictures: steps with channels or histograms, the last one among them."""
    count = len(recorded.detailed)
    at = np.linspace(0, count - 1, min(count, _STEPS)).round().astype(np.int64)
    steps: list[int] = recorded.detailed[at].tolist()
    return steps


def details(recorded: Recorded, places: list[int]) -> dict[str, bytes]:
    """Pictures of sites, by place: ``details.3``, JSON, and the codes of each as ``details.3.channels``."""
    columns: dict[tuple[int, str], list[tuple[Array, int]]] = defaultdict(list)
    last: dict[tuple[int, str], SiteStats] = {}  # those of all steps may be more than the memory
    sites = [(place, recorded.sites[place]) for place in places]
    for snapshot in recorded.snapshots(_steps(recorded), [site for _, site in sites]):
        for place, stats in [(place, snapshot[site]) for place, site in sites if site in snapshot]:
            for name, column in _columns(stats):
                columns[place, name].append((column, snapshot.step))
                last[place, name] = stats
    said: dict[int, dict[str, Any]] = {place: {} for place in places}
    blobs = {}
    for (place, name), seen in columns.items():
        if len({column.shape for column, _ in seen}) > 1:  # a width that changed between steps has no picture
            continue
        picture, stats = np.stack([column for column, _ in seen], axis=1), last[place, name]
        parts = {"channels": stats.channels, "groups": stats.groups}.get(name)
        mine, codes = _histogram_picture(picture, _shares(stats)[1]) if parts is None else _channel_picture(picture)
        mine["steps"] = [step for _, step in seen]
        if parts is not None:
            mine |= {"channels": parts.count.size, "top": {"step": mine["steps"][-1], **_top(parts)}}
        said[place][name] = mine
        blobs[f"details.{place}.{name}"] = codes.tobytes()
    return blobs | {f"details.{place}": json.dumps(mine, allow_nan=False).encode() for place, mine in said.items()}


def _columns(stats: SiteStats) -> Iterator[tuple[str, Array]]:
    """Yield what one step adds to each picture of a site."""
    if not stats.calls:
        return
    for name, parts in (("channels", stats.channels), ("groups", stats.groups)):
        if parts is not None and parts.count.size > 1:
            few = edges(parts.count.size, _CHANNELS)
            yield name, largest(parts.rms[None], few)[0]
    if stats.histogram is not None:
        yield "histogram", _shares(stats)[0]


def _channel_picture(rms: Array) -> tuple[dict[str, Any], Codes]:
    """``[rows, steps]``: what is said of it, and its codes."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.maximum(np.log2(rms), -1075.0)
    whole = absolute_rows(logs.reshape(1, -1), np.zeros((1, logs.size), bool), finest=1 / 24)
    known = np.sort(logs[np.isfinite(logs) & (logs > -1075)])
    bounds = [round_number(float(known[int(q * (len(known) - 1))])) for q in (0.01, 1)] if len(known) else [0.0, 1.0]
    low, step = round_number(float(whole.low[0]), 9), round_number(float(whole.step[0]), 9)
    return {"rows": len(rms), "low": low, "step": step, "bounds": bounds}, whole.codes


def _shares(stats: SiteStats) -> tuple[Array, Array]:
    """``[bins]`` of all channels together, ascending, and the edges: octaves of |x|, or linear bins, as many as fit."""
    histogram = stats.histogram
    assert histogram is not None
    counts = histogram.counts.sum(axis=0) if histogram.counts.ndim == 2 else histogram.counts
    bounds = histogram.edges
    if bounds[-1] == -bounds[0] and len(counts) == 509:
        middle = len(counts) // 2  # zeros and subnormals, between the signs
        counts = np.append(counts[middle], counts[middle + 1 :] + counts[:middle][::-1])
        bounds = np.append(0.0, bounds[middle + 1 :])
    begin = np.arange(len(counts)) if bounds[0] == 0 else edges(len(counts), _BINS)
    merged = np.add.reduceat(counts, begin) / max(int(counts.sum()), 1)
    return merged, np.append(bounds[begin], bounds[-1])


def _histogram_picture(shares: Array, bounds: Array) -> tuple[dict[str, Any], Codes]:
    used = np.flatnonzero(shares.max(axis=1) > 2.0**_FAINTEST)
    if bounds[0] == 0 and len(used) > 1 and used[0] == 0:
        used = used[1:]  # zeros have a statistic of their own, and would lie far below
    begin, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, len(shares))
    with np.errstate(divide="ignore"):
        logs = np.maximum(np.log2(shares[begin:end]), _FAINTEST - 1)
    codes = np.where(logs < _FAINTEST, 0, FIRST + np.round((logs - _FAINTEST) / -_FAINTEST * (LAST - FIRST)))
    said = {
        "rows": end - begin,
        "edges": [round_number(x) for x in bounds[begin : end + 1].tolist()],
        "magnitude": bool(bounds[0] == 0),
        "low": _FAINTEST,
        "step": -_FAINTEST / (LAST - FIRST),
        "bounds": [_FAINTEST, 0],
    }
    return said, codes.astype(np.uint8)


def _top(channels: Stats[Array]) -> dict[str, list[list[float | None]]]:
    """Return the channels in which each statistic is largest, and the median of all of them."""
    found = {}
    for name in _TOP_STATISTICS:
        values = getattr(channels, name)
        if name == "zeros":
            values = values / np.maximum(channels.count, 1)
        size = np.nan_to_num(np.abs(values), nan=-1.0)
        top = np.argsort(-size, kind="stable")[:_TOP].tolist()
        median = float(np.median(size[size >= 0])) if (size >= 0).any() else float("nan")
        found[name] = [[i, round_number(float(values[i]))] for i in top] + [[-1, round_number(median)]]
    return found


def windows(recorded: Recorded, columns: int) -> list[dict[str, Any]]:
    """Single steps around findings, where a column of a line holds several: rms and largest |x| of the site."""
    place = {site: i for i, site in enumerate(recorded.sites)}
    wanted: dict[tuple[int, int], None] = {}
    for finding in sorted(recorded.findings, key=lambda each: (-SEVERITIES.index(each.severity), each.step)):
        if finding.site in place:
            wanted[place[finding.site], int(np.searchsorted(recorded.steps, finding.step))] = None
    if len(recorded.steps) <= columns or not wanted:
        return []
    around = [(i, slice(max(t - _AROUND, 0), t + _AROUND + 1)) for i, t in list(wanted)[:_STEPS]]
    found: list[dict[str, Any]] = [{"site": i, "steps": recorded.steps[at].tolist()} for i, at in around]
    for name in ("rms", "abs_max"):
        plane = recorded.statistic(name)
        for each, (i, at) in zip(found, around, strict=True):
            each[name] = [round_number(x) for x in plane[i, at].tolist()]
    return found
