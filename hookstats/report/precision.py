"""The fit of a run's values into few bits, as `hookstats.rules.fit` counts it, for a table of the page."""

from __future__ import annotations

from typing import Any

import numpy as np

from hookstats.comparing.rounding import count_bits_of_sites
from hookstats.numbers.fields import ExponentBins, Site
from hookstats.numbers.kinds import kind_of
from hookstats.numbers.significands import dtype_of
from hookstats.numbers.snapshot import Snapshot
from hookstats.report.planes import round_number
from hookstats.report.record import Recorded
from hookstats.rules import BLOCK_FORMATS, BlockFit, fit

_LOOKED_AT = 32  # steps, from the last


def precision(recorded: Recorded) -> dict[str, Any] | None:
    """Return the table of the last step with histograms by exponent; None without one."""
    place = {site: i for i, site in enumerate(recorded.sites)}
    for step in recorded.detailed[::-1][:_LOOKED_AT].tolist():
        for snapshot in recorded.snapshots([step], recorded.sites):
            rows = _rows(snapshot, place)
            if rows:
                sites = [recorded.sites[row[0]] for row in rows]
                is_low, blocks = _is_low(snapshot, set(sites)), _blocks(snapshot, sites)
                return {"step": step, "rows": rows, "blocks": blocks, "is_low": is_low}
    return None


def _rows(snapshot: Snapshot, place: dict[Site, int]) -> list[list[Any]]:
    """Return a row of each site: place, smallest and largest octave, and of each format what `fit` says.

    That is the share that becomes zero, the share that is too large (at least, at most), the exponent of the best
    scale, and the share that becomes zero with it.
    """
    frame = snapshot.frame
    at, counts = frame.exponents()
    used = counts[:, 1:255] + counts[:, 257:511] > 0  # by sign and exponent; zeros and subnormals have the exponent 0
    shift = 126 + np.rint(np.log2(frame.scales[at])).astype(np.int64)
    ends = zip(at.tolist(), used.argmax(axis=1) - shift, 253 - used[:, ::-1].argmax(axis=1) - shift, strict=True)
    octaves = {frame.sites[i]: [int(low), int(high)] for i, low, high in ends}
    formats = (fit(snapshot, "float8_e4m3fn"), fit(snapshot, "float8_e5m2"), fit(snapshot, "float16"))
    return [
        [
            place[fits[0].site],
            *octaves[fits[0].site],
            *([round_number(x, 3) for x in (y.underflow, *y.overflow, y.exponent, y.scaled_underflow)] for y in fits),
        ]
        for fits in zip(*formats, strict=True)
        if fits[0].site in place and not kind_of(fits[0].site.tensor).is_about
    ]


def _blocks(snapshot: Snapshot, sites: list[Site]) -> dict[str, Any] | None:
    """Return by format what these sites lose with a scale for each block: at least, at most, standard error."""
    bins = snapshot.frame.bins
    if not isinstance(bins, ExponentBins) or bins.block is None:
        return None
    shares = {}
    for name, format in BLOCK_FORMATS.items():
        if format.block == bins.block:
            fits = [each for each in fit(snapshot, name) if isinstance(each, BlockFit)]
            lost = {each.site: (*each.lost, each.standard_error) for each in fits}
            shares[name] = [[round_number(x, 3) for x in lost[site]] if site in lost else None for site in sites]
    return {"size": bins.block, "dim": bins.block_dim, "formats": shares}


def _is_low(snapshot: Snapshot, sites: set[Site]) -> bool:
    """Tell whether values of few bits are in use. A few such sites may be whole numbers, or loaded from such a file."""
    bits = count_bits_of_sites(snapshot.frame)[[site in sites for site in snapshot]]
    low = sum(dtype_of(each) in ("bfloat16", "float16") for each in bits.tolist())
    return bool(low) and int(np.count_nonzero(bits)) <= 10 * low
