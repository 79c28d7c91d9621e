"""TensorBoard: event files, by tensorboard's own writer; needs neither torch nor TensorFlow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hookstats.numbers.snapshot import Snapshot
from hookstats.sinks.adapter import FileSink, package_of
from hookstats.sinks.keys import DEFAULT_STATISTICS, PREFIX, Keys, spell_key


class TensorBoard(FileSink):
    """Writes an event for each snapshot, with its step: ``hookstats/<tensor>/<statistic>/<name>``, as float32.

    TensorBoard reads histograms as float32, too: counts beyond 2^24 are not exact there.

    ``statistics``, ``sites`` and ``histograms`` are those of `JsonLines`, which says what is sent by default.

    Args:
        directory: where the event files are made. One of its own, and one for each rank: of several files in a
            directory TensorBoard follows the newest. "s3://" and the like go to tensorboard as they are.

    Raises:
        ImportError: without tensorboard.
        TypeError, ValueError, OSError: as `JsonLines`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        statistics: str | Iterable[str] = DEFAULT_STATISTICS,
        sites: str | Iterable[str] | None = None,
        histograms: bool = False,
    ) -> None:
        writing = package_of("TensorBoard", "tensorboard.summary.writer.event_file_writer")
        event, self._summary, tensor, types = (
            package_of("TensorBoard", f"tensorboard.compat.proto.{name}_pb2")
            for name in ("event", "summary", "tensor", "types")
        )
        text = package_of("TensorBoard", "tensorboard.plugins.text.metadata")
        self._keys = Keys("TensorBoard", statistics, sites, histograms)
        self._directory = os.fspath(directory)
        if "://" not in self._directory:
            self._directory = str(Path(directory).absolute())
            Path(directory).mkdir(parents=True, exist_ok=True)
        self._place = {"directory": self._directory}
        self._new_writer, self._event = writing.EventFileWriter, event.Event
        self._tensor, self._string = tensor.TensorProto, types.DT_STRING
        self._text = text.create_summary_metadata(display_name="", description="")
        self._writer: Any = None

    def __call__(self, snapshot: Snapshot) -> None:
        values = self._keys.values(snapshot)
        del values["step"]
        event = self._event(step=snapshot.step, wall_time=time.time())
        for key, value in values.items():
            event.summary.value.add(tag=PREFIX + key, simple_value=value)
        for key, bars in self._keys.histograms(snapshot).items():
            histogram = self._summary.HistogramProto(
                min=bars.edges[0],
                max=bars.edges[-1],
                num=bars.counts.sum(),
                sum=bars.sum,
                sum_squares=bars.square_sum,
                bucket_limit=bars.edges[1:].tolist(),
                bucket=bars.counts.tolist(),
            )
            event.summary.value.add(tag=PREFIX + key, histo=histogram)
        self._write(event)

    def finding(self, finding: Any) -> None:
        """A text, with the step that it is about, under ``hookstats/findings/<rule>``."""
        event = self._event(step=finding.step, wall_time=time.time())
        text = self._tensor(dtype=self._string, string_val=[f"**{finding.severity}**: {finding.sentence}".encode()])
        text.tensor_shape.dim.add(size=1)
        event.summary.value.add(
            tag=f"{PREFIX}findings/{spell_key(finding.rule, 160)}", tensor=text, metadata=self._text
        )
        self._write(event)

    def _write(self, event: Any) -> None:
        if self._writer is None:  # not before: the process that writes may be another one, see spec()
            self._writer = self._new_writer(self._directory)
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file; another snapshot begins a new one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
