"""The heatmaps and lines of a page: every statistic of every site, in as many columns as a picture has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hookstats.numbers.fields import Array
from hookstats.report.record import Recorded
from hookstats.report.reducing import (
    NONFINITE,
    PER_OCTAVE,
    CodedRows,
    Codes,
    Marks,
    Reduction,
    absolute_rows,
    average,
    edges,
    farthest,
    largest,
    linear_rows,
    logarithm,
    past,
    relative_codes,
    round_values,
    smallest,
)

COLUMNS = 1000  # of a heatmap: no screen shows more
_CELLS = 250_000  # of a line's plane, so that a page of 1,000 sites stays below 15 MB
_AT_ONCE = 64  # rows: what is put together of them is below 100 MB for 10,000 steps

# Of each heatmap: its name on the page, how its values are told ("scale": by factors, "share": from 0 to 1, "signed":
# from -1 to 1) and which statistic it is, or the quotient of which two: of a tensor of zeros that is silent.
HEATMAPS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "rms": ("rms", "scale", ("rms",)),
    "abs_max": ("largest |x|", "scale", ("abs_max",)),
    "peak": ("largest |x| / rms", "scale", ("abs_max", "rms")),
    "centre": ("mean / rms", "signed", ("mean", "rms")),
    "zeros": ("share of zeros", "share", ("zeros", "count")),
}
BAD = "nans+posinfs+neginfs"
# Name of a line, its statistic, and how a column is made of steps.
LINES: dict[str, tuple[str, Reduction]] = {
    "rms": ("rms", average),
    "rms_low": ("rms", smallest),
    "rms_high": ("rms", largest),
    "abs_max": ("abs_max", largest),
    "mean": ("mean", average),
    "std": ("std", average),
    "min": ("min", smallest),
    "max": ("max", largest),
}


def read(recorded: Recorded, key: str, *more: str) -> list[Array]:
    """Return ``[n, t]`` of one of `HEATMAPS`, then `planes` of others; NaN where a site was silent."""
    names = HEATMAPS[key][2]
    found = recorded.planes([*names, *more])
    with np.errstate(divide="ignore", invalid="ignore"):
        values = found[names[0]] if len(names) == 1 else found[names[0]] / found[names[1]]
    return [values, *(found[each] for each in more)]


def change(values: Array, kind: str) -> Array:
    """Return how far each value is from its site's own past: in octaves, or as a difference; as for `past`."""
    told = logarithm(values) if kind == "scale" else values
    result: Array = told - past(told)
    return result


UNITS = {"scale": PER_OCTAVE, "share": 125.0, "signed": 62.0}  # levels of a code for a change by one
DIFFERENCE = {"scale": 64.0, "share": 125.0, "signed": 62.0}  # the same for the difference of two runs


def describe_heatmaps(is_pair: bool = False) -> dict[str, dict[str, Any]]:
    """Describe the heatmaps, by the names of their statistics."""
    return {
        key: {"title": title, "kind": kind, "unit": UNITS[kind]} | ({"difference": DIFFERENCE[kind]} if is_pair else {})
        for key, (title, kind, _) in HEATMAPS.items()
    }


def heatmap(values: Array, kind: str, is_bad: Marks) -> tuple[Codes, CodedRows]:
    """Return one of `HEATMAPS`, ``[n, t]``, in both views: relative to each site's past, and absolute."""
    begin = edges(values.shape[1], COLUMNS)
    far, top = [], []
    for at in (slice(i, i + _AT_ONCE) for i in range(0, len(values), _AT_ONCE)):
        far.append(farthest(change(values[at], kind), begin))
        shown = logarithm(values[at]) if kind == "scale" else values[at]
        top.append((farthest if kind == "signed" else largest)(shown, begin))
    return relative_codes(np.concatenate(far), is_bad, UNITS[kind]), _absolute(np.concatenate(top), kind, is_bad)


def difference(first: Array, second: Array, kind: str, is_bad: Marks) -> Codes:
    """Return how far a second run is from the first, as codes of columns, where both were measured."""
    apart = logarithm(second) - logarithm(first) if kind == "scale" else second - first
    far = farthest(apart, edges(apart.shape[1], COLUMNS))
    return relative_codes(far, is_bad & ~np.isnan(far), DIFFERENCE[kind])


def _absolute(top: Array, kind: str, is_bad: Marks) -> CodedRows:
    if kind == "scale":
        return absolute_rows(top, is_bad)
    if kind == "share":
        return linear_rows(top, is_bad)
    codes = relative_codes(top, is_bad, 125)
    return CodedRows(codes, np.full(len(top), -126 / 125), np.full(len(top), 1 / 125))


def measure_unrest(codes: Codes) -> Array:
    """Return how far each site's rms went from its past, in octaves. codes: the relative view of that heatmap."""
    far = np.where((codes == NONFINITE) | (codes == 0), 128, codes).astype(np.int64)
    result: Array = np.abs(far - 128).max(axis=1) / PER_OCTAVE
    return result


def line_columns(sites: int) -> int:
    """Return the number of columns of a line, at most."""
    return min(max(250, _CELLS // max(sites, 1)), COLUMNS)


def lines(recorded: Recorded, names: list[str]) -> NDArray[np.float32]:
    """``[names, n, columns]`` of `LINES`; NaN where a site was silent."""
    begin = edges(len(recorded.steps), line_columns(len(recorded.sites)))
    found = np.empty((len(names), len(recorded.sites), len(begin)), np.float32)
    last: tuple[str, Array] = ("", np.empty(0))
    for place, name in enumerate(names):
        statistic, reduce = LINES[name]
        if statistic != last[0]:
            last = (statistic, recorded.statistic(statistic))
        found[place] = round_values(reduce(last[1], begin))
    return found


def scalars(recorded: Recorded) -> dict[str, list[list[float | None]]]:
    """Return each scalar's smallest, average and largest of each column of a heatmap; None for none, or not finite.

    A step that was not measured counts with the next one that was.
    """
    begin = edges(len(recorded.steps), COLUMNS)
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
        found[name] = [[round_number(x) for x in each.tolist()] for each in (low, mean, high)]
    return found


def round_number(number: float, digits: int = 5) -> float | None:
    """Round a number for JSON."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None
