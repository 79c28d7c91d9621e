"""Acts on what recordings find while training goes on: tells, raises, looks more closely."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from hookstats._warn import WarnOnce
from hookstats.numbers.frame import StepFrame
from hookstats.numbers.given import Given

_log = logging.getLogger("hookstats")
_LEVELS = {"note": logging.INFO, "warning": logging.WARNING, "critical": logging.ERROR}
_NOTES_EVERY = 1000  # steps, after which notes are summed up at a level that is heard by default


OnFinding: TypeAlias = Callable[[Any], object] | str | None


@runtime_checkable
class Recorder(Protocol):
    """A sink that is given steps as they left the device, and may judge them: `records.recording.Recording` does.

    ``every_rank``: with a process group, whether every rank gives it its own steps; else the first rank gives it those
    of all ranks together. ``has_rules``: whether it judges. ``on_finding``: what is done with what it finds: "log",
    "raise", a callable, or None. ``escalate``: how many steps are measured in full after a finding.
    """

    @property
    def every_rank(self) -> bool: ...

    @property
    def has_rules(self) -> bool: ...

    @property
    def on_finding(self) -> OnFinding: ...

    @property
    def escalate(self) -> int: ...

    def begin(self, settings: dict[str, Any]) -> None:
        """Begin to judge, at attach. May raise."""

    def take(self, frame: StepFrame) -> None: ...

    def take_given(self, given: Given) -> None:
        """Take what came with steps that were not measured, by number: those after the last measured one, or many."""

    def take_early(self, given: Given) -> None:
        """Scalars of a step that was not measured: the next measured one brings them again, if one comes."""

    def at_exit(self, send: Callable[[], object]) -> None:
        """send: is to be called first where the process ends without `close`."""

    def findings(self) -> Sequence[Any]:
        """Return those that came since the last call, each like `hookstats.results.Finding`; called in every step."""

    def wait(self, timeout: float) -> None:
        """Wait until all that was taken is judged; TimeoutError."""

    def close(self, overhead: Mapping[str, float], error: BaseException | None) -> None:
        """Close the judge, at detach. overhead: what `Monitor.overhead` says; error: the one that ended training."""


@runtime_checkable
class Keeper(Protocol):
    """A recorder that keeps steps in a directory."""

    def wait_until_written(self, timeout: float) -> Path:
        """The directory, when all that was taken can be read there. TimeoutError."""


class FindingError(RuntimeError):
    """Raised out of `Monitor.step` with ``on_finding="raise"``. ``findings``: those that are critical."""

    def __init__(self, findings: Sequence[Any]) -> None:
        super().__init__("; ".join(map(str, findings)))
        self.findings = list(findings)


class Judging:
    """The verdicts of a monitor's recorders."""

    def __init__(self, recorders: Sequence[Recorder], sinks: Sequence[Any], warn_once: WarnOnce, strict: bool) -> None:
        """sinks: of which those that have a method ``finding`` are told of each."""
        self.findings: list[Any] = []
        self._recorders = recorders
        self._told = [sink for sink in sinks if callable(getattr(sink, "finding", None))]
        self._warn_once = warn_once
        self._strict = strict
        self._until = -1  # the last step that is looked at more closely
        self._new: list[tuple[Any, OnFinding]] = []  # not acted on yet, with what its recorder wants
        self._notes: list[Any] = []  # that were logged where nobody may have heard them, since the last sum
        self._sum_up_at = _NOTES_EVERY
        self._is_closed = False

    def look(self, step: int) -> bool:
        """Takes what has been found; step: the one that begins. Returns whether anything is worse than a note."""
        is_serious = False
        if step >= self._sum_up_at:
            self._sum_up_at = step + _NOTES_EVERY
            self._sum_up()
        for recorder in self._recorders:
            found = recorder.findings()
            if found:
                self._new += [(finding, recorder.on_finding) for finding in found]
                if any(finding.severity != "note" for finding in found):
                    is_serious = True
                    self._until = max(self._until, step + recorder.escalate - 1)
        return is_serious

    def is_escalated(self, step: int) -> bool:
        """Tell whether a step is measured for what was found, with all channels."""
        return step <= self._until

    def act(self) -> None:
        """Tells what is news, and logs the rest at a level that is not heard by default. FindingError if asked for."""
        try:
            self._act()
        finally:
            if self._is_closed:
                self._sum_up()

    def _act(self) -> None:
        new, self._new = self._new, []
        self.findings += [finding for finding, _ in new]
        for finding, on_finding in new:
            if not finding.is_news:
                if on_finding is not None and not callable(on_finding):
                    _log.info("%s", finding)
                continue
            for sink in self._told:
                self._call(sink.finding, finding, f"the sink {sink!r}")
            if callable(on_finding):
                self._call(on_finding, finding, f"on_finding={on_finding!r}")
            elif on_finding is not None:
                _log.log(_LEVELS[finding.severity], "%s", finding)
                if finding.severity == "note":
                    self._notes.append(finding)
        fatal = [finding for finding, on_finding in new if on_finding == "raise" and finding.severity == "critical"]
        if fatal:
            raise FindingError(fatal)

    def _sum_up(self) -> None:
        """Says how many notes there were since the last time, and the first of them that stands for itself."""
        notes, self._notes = self._notes, []
        if notes:
            first = next((each for each in notes if getattr(each, "because", None) is None), notes[0])
            count = f"{len(notes)} new notes" if len(notes) > 1 else "a new note"
            _log.warning("%s in monitor.findings, such as: %s", count, first)

    def _call(self, tell: Callable[[Any], object], finding: Any, who: str) -> None:
        try:
            tell(finding)
        except Exception as error:
            if self._strict:
                raise
            self._warn_once(("finding", who), f"{who} failed: {error!r}, given: {finding}")

    def wait(self, timeout: float) -> None:
        for recorder in self._recorders:
            recorder.wait(timeout)

    def wait_until_written(self, timeout: float) -> Path:
        """Return the directory of the first `Keeper`; ValueError where there is none."""
        for recorder in self._recorders:
            if isinstance(recorder, Keeper):
                return recorder.wait_until_written(timeout)
        raise ValueError(
            "expected a monitor of a process that records, attach(model, sinks=[hookstats.record('runs/a')]); "
            "got one whose sinks keep nothing in a directory"
        )

    def close(self, step: int, overhead: Callable[[], Mapping[str, float]], error: BaseException | None) -> None:
        """Ends all recordings, and takes what they found at the end."""
        for recorder in self._recorders:
            try:
                recorder.close(overhead(), error)
            except Exception as error:
                self._warn_once(("close", id(recorder)), f"{recorder!r} could not be closed: {error!r}")
        self.look(step)
        self._is_closed = True
