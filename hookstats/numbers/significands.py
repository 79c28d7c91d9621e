"""The dtype that values had, from the bits that their significands need: for `compare` and for rules. Pure numpy."""

from __future__ import annotations

import numpy as np

from hookstats.numbers.fields import Array, Counts

# Significant bits that values of a dtype need at most, with the one that is not stored.
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
_SPECIAL = 3  # values of so few bits, as 0, 1 or 6, occur in every dtype


def count_bits(values: Array) -> Counts:
    """Significant bits of each number, 0 of what is not finite, or special."""
    mantissa, _ = np.frexp(np.where(np.isfinite(values), values, 0.0))
    whole = np.abs(mantissa * 2.0**53).astype(np.int64)
    lowest = np.maximum(whole & -whole, 1)
    bits: Counts = np.where(whole > 0, 54 - np.frexp(lowest.astype(np.float64))[1], 0)
    return np.where(bits > _SPECIAL, bits, 0)


def dtype_of(bits: int) -> str | None:
    """Return the narrowest dtype whose significand has this many bits; None for 0, which tells nothing."""
    return next((name for name, most in SIGNIFICANT_BITS.items() if 0 < bits <= most), None)
