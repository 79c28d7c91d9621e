"""Weights & Biases: the run of this process, on a step axis of its own."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from hookstats.numbers.snapshot import Snapshot
from hookstats.sinks.adapter import active_run, package_of
from hookstats.sinks.keys import DEFAULT_STATISTICS, PREFIX, Keys, spell_key


class Wandb:
    """Logs each snapshot to a W&B run: ``hookstats/<tensor>/<statistic>/<name>`` over ``hookstats/step``.

    W&B drops what is logged with a step below its own. Snapshots arrive later than the steps they are of, so they are
    logged without one; and they do not count W&B's step on, or rows of yours would be dropped: a snapshot's values join
    the row that is open, which is sent when you log the next one, or at ``wandb.finish()``. Only where another snapshot
    comes first, that row is closed. Call ``wandb.finish()`` after ``monitor.detach()``.

    ``statistics``, ``sites`` and ``histograms`` are those of `JsonLines`, which says what is sent by default.

    Args:
        run: what ``wandb.init()`` gave; None: ``wandb.run``, the active one.

    Raises:
        ImportError: without wandb. RuntimeError: where no run is active.
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
        wandb = package_of("Wandb", "wandb")
        self._keys = Keys("Wandb", statistics, sites, histograms)
        self._run = active_run("Wandb", wandb.run if run is None else run, "wandb.init")
        self._histogram = wandb.Histogram
        self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        self._shared = self._run.settings.mode == "shared"  # by several processes: such a run has no step to look at
        self._row: int | None = None  # W&B's step of the row that the last snapshot joined

    def __call__(self, snapshot: Snapshot) -> None:
        values = self._keys.row(snapshot, self._histogram)
        if self._shared:
            self._run.log(values)
            return
        row = self._run.step
        if row == self._row:  # still open: this snapshot would overwrite the one before
            self._run.log({}, commit=True)
            row = self._run.step
        self._run.log(values, commit=False)
        self._row = row

    def finding(self, finding: Any) -> None:
        """An alert where it is more than a note: W&B sends alerts by mail or Slack, as its user has set."""
        level = {"warning": "WARN", "critical": "ERROR"}.get(finding.severity)
        if level is not None:  # of alerts with one title W&B would keep back all that come within a minute
            title = f"hookstats: {spell_key(finding.rule, 40)}"
            self._run.alert(title, str(finding), level, wait_duration=timedelta(microseconds=1))
