"""Trackio: the run of this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hookstats.numbers.snapshot import Snapshot
from hookstats.sinks.adapter import active_run, package_of
from hookstats.sinks.keys import DEFAULT_STATISTICS, PREFIX, Keys


class Trackio:
    """Logs each snapshot to a Trackio run, with its step: ``hookstats/<tensor>/<statistic>/<name>``.

    Unlike W&B, Trackio takes rows of earlier steps. Rows that you log without ``step=`` are numbered from the largest
    step so far on.

    ``statistics``, ``sites`` and ``histograms`` are those of `JsonLines`, which says what is sent by default.

    Args:
        run: what ``trackio.init()`` gave; None: the active one.

    Raises:
        ImportError: without trackio. RuntimeError: where no run is active.
        TypeError, ValueError: as `JsonLines`.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        statistics: str | Iterable[str] = DEFAULT_STATISTICS,
        sites: str | Iterable[str] | None = None,
        histograms: bool = False,
    ) -> None:
        trackio = package_of("Trackio", "trackio")
        self._keys = Keys("Trackio", statistics, sites, histograms)
        active = trackio.context_vars.current_run.get() if run is None else run
        self._run = active_run("Trackio", active, "trackio.init")
        self._histogram, self._level = trackio.Histogram, trackio.AlertLevel

    def __call__(self, snapshot: Snapshot) -> None:
        values = self._keys.row(snapshot, self._histogram)
        del values[f"{PREFIX}step"]
        self._run.log(values, step=snapshot.step)

    def finding(self, finding: Any) -> None:
        """An alert at the step that it is about, which Trackio prints, too."""
        level = {"note": self._level.INFO, "warning": self._level.WARN, "critical": self._level.ERROR}
        title = f"hookstats: {finding.rule}"
        self._run.alert(title, finding.sentence, level[finding.severity], step=finding.step)
