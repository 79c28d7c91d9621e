"""The heatmaps and lines of a page: every statistic of every site, in as many columns as a picture has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hookstats.numbers.fields import Array, Counts
from hookstats.report.record import Recorded
from hookstats.report.reducing import (
    NONFINITE,
    PER_OCTAVE,
    Codes,
    Ends,
    Marks,
    Rows,
    absolute_rows,
    average,
    farthest,
    largest,
    line,
    linear_rows,
    logarithm,
    marks,
    past,
    relative_codes,
    smallest,
)

COLUMNS = 1000  # of a heatmap: no screen shows more
_CELLS = 250_000  # of a line's plane, so that a page of 1,000 sites stays below 15 MB
_AT_ONCE = 64  # rows: what is put together of them is below 100 MB for 10,000 steps

# Of each heatmap: its name on the page, how its values are told ("scale": by factors, "share": from 0 to 1, "signed":
# from -1 to 1) and from which statistics it follows.
STATISTICS: dict[str, tuple[str, str]] = {
    "rms": ("rms", "scale"),
    "abs_max": ("largest |x|", "scale"),
    "peak": ("largest |x| / rms", "scale"),
    "centre": ("mean / rms", "signed"),
    "zeros": ("share of zeros", "share"),
}


def numbers_of(statistic: Callable[[str], Array], key: str) -> Array:
    """``[n, t]`` of one of `STATISTICS`; NaN where a site was silent. statistic: gives planes by their names."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if key == "zeros":
            return statistic("zeros") / statistic("count")
        if key in ("peak", "centre"):
            return statistic("abs_max" if key == "peak" else "mean") / statistic("rms")  # of a tensor of zeros: silent
    return statistic(key)


def change(values: Array, kind: str) -> Array:
    """How far each value is from its site's own past: in octaves, or as a difference; as for `past`."""
    told = logarithm(values) if kind == "scale" else values
    result: Array = told - past(told)
    return result


UNITS = {"scale": PER_OCTAVE, "share": 125.0, "signed": 62.0}  # levels of a code for a change by one
DIFFERENCE = {"scale": 64.0, "share": 125.0, "signed": 62.0}  # the same for the difference of two runs


def told(is_pair: bool = False) -> dict[str, dict[str, Any]]:
    """What is said of the heatmaps, by the names of their statistics."""
    return {
        key: {"title": title, "kind": kind, "unit": UNITS[kind]} | ({"difference": DIFFERENCE[kind]} if is_pair else {})
        for key, (title, kind) in STATISTICS.items()
    }


def heatmap(recorded: Recorded, key: str, bad: Array) -> dict[str, bytes]:
    """The bytes of one of `STATISTICS` in all views, by name. bad: see `bad_of`."""
    begin, kind, count = recorded.begin(COLUMNS), STATISTICS[key][1], len(recorded.sites)
    values = numbers_of(recorded.statistic, key)
    far, top = [], []
    for at in (slice(i, i + _AT_ONCE) for i in range(0, count, _AT_ONCE)):
        far.append(farthest(change(values[at], kind), begin))
        top.append(topmost(kind)(logarithm(values[at]) if kind == "scale" else values[at], begin))
    is_bad = marks(bad, begin)
    relative = relative_codes(np.concatenate(far), is_bad, UNITS[kind])
    shown = absolute(np.concatenate(top), kind, is_bad, recorded.grows)
    return {f"{key}.relative": relative.tobytes(), f"{key}.absolute": scaled(shown)}


def topmost(kind: str) -> Callable[[Array, Counts], Array]:
    """How the absolute view of a heatmap is reduced to columns; of "scale" its logarithms are."""
    return farthest if kind == "signed" else largest


def scaled(rows: Rows) -> bytes:
    """Codes, and the scales of their rows."""
    return b"".join([rows.codes.tobytes(), rows.low.astype("<f8").tobytes(), rows.step.astype("<f8").tobytes()])


def restless(codes: Codes) -> Array:
    """Of each site, how far its rms went from its past, in octaves. codes: that heatmap."""
    far = np.where((codes == NONFINITE) | (codes == 0), 128, codes).astype(np.int64)
    result: Array = np.abs(far - 128).max(axis=1) / UNITS[STATISTICS["rms"][1]]
    return result


def absolute(top: Array, kind: str, is_bad: Marks, grows: bool, ends: Ends | None = None) -> Rows:
    """See `topmost`. ends: of other columns of the rows, whose scale it is, too."""
    if kind == "scale":
        return absolute_rows(top, is_bad, grows, ends)
    if kind == "share":
        return linear_rows(top, is_bad, grows, ends)
    codes = relative_codes(top, is_bad, 125)
    return Rows(codes, np.full(len(top), -126 / 125), np.full(len(top), 1 / 125))


def bad_of(recorded: Recorded) -> Array:
    """``[n, t]``: how many values were not finite."""
    result = recorded.statistic("nans")
    result += recorded.statistic("posinfs")
    result += recorded.statistic("neginfs")
    return result


# Name of a line, its statistic, how a column is made of steps, whether it is told by factors.
LINES: dict[str, tuple[str, Callable[[Array, Counts], Array], bool]] = {
    "rms": ("rms", average, True),
    "rms_low": ("rms", smallest, True),
    "rms_high": ("rms", largest, True),
    "abs_max": ("abs_max", largest, True),
    "mean": ("mean", average, False),
    "std": ("std", average, False),
    "min": ("min", smallest, False),
    "max": ("max", largest, False),
}


def line_columns(sites: int) -> int:
    """At most."""
    return min(max(250, _CELLS // max(sites, 1)), COLUMNS)


def lines(recorded: Recorded, names: Iterable[str] = tuple(LINES)) -> dict[str, bytes]:
    """Twelve bits a value, the high bytes before the low ones, then float64 of each row: low, step."""
    begin = recorded.begin(line_columns(len(recorded.sites)))
    blobs = {}
    last: tuple[str, Array] = ("", np.empty(0))
    for name in names:
        statistic, reduce, is_log = LINES[name]
        if statistic != last[0]:
            last = (statistic, recorded.statistic(statistic))
        blobs[f"line.{name}"] = packed(line(reduce(last[1], begin), is_log, recorded.grows))
    return blobs


def packed(found: Rows) -> bytes:
    high, low = (found.codes >> 8).astype(np.uint8), (found.codes & 255).astype(np.uint8)
    return b"".join([high.tobytes(), low.tobytes(), *(part.astype("<f8").tobytes() for part in found[1:])])


def scalars(recorded: Recorded) -> dict[str, list[list[float | None]]]:
    """Of each: smallest, average and largest of each column of a heatmap; None where there was none, or not finite.

    A step that was not measured counts with the next one that was.
    """
    begin = recorded.begin(COLUMNS)
    found = {}
    for name, (steps, values) in recorded.scalars.items():
        row = np.minimum(np.searchsorted(recorded.steps, steps), len(recorded.steps) - 1)
        column = np.searchsorted(begin, row, side="right") - 1
        low, high = np.full((2, len(begin)), np.nan)
        np.fmin.at(low, column, values)
        np.fmax.at(high, column, values)
        known = ~np.isnan(values)
        count = np.bincount(column[known], minlength=len(begin))
        with np.errstate(all="ignore"):
            mean = np.bincount(column[known], values[known], minlength=len(begin)) / count
        found[name] = [[short(x) for x in each.tolist()] for each in (low, mean, high)]
    return found


def short(number: float, digits: int = 5) -> float | None:
    """For JSON."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None
