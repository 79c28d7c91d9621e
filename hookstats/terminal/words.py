"""Text for terminals, of names and sentences that came from somebody else's model file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BARS = "▁▂▃▄▅▆▇█"


def plain(text: str) -> str:
    """Without control characters and bidirectional marks, which a terminal would obey: they show as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, by its logarithm between the smallest and the largest: `!` where it is not finite.

    Values that differ by less than a factor of 2 do not fill the height: a bar is at least an eighth of an octave.
    """
    array = np.asarray(values, np.float64)
    good = np.isfinite(array)
    with np.errstate(all="ignore"):
        heights = np.log2(np.abs(array))
    known = good & (array != 0)
    if not known.any():
        return "".join(BARS[0] if each else "!" for each in good)
    low, high = heights[known].min(), heights[known].max()
    steps = np.clip((heights - low) / max(high - low, 1.0) * (len(BARS) - 1), 0, len(BARS) - 1)
    return "".join("!" if not ok else BARS[int(round(step))] for ok, step in zip(good.tolist(), steps.tolist(), strict=True))
