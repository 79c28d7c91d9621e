"""Text for terminals, of names and sentences that came from somebody else's model file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BARS = "▁▂▃▄▅▆▇█"


def escape_controls(text: str) -> str:
    """Escape control characters and bidirectional marks, which a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, by its logarithm between the smallest and the largest: `!` where it is not finite.

    The height is at least a factor of 2: values that hardly differ make a flat line.
    """
    array = np.asarray(values, np.float64)
    good = np.isfinite(array)
    with np.errstate(all="ignore"):
        heights = np.log2(np.abs(array))
    known = good & (array != 0)
    if not known.any():
        return "".join(BARS[0] if each else "!" for each in good)
    low, high = heights[known].min(), heights[known].max()
    shares = np.where(known, np.clip((heights - low) / max(high - low, 1.0), 0, 1), 0)
    bars = [BARS[round(share * (len(BARS) - 1))] for share in shares.tolist()]
    return "".join(bar if is_good else "!" for bar, is_good in zip(bars, good.tolist(), strict=True))
