"""MLflow: metrics of a run, sent by mlflow's own threads."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from hookstats.numbers.snapshot import Snapshot
from hookstats.sinks.adapter import active_run, package_of
from hookstats.sinks.keys import DEFAULT_STATISTICS, PREFIX, Keys, spell_key

_LONGEST = 5000  # characters of a tag, which all of mlflow's stores take


class Mlflow:
    """Logs each snapshot to an MLflow run, with its step: ``hookstats/<tensor>/<statistic>/<name>``.

    mlflow sends it from threads of its own, and logs what could not be sent; ``mlflow.flush_async_logging()`` waits for
    them, as the end of the process does. A snapshot with keys that were not there before, as the first one, is sent at
    once, and waited for. MLflow has no histograms.

    ``statistics`` and ``sites`` are those of `JsonLines`, which says what is sent by default.

    Args:
        run_id: of the run; None: that of ``mlflow.active_run()``.

    Raises:
        ImportError: without mlflow or mlflow-skinny. RuntimeError: where no run is active.
        mlflow.exceptions.MlflowException: where there is no such run.
        TypeError, ValueError: as `JsonLines`.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        statistics: str | Iterable[str] = DEFAULT_STATISTICS,
        sites: str | Iterable[str] | None = None,
    ) -> None:
        mlflow = package_of("Mlflow", "mlflow", "mlflow-skinny")
        self._keys = Keys("Mlflow", statistics, sites)
        self._metric, self._tag = mlflow.entities.Metric, mlflow.entities.RunTag
        self._findings = 0
        self._there: set[str] = set()
        if run_id is None:
            run_id = active_run("Mlflow", mlflow.active_run(), "mlflow.start_run", "run_id").info.run_id
        self._client = mlflow.MlflowClient()
        self._run_id = self._client.get_run(run_id).info.run_id

    def __call__(self, snapshot: Snapshot) -> None:
        values = self._keys.values(snapshot)
        del values["step"]
        now = time.time_ns() // 1_000_000
        metrics = [self._metric(PREFIX + key, value, now, snapshot.step) for key, value in values.items()]
        # A store of files makes a folder for each level of a key, and mlflow's threads would stumble over each other's.
        is_new = not values.keys() <= self._there
        self._there.update(values)  # where it cannot be sent, training waits for that once
        self._client.log_batch(self._run_id, metrics, synchronous=is_new)

    def finding(self, finding: Any) -> None:
        """A tag of the run, ``hookstats.finding.<step>.<rule>.<number>``, with the severity and the sentence."""
        self._findings += 1
        key = f"hookstats.finding.{finding.step:08d}.{spell_key(finding.rule, 160)}.{self._findings}"
        text = f"{finding.severity}: {finding.sentence}"
        self._client.log_batch(self._run_id, tags=[self._tag(key, text[:_LONGEST])], synchronous=False)
