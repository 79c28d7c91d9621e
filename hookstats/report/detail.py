"""What is told of some sites only: channels and histograms over time, top channels, single steps near findings."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hookstats.comparing.rounding import bits_of_sites, dtype_of
from hookstats.numbers.fields import Array, Counts, ExponentBins, Site, Stats
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.site_stats import SiteStats
from hookstats.numbers.snapshot import Snapshot
from hookstats.report.planes import short
from hookstats.report.record import Recorded
from hookstats.report.reducing import FIRST, LAST, absolute_rows, edges, largest
from hookstats.rules import BLOCK_FORMATS, SEVERITIES, BlockFit, fit
from hookstats.rules.precision import FORMATS

_WORST = 20  # sites beside those with findings
_STEPS = 128  # columns of a picture of channels, or of a histogram
_CHANNELS = 512  # rows of a picture of channels: several channels share one beyond that, the largest of them
_BINS = 96  # rows of a picture of a linear histogram
_BYTES = 3 << 20  # of all such pictures, before they are compressed: then the sites that were chosen first are told
_TOP = 8  # channels
_AROUND = 40  # measured steps to either side of a finding
_FAINTEST = -20.0  # log2 of the smallest share of a histogram that has a colour
_TOP_STATISTICS = ("rms", "abs_max", "mean", "std", "zeros")


def chosen(recorded: Recorded, restless: Array) -> list[int]:
    """Places of sites, those that matter most first: with findings, the worst, then the others."""
    place = {site: i for i, site in enumerate(recorded.sites)}
    found = [place[finding.site] for finding in recorded.findings if finding.site in place]
    found += [place[site] for finding in recorded.findings for site in finding.sites if site in place]
    worst = np.argsort(-restless, kind="stable").tolist()
    kin = {recorded.sites[i].name for i in [*found, *worst[:_WORST]]}
    near = [i for i, site in enumerate(recorded.sites) if site.name in kin]  # the gradient beside its activation
    return list(dict.fromkeys([*found, *worst[:_WORST], *near, *worst]))


class _Picture(NamedTuple):
    """Of a site: a column for each step, and what its rows are."""

    steps: list[int]
    columns: list[Array]


def details(recorded: Recorded, restless: Array) -> tuple[dict[str, Any], dict[str, bytes]]:
    """By the place of a site: what is said of its pictures, and their bytes."""
    if not len(recorded.detailed):
        return {}, {}
    order = chosen(recorded, restless)
    count = len(recorded.detailed)
    steps = recorded.detailed[np.linspace(0, count - 1, min(count, _STEPS)).round().astype(np.int64)].tolist()
    last = _sizes(recorded, steps[-1])
    room, kept = _BYTES, []
    for i in order:
        size = last.get(recorded.sites[i], 0) * len(steps)
        if 0 < size <= room:
            kept.append(i)
            room -= size
    sites = [recorded.sites[i] for i in kept]
    channels, groups, histograms = ({site: _Picture([], []) for site in sites} for _ in range(3))
    tops: dict[str, dict[Site, tuple[int, Stats[Array]]]] = {"channels": {}, "groups": {}}
    edge_of: dict[Site, Array] = {}
    for snapshot in recorded.snapshots(steps, sites):
        for site in sites:
            if site not in snapshot or snapshot[site].calls == 0:
                continue
            stats = snapshot[site]
            for name, pictures, parts in (("channels", channels, stats.channels), ("groups", groups, stats.groups)):
                if parts is not None and parts.count.size > 1:
                    pictures[site].steps.append(snapshot.step)
                    pictures[site].columns.append(_few(parts.rms, _CHANNELS))
                    tops[name][site] = (snapshot.step, parts)
            if stats.histogram is not None:
                share, edge_of[site] = _share(stats)
                histograms[site].steps.append(snapshot.step)
                histograms[site].columns.append(share)
    said, blobs = {}, {}
    for i, site in zip(kept, sites, strict=True):
        mine: dict[str, Any] = {}
        for name, pictures in (("channels", channels), ("groups", groups)):
            if _fits(pictures[site]):
                step, parts = tops[name][site]
                mine[name], blobs[f"{name}.{i}"] = _channel_picture(pictures[site], parts.count.size)
                mine[name]["top"] = {"step": step, **_top(parts)}
        if _fits(histograms[site]):
            mine["histogram"], blobs[f"histogram.{i}"] = _histogram_picture(histograms[site], edge_of[site])
        if mine:
            said[str(i)] = mine
    return said, blobs


def _sizes(recorded: Recorded, step: int) -> dict[Site, int]:
    """Bytes that a step takes in a site's pictures, as far as the last one tells."""
    sizes: dict[Site, int] = {}
    for snapshot in recorded.snapshots([step], recorded.sites):
        for site in snapshot.order:
            stats = snapshot[site]
            width = 0 if stats.channels is None else stats.channels.count.size
            groups = 0 if stats.groups is None else stats.groups.count.size
            bins = 0 if stats.histogram is None else min(stats.histogram.counts.shape[-1], _BINS)
            sizes[site] = sum(min(parts, _CHANNELS) for parts in (width, groups) if parts > 1) + bins
    return sizes


def _fits(picture: _Picture) -> bool:
    """A width that changed between steps has no picture."""
    return bool(picture.columns) and len({column.shape for column in picture.columns}) == 1


def _few(row: Array, most: int) -> Array:
    """``[channels]`` to at most so many: of neighbours the largest."""
    return row if len(row) <= most else largest(row[None], edges(len(row), most))[0]


def _channel_picture(picture: _Picture, channels: int) -> tuple[dict[str, Any], bytes]:
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.maximum(np.log2(np.stack(picture.columns, axis=1)), -1075.0)
    whole = absolute_rows(logs.reshape(1, -1), np.zeros((1, logs.size), bool), finest=1 / 24)
    known = np.sort(logs[np.isfinite(logs) & (logs > -1075)])
    bounds = [short(float(known[int(q * (len(known) - 1))])) for q in (0.01, 1)] if len(known) else [0.0, 1.0]
    said = {
        "steps": picture.steps,
        "rows": logs.shape[0],
        "channels": channels,
        "low": short(float(whole.low[0]), 9),
        "step": short(float(whole.step[0]), 9),
        "bounds": bounds,
    }
    return said, whole.codes.tobytes()


def _share(stats: SiteStats) -> tuple[Array, Array]:
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


def _histogram_picture(picture: _Picture, bounds: Array) -> tuple[dict[str, Any], bytes]:
    shares = np.stack(picture.columns, axis=1)
    used = np.flatnonzero(shares.max(axis=1) > 2.0**_FAINTEST)
    if bounds[0] == 0 and len(used) > 1 and used[0] == 0:
        used = used[1:]  # zeros have a statistic of their own, and would lie far below
    begin, end = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, len(shares))
    with np.errstate(divide="ignore"):
        logs = np.maximum(np.log2(shares[begin:end]), _FAINTEST - 1)
    codes = np.where(logs < _FAINTEST, 0, FIRST + np.round((logs - _FAINTEST) / -_FAINTEST * (LAST - FIRST)))
    said = {
        "steps": picture.steps,
        "rows": end - begin,
        "edges": [short(x) for x in bounds[begin : end + 1].tolist()],
        "magnitude": bool(bounds[0] == 0),
        "low": _FAINTEST,
        "step": -_FAINTEST / (LAST - FIRST),
        "bounds": [_FAINTEST, 0],
    }
    return said, codes.astype(np.uint8).tobytes()


def _top(channels: Stats[Array]) -> dict[str, list[list[float | None]]]:
    """Of each statistic, the channels in which it is largest, and the median of all of them."""
    found = {}
    for name in _TOP_STATISTICS:
        values = getattr(channels, name)
        if name == "zeros":
            values = values / np.maximum(channels.count, 1)
        size = np.nan_to_num(np.abs(values), nan=-1.0)
        top = np.argsort(-size, kind="stable")[:_TOP].tolist()
        median = float(np.median(size[size >= 0])) if (size >= 0).any() else float("nan")
        found[name] = [[i, short(float(values[i]))] for i in top] + [[-1, short(median)]]
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
    found = []
    for i, t in list(wanted)[:_STEPS]:
        at = slice(max(t - _AROUND, 0), min(t + _AROUND + 1, len(recorded.steps)))
        rms, top = ([short(x) for x in row.tolist()] for row in recorded.near(i, at, ("rms", "abs_max")))
        found.append({"site": i, "steps": recorded.steps[at].tolist(), "rms": rms, "abs_max": top})
    return found


def precision(recorded: Recorded) -> dict[str, Any] | None:
    """How the values of the last step with histograms by exponent fit into formats of few bits; None without one."""
    for step in recorded.detailed[::-1][:32].tolist():
        for snapshot in recorded.snapshots([step], recorded.sites):
            rows = _fit(snapshot, {site: i for i, site in enumerate(recorded.sites)})
            if rows:
                shown = [recorded.sites[row[0]] for row in rows]
                return {
                    "step": step,
                    "rows": rows,
                    "blocks": _block_fit(snapshot, [row[0] for row in rows], recorded),
                    "is_low": _is_low(snapshot, shown),
                }
    return None


def _is_low(snapshot: Snapshot, sites: list[Site]) -> bool:
    """Tell whether values of few bits are in use. A few such sites may be whole numbers, or loaded from such a file."""
    chosen = set(sites)
    bits = bits_of_sites(snapshot.frame)[[site in chosen for site in snapshot]]
    low = sum(dtype_of(each) in ("bfloat16", "float16") for each in bits.tolist())
    return bool(low) and int(np.count_nonzero(bits)) <= 10 * low


def _block_fit(snapshot: Snapshot, places: list[int], recorded: Recorded) -> dict[str, Any] | None:
    """Of these sites, by format, what those with a scale for each block lose: at least, at most, standard error."""
    bins = snapshot.frame.bins
    if not isinstance(bins, ExponentBins) or bins.block is None:
        return None
    row = {recorded.sites[place]: k for k, place in enumerate(places)}
    shares: dict[str, list[list[float | None] | None]] = {}
    for name, format in BLOCK_FORMATS.items():
        if format.block == bins.block:
            shares[name] = [None] * len(places)
            for each in fit(snapshot, name):
                if each.site in row and isinstance(each, BlockFit):
                    shares[name][row[each.site]] = [short(share, 3) for share in (*each.lost, each.standard_error)]
    return {"size": bins.block, "dim": bins.block_dim, "formats": shares}


_FORMATS = [FORMATS[name] for name in ("float8_e4m3fn", "float8_e5m2", "float16")]


def _fit(snapshot: Snapshot, place: dict[Site, int]) -> list[list[Any]]:
    """Of each site: place, smallest and largest octave, and of each format the shares that become zero and too large.

    As it is, and after multiplying by the power of two that brings the largest value just below the format's.
    """
    at, counts = snapshot.frame.exponents()
    if not len(at):
        return []
    magnitudes = counts[:, :256] + counts[:, 256:]  # by the exponent that is stored: 127 for values from 1 to 2
    magnitudes = magnitudes[:, 1:255]  # without zeros and subnormals of float32
    exponents = np.arange(1, 255) - 127
    whole = magnitudes.sum(axis=1)
    totals = snapshot.frame.totals
    rows = []
    for k, i in enumerate(at.tolist()):
        site, top = snapshot.frame.sites[i], float(totals.abs_max[i])
        if site not in place or not whole[k] or not top > 0 or kind_of(site.tensor).is_about:
            continue
        scaler = round(float(np.log2(snapshot.frame.scales[i])))
        shares, octaves = magnitudes[k] / whole[k], exponents - scaler
        used = octaves[shares > 0]
        row: list[Any] = [place[site], int(used[0]), int(used[-1])]
        for largest_value, smallest_exponent in _FORMATS:
            shift = int(np.floor(np.log2(largest_value / top)))
            row += [
                short(_small(shares, octaves, smallest_exponent), 3),
                short(_large(shares, octaves, largest_value, top), 3),
                shift,
                short(_small(shares, octaves + shift, smallest_exponent), 3),
            ]
        rows.append(row)
    return rows


def _small(shares: Array, octaves: Counts, smallest: int) -> float:
    return float(shares[octaves < smallest - 1].sum())


def _large(shares: Array, octaves: Counts, most: float, top: float) -> float:
    """Inside the octave of the largest value that fits, values are taken as spread evenly."""
    if top <= most:
        return 0.0
    octave = int(np.floor(np.log2(most)))
    above = min(top, 2.0 ** (octave + 1)) - most
    inside = shares[octaves == octave].sum() * above / (min(top, 2.0 ** (octave + 1)) - 2.0**octave)
    return float(shares[octaves > octave].sum() + inside)
