"""Types of statistics for a type checker: `make lint` runs mypy over this file, which nothing imports."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import hookstats


def tells_floats_from_arrays_and_refuses_unknown_names(stats: hookstats.results.SiteStats) -> None:
    assert_type(stats.total.rms, float)
    assert stats.channels is not None
    assert_type(stats.channels.rms, NDArray[np.float64])
    stats.total.size  # type: ignore[attr-defined]  # noqa: B018
