"""The sink that keeps a run: in the training process, a copy of each step into a ring, and a look at what was found.

All else is done by a process of its own (`writer`), because a Python thread beside training takes its time.
"""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing.util
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from hookstats._warn import WarnOnce
from hookstats.numbers.frame import Sites, StepFrame
from hookstats.numbers.given import Given
from hookstats.records import wire
from hookstats.records.attempts import begin_attempt, is_training, open_attempts, path_of, read_attempt
from hookstats.records.endings import Exits, ending_of
from hookstats.records.errors import RunError
from hookstats.records.findings import read_findings
from hookstats.records.parts import list_parts
from hookstats.records.places import rank_folder
from hookstats.records.ring import Ring
from hookstats.records.writing import WriterProcess
from hookstats.rules import Finding, Rule, defaults, rule_to_json, rules_of_laws

_LEAST_RING = 64 << 20
_MOST_GIVEN = 10_000  # steps of which scalars wait for room
_MANY = 128  # steps that are left out before it is said
_BEHIND_SECONDS = 9.0  # that the end waits for a writer that is far behind
_MOST_SITES = 8  # that are known at once: of totals and of channels, and what they were before something moved


class Recording:
    """Keeps a run in a directory, `hookstats.load` reads it. To be given to `attach`, see `record`."""

    _ring: Ring | None = None
    _is_open = False  # begun, and not closed
    _left: Sequence[Finding] = ()  # found at the end, when the ring is gone

    def __init__(
        self, path: Any, rules: Any, sinks: Any, ring_bytes: Any, every_rank: Any, on_finding: Any, escalate: Any
    ) -> None:
        if not isinstance(every_rank, bool):
            raise TypeError(f"every_rank: expected True or False, got {every_rank!r}")
        if ring_bytes is not None and (not isinstance(ring_bytes, int) or ring_bytes < 1 << 16):
            raise ValueError(f"ring_bytes: expected at least {1 << 16} bytes, or None; got {ring_bytes!r}")
        if on_finding not in ("log", "raise", None) and not callable(on_finding):
            raise ValueError(f"on_finding: expected 'log', 'raise', None or a callable, got {on_finding!r}")
        if not isinstance(escalate, int) or isinstance(escalate, bool) or escalate < 0:
            raise ValueError(f"escalate: expected a number of steps from 0, got {escalate!r}")
        for name, given in (("rules", rules), ("sinks", sinks)):
            if not isinstance(given, Iterable) and not (given is None and name == "rules"):
                raise TypeError(f"{name}: expected several, such as a list; got {given!r}")
        self.path = Path(path).absolute()
        self._rules = [rule_to_json(rule) for rule in (defaults() if rules is None else rules)]
        self._sinks = [_spec_of(sink) for sink in sinks]
        json.dumps([self._rules, self._sinks])  # TypeError for an argument that is nothing of JSON
        self._ring_bytes = ring_bytes
        self.every_rank = every_rank
        self.on_finding = on_finding
        self.escalate = escalate

    @property
    def has_rules(self) -> bool:
        return bool(self._rules)

    def __repr__(self) -> str:
        return f"hookstats.record({str(self.path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        """A copy has not begun: the ring, and the process that reads it, are this one's."""
        given = ("path", "_rules", "_sinks", "_ring_bytes", "every_rank", "on_finding", "escalate")
        return {name: self.__dict__[name] for name in given}

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Called by `attach`. settings: what is kept with the run, for JSON; ``rank``, an int, is among it.

        OSError where the directory cannot be written, NotADirectoryError where a file is there; RuntimeError where this
        recording was attached before, or a process that is alive records into the directory.
        """
        if self._is_open:
            raise RuntimeError(f"expected a recording for each attach, got {self!r} twice: call hookstats.record again")
        self._folder = rank_folder(self.path, settings["rank"])
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (NotADirectoryError, FileExistsError):
            found = next(each for each in [self._folder, *self._folder.parents] if each.exists())
            raise NotADirectoryError(
                f"record: expected a directory, or a path where one can be made, got {self.path}: {found} is a file"
            ) from None
        self._pid = os.getpid()
        self._stopped = False
        self._tell = WarnOnce()
        self._ring, self._left = None, ()
        self._given = Given({}, {})  # of steps that are not recorded, to be written
        self._early = Given({}, {})  # what came before there was a ring
        self._sites: dict[Sites, int] = {}
        self._sites_sent = 0
        self._findings_read = 0
        broken = [name for name, holds in settings.get("options", {}).get("laws", {}).items() if not holds]
        left_out = {rule_to_json(rules_of_laws()[name])["rule"] for name in broken}
        rules = [rule for rule in self._rules if rule["rule"] not in left_out]
        self._refuse_others()
        about = {**settings, "hookstats": _version(), "host": socket.gethostname(), "time": time.time()}
        attempt, self._lock, self._signals = begin_attempt(self._folder, about, rules)
        self._attempt, self._ring_path = attempt.attempt, Path(attempt.ring)
        reached = list_parts(self._folder).reached
        newest = max((number for number, _ in reached), default=None)  # all of its steps count
        self._before = max((last for (number, _), last in reached.items() if number == newest), default=None)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        judges = {"rules": rules, "sinks": self._sinks}
        self._writer = WriterProcess(self._folder, self._attempt, self._wake, judges, self._tell)
        self._every = settings.get("every")
        self._send_last: Callable[[], Callable[[], object] | None] = lambda: None
        self._exits = Exits()
        atexit.register(self._at_exit)
        if multiprocessing.parent_process() is not None:  # its processes end without atexit
            self._finalizer = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=100)
        self._is_open = True

    def at_exit(self, send: Callable[[], object]) -> None:
        """send: is called first where the process ends without `close`, if its object is still there then."""
        self._send_last = weakref.WeakMethod(send)

    def _refuse_others(self) -> None:
        for number in open_attempts(self._folder):
            other = None
            with suppress(OSError, RunError):
                other = read_attempt(self._folder, number)
            if is_training(self._folder, number, other):
                who = f"process {other.pid}" if other else "another process"
                raise RuntimeError(
                    f"record: expected a directory that nobody records into, but {who} records into {self.path}: "
                    "detach its monitor, or choose another directory"
                )

    def _warn_hidden(self, first: int) -> None:
        """Say at the first step of this attempt which steps of earlier ones it hides."""
        before, self._before = self._before, None
        if before is not None and before >= first:
            self._tell(
                "hidden",
                f"attempt {self._attempt} in {self.path} begins at step {first}: of the steps up to {before}, recorded "
                f"there before, those from {first} on no longer count; to keep two runs apart, record each into a "
                "directory of its own",
            )

    def take(self, frame: StepFrame) -> None:
        """Keeps a step. Never raises: what fails is told once, and recording ends."""
        self._try(lambda: self._take(frame))

    def take_given(self, given: Given) -> None:
        """Keeps that of steps that were not measured and come without one that was. Never raises, as `take`."""
        self._try(lambda: self._take_given(given))

    def take_early(self, given: Given) -> None:
        """Keeps scalars now that a measured step is to bring once more: none may come. Never raises.

        Before the first measured step nobody knows how large the ring is to be: they wait for that.
        """
        self._early.add(given, _MOST_GIVEN)
        ring = self._ring
        if ring is not None:
            self._try(lambda: self._send_early(ring))

    def _send_early(self, ring: Ring) -> None:
        """Send scalars early. If there is no room, a step brings them. The writer is not woken for so little."""
        self._exits.forget()
        for step, named in self._early.scalars.items():  # each in a record of its own, whose room is free when it came
            ring.write(wire.EARLY, wire.encode_given(Given({step: named}, {}), time.time()), is_step=True)
        self._early = Given({}, {})

    def _try(self, take: Callable[[], None]) -> None:
        if os.getpid() != self._pid:
            self._tell(
                "fork",
                f"nothing of process {os.getpid()} is recorded into {self.path}: it was forked from process "
                f"{self._pid}, which alone records there; attach with a recording of its own in a process that trains",
            )
        if self._is_over():
            return
        try:
            take()
        except Exception as error:
            self._stop(f"{error!r}")

    def _take_given(self, given: Given) -> None:
        """Take what came with steps that are not measured; it waits where the ring has no room."""
        self._given.add(given, _MOST_GIVEN)
        self._send_given(self._open_ring(wire.encode_given(self._given, 0.0)))
        os.eventfd_write(self._wake, 1)

    def _send_given(self, ring: Ring) -> None:
        if ring.write(wire.GIVEN, wire.encode_given(self._given, time.time())):
            self._given = Given({}, {})

    def _open_ring(self, pieces: Sequence[NDArray[Any]]) -> Ring:
        """Return the ring, with room for several of the first records, and make sure that a writer reads it."""
        if self._ring is None:
            length = sum(piece.nbytes for piece in pieces)
            self._ring = Ring.create(self._ring_path, self._ring_bytes or max(_LEAST_RING, 4 * length))
        self._writer.look_after(self._ring)
        return self._ring

    def _take(self, frame: StepFrame) -> None:
        self._exits.forget()
        self._warn_hidden(min([frame.step, *frame.earlier_scalars]))
        number = self._sites.get(frame.sites, self._sites_sent)
        pieces = wire.encode_step(frame, number, is_first=number == self._sites_sent)
        length = sum(piece.nbytes for piece in pieces)
        ring = self._open_ring(pieces)
        self._send_early(ring)
        if not ring.fits(length):
            self._drop(ring, frame, f"a step of {length} bytes is too large for it: pass ring_bytes={4 * length}")
        else:
            if any(self._given):  # of steps that were dropped before this one
                self._send_given(ring)
            if ring.write(wire.STEP, pieces, is_step=True):
                self._note_sent(frame.sites)
            else:
                self._drop(ring, frame)
        os.eventfd_write(self._wake, 1)

    def _note_sent(self, sites: Sites) -> None:
        """Note that the writer knows these sites."""
        if sites not in self._sites:
            self._sites[sites] = self._sites_sent
            self._sites_sent += 1
            if len(self._sites) > _MOST_SITES:
                del self._sites[next(iter(self._sites))]

    def _drop(self, ring: Ring, frame: StepFrame, why: str | None = None) -> None:
        """Leave a step out, but keep what was given with it. why: None if the writer falls behind."""
        ring.dropped += 1
        scalars = {**frame.earlier_scalars, frame.step: frame.scalars}
        self._given.add(Given(scalars, frame.sample_ids), _MOST_GIVEN)
        if why is not None:
            self._tell("drop", f"a step is not recorded, the ring of {ring.capacity} bytes cannot take it: {why}")
        elif ring.dropped == _MANY:
            self._warn_behind(ring)

    def _warn_behind(self, ring: Ring) -> None:
        """Say how many steps come while one is written."""
        several = math.ceil((ring.written + ring.dropped) / max(ring.judged, 1))
        every = max(several, 2) * (self._every if isinstance(self._every, int) else 1)
        self._tell(
            "behind",
            f"the writer of {self.path} falls behind: steps come faster than they are written, and those that find no "
            f"room are left out; attach(every={every}) is advised, or more ring_bytes for a burst",
        )

    def findings(self) -> list[Finding]:
        """Return what the rules have found since the last call; one look at a word of memory if that is nothing."""
        ring = self._ring
        if ring is None or self._is_over():
            left, self._left = self._left, ()
            return list(left)
        if ring.failed:
            self._stop(ring.failure)
        return self._read_findings(ring)

    def _read_findings(self, ring: Ring) -> list[Finding]:
        """Read findings of this attempt. The file has earlier ones, too, on which their processes have acted."""
        if ring.findings <= self._findings_read:
            return []
        try:
            found, self._findings_read = read_findings(self._folder, self._findings_read)
        except OSError as error:
            self._stop(f"{error!r}")
            return []
        return [finding for finding in found if finding.attempt == self._attempt]

    def wait(self, timeout: float) -> None:
        """Wait until all that was taken is judged. TimeoutError; RuntimeError if recording has stopped."""
        ring = self._ring
        if ring is not None and os.getpid() != self._pid:  # its memory is not mapped in a process that was forked
            raise RuntimeError(f"expected process {self._pid}, which records into {self.path}, got {os.getpid()}")
        if ring is not None and not self._reaches(ring, "judged", ring.written, timeout, 0.002):
            raise RuntimeError(f"expected a verdict on every closed step, but the recording of {self.path} stopped")

    def wait_until_written(self, timeout: float) -> Path:
        """Return the run's directory as soon as all that was taken is in its tables. TimeoutError.

        Where recording has stopped, what came before is there.
        """
        ring = self._ring
        if ring is not None and not self._is_over():
            ring.wanted = ring.head  # else it is written later
            self._reaches(ring, "committed", ring.head, timeout, 0.02)
        return self.path

    def _reaches(self, ring: Ring, word: str, value: int, timeout: float, pause: float) -> bool:
        """Wait until a word of the ring is as large. False: recording has stopped. TimeoutError."""
        end = time.monotonic() + timeout
        if not self._is_over():
            os.eventfd_write(self._wake, 1)
        while getattr(ring, word) < value:
            if self._is_over() or not self._look_after(ring):
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"{self.path}: expected all steps to be {word} within {timeout:.1f} s; some are not")
            time.sleep(pause)
        return True

    def close(
        self, overhead: Mapping[str, float] | None = None, error: BaseException | None = None, timeout: float = 60
    ) -> None:
        """Ends the recording: when it returns, everything is in the directory. A warning where that takes longer.

        It takes at most 10 seconds where steps were dropped, because the writer is far behind then; it goes on by
        itself, and what was taken is not lost.

        overhead: in microseconds, what `Monitor.overhead` says; it is kept with the run. error: which ended training.
        """
        if not self._is_open or os.getpid() != self._pid:
            return
        if not self._stopped:
            if self._ring is None:
                path_of(self._folder, self._attempt).unlink(missing_ok=True)
            else:
                self._finish(self._ring, overhead, ending_of(error), timeout)
        self._stopped, self._is_open = True, False
        atexit.unregister(self._at_exit)
        self._exits.close()
        self._signals.end()
        os.close(self._wake)
        self._lock.close()
        self._writer.wait(0)

    def _finish(self, ring: Ring, overhead: Mapping[str, float] | None, ending: str, timeout: float) -> None:
        if any(self._given):
            self._send_given(ring)
        if ring.dropped:
            self._warn_behind(ring)
        if overhead is not None:
            ring.write(wire.OVERHEAD, wire.encode_overhead(overhead))
        self._end_recording(ending)
        if ring.dropped:
            timeout = min(timeout, _BEHIND_SECONDS)
        end = time.monotonic() + timeout
        while self._ring_path.exists():
            if not self._look_after(ring):
                break
            if time.monotonic() > end:
                self._tell("close", f"after {timeout:.0f} s the writer of {self.path} has not ended; it goes on")
                break
            self._writer.wait(0.02)
        else:
            self._writer.wait(5)
            if self._writer.returncode:
                self._stop(ring.failure or f"its writer ended with {self._writer.returncode}")
        self._left = self._read_findings(ring)
        if not self._stopped:
            self._ring = None  # its file is gone, and now its room on the disk, too

    def _look_after(self, ring: Ring) -> bool:
        """Look after the writer. False: recording has stopped."""
        try:
            self._writer.look_after(ring)
        except Exception as error:
            self._stop(f"{error!r}")
            return False
        return True

    def _at_exit(self) -> None:
        """End the recording of a script that has not detached its monitor."""
        if self._is_over():
            return
        send = self._send_last()
        if send is not None:
            with suppress(Exception):  # a device that has failed
                send()
        if self._ring is None:
            self._tell(
                "nothing",
                f"nothing is recorded into {self.path}: monitor.step() was never called, or no step that it measured "
                "has arrived; call it at the end of each training step, and monitor.detach() at the end of training",
            )
        self._end_recording(self._exits.describe_ending())
        self._signals.end()
        self._stopped = True

    def _end_recording(self, ending: str) -> None:
        """No further step will come: the writer ends when the ring is empty."""
        if self._ring is not None and os.getpid() == self._pid and not self._ring.failed:
            self._ring.close(ending)
            os.eventfd_write(self._wake, 1)

    def _is_over(self) -> bool:
        return self._stopped or os.getpid() != self._pid

    def _stop(self, why: str) -> None:
        self._stopped = True
        with suppress(OSError):
            self._end_recording("closed: recording stopped before training did")
        self._tell("stop", f"recording into {self.path} stopped, training goes on: {why}")


def _version() -> str | None:
    try:
        return version("hookstats")
    except PackageNotFoundError:  # it stands in a folder that was not installed
        return None


def _spec_of(sink: Any) -> dict[str, Any]:
    if not hasattr(sink, "spec"):
        raise TypeError(
            f"record: sinks: expected file sinks of hookstats.sinks, which the writer process can make again, got "
            f"{sink!r}; give other callables to attach(sinks=[...])"
        )
    spec: dict[str, Any] = sink.spec()
    return spec


def record(
    path: str | os.PathLike[str],
    *,
    rules: Iterable[Rule | str] | None = None,
    sinks: Iterable[Any] = (),
    ring_bytes: int | None = None,
    every_rank: bool = False,
    on_finding: Callable[[Finding], object] | str | None = "log",
    escalate: int = 0,
) -> Recording:
    """Keeps every measured step in a directory, and judges it: ``attach(model, sinks=[hookstats.record("runs/a")])``.

    The training process copies each step into a file that it maps; a process of its own (without torch, at the lowest
    priority) writes Parquet, feeds `sinks`, and applies the rules. What was copied survives the death of either and of
    both (`hookstats.recover`). Where the disk is full, read-only or gone, one warning says so, recording stops, and
    training goes on. A directory that holds a run already gets a new attempt of it: a run that was resumed.

    Args:
        path: of the run, ``rank=0/`` and so on are made in it.
        rules: objects of `hookstats.rules`, and names ``"module:function"`` of one's own; None: the default ones.
        sinks: file sinks of `hookstats.sinks`, that process feeds them. Others belong in ``attach(sinks=...)``.
        ring_bytes: room for steps on their way, on disk; a step that finds none is dropped and counted. None: 64 MB, or
            four times the first step.
        every_rank: with ``attach(process_group=...)``. False: the first rank keeps what all ranks have together. True:
            every rank keeps its own steps, in a folder of its own; ``hookstats.load(path, ranks="merged")`` merges them
            afterwards. Without a process_group, every process keeps its own.
        on_finding: what is done with what the rules find (``monitor.findings``), within two steps after it was found:
            "log" writes its sentence to the logger "hookstats"; "raise" does, too, and raises `FindingError` out of
            `Monitor.step` for what is critical; a callable is called with each Finding; None does nothing. Of several
            recordings, each acts on its own findings.
        escalate: after a finding of severity warning or critical, the next `escalate` steps are all measured, with
            channels and histograms. No program is compiled anew for it.

    Raises:
        ImportError: without pyarrow. TypeError, ValueError: for other rules, sinks, ring_bytes, on_finding or escalate.
    """
    return Recording(path, rules, sinks, ring_bytes, every_rank, on_finding, escalate)
