"""The process that writes: from the ring to Parquet, findings and file sinks. It imports no torch.

Run as ``python -m hookstats.records.writer FOLDER ATTEMPT WAKE JUDGES`` by the training process, which it outlives
until the ring is empty. Whatever ends it, the next one goes on: a part counts, and its room in the ring is free, from
the moment the manifest names it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hookstats.numbers.frame import Sites, StepFrame
from hookstats.numbers.given import Given
from hookstats.numbers.snapshot import Snapshot
from hookstats.records import wire
from hookstats.records.errors import RunError
from hookstats.records.files import NO_LINK, write_whole
from hookstats.records.places import (
    RING,
    described,
    descriptions,
    is_of_this_machine,
    is_training,
    is_watched,
    no_run,
    ring_of,
)
from hookstats.records.ring import CLOSED, Ring, RingError
from hookstats.records.run import Run
from hookstats.records.store import Store
from hookstats.rules import Finding, Function, Judge, Rule, is_ours, rule_from_json
from hookstats.sinks import from_spec

PART_BYTES = 64 << 20
PART_SECONDS = 10.0
WATCHED_SECONDS = 2.0  # the same while somebody looks
_LOCK_SECONDS = 120.0
KNOWN_SITES = 8
_MOST_WAITING = 10_000  # steps, what was given with which waits for a measured one, with which the rules see them
_FIRST, _LAST = 10, 200  # recorded steps from which the rules' windows are made again
_REMEMBERED = "rules.json"  # what the rules remember of the attempts that have ended, beside what these have recorded


class Attempt:
    """One training process's ring, and where what is in it goes."""

    def __init__(self, store: Store, folder: Path, path: Path, judges: Mapping[str, Any] | None = None) -> None:
        """path: of what the training process left to be known.

        judges: ``rules`` and ``sinks`` as the training process said; None: it is dead, and what stands in a file is
        not trusted to name code that is run, or other files that are written: only our own rules judge.
        ValueError, OSError where there is nothing to do.
        """
        told = described(path)
        is_left = judges is None
        if judges is None:
            judges = {"rules": [rule for rule in told.rules if is_ours(rule)], "sinks": []}
        self._description = path
        self._folder = folder
        self.number = told.attempt
        self.pid = told.pid
        self._told_of = told
        if not is_of_this_machine(told):
            raise ValueError(f"{path}: expected a ring of this machine, got one of {told.host}: recover it there")
        self.ring_path = ring_of(folder, self.number, told.ring)
        if not self.ring_path.exists() and self.is_training():
            raise RuntimeError(
                f"{folder}: expected that training has ended, but process {self.pid} will record into it"
            )
        self.ring = Ring(self.ring_path)
        self._store = store
        self._sites_path = folder / f"{RING}{self.number:04d}.sites"
        self.is_finished = store.ended(self.number)
        if self.is_finished:
            return
        store.begin(self.number, told.settings)
        self._sites = KnownSites(self._sites_path)
        self._position = max(self.ring.tail, store.consumed(self.number))
        self.ring.tail = self._position
        self._sinks = [from_spec(spec) for spec in judges["sinks"]]
        self._rank = told.settings["rank"]
        try:
            rules = [rule_from_json(rule) for rule in judges["rules"]]
        except ValueError as error:
            raise RunError(f"{path}: {error}") if is_left else error from None
        self._judge = _judge_after(folder, rules, self._rank, self.number)
        self._findings = Findings(folder / "findings.jsonl")
        self._judged = self.ring.judged  # what was found in these is told already
        self.ring.findings = self._findings.size
        self._waiting = Given({}, {})  # what the rules have not seen
        self._last: int | None = None  # the last step that was judged
        self._told: dict[str, Any] = {}  # at the end, for the settings
        self._since: float | None = None  # when the first step came that is not committed

    def is_training(self) -> bool:
        """Whether the process that fills the ring is alive."""
        return is_training(self._description, self._told_of)

    def serve(self) -> bool:
        """What cannot wait. False: there was nothing to read."""
        came = self.read()
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        if waited > PART_SECONDS or (waited > WATCHED_SECONDS and is_watched(self._folder)):
            self.commit()
        return came

    def read(self) -> bool:
        """Takes what there is. False: there was nothing."""
        came = False
        for record in self.ring.read(self._position):
            came = True
            if record.kind == wire.SITES:
                self._sites.add(record.payload.tobytes())
            elif record.kind == wire.OVERHEAD:
                self._told["overhead"] = wire.overhead_from(record.payload.tobytes())
            elif record.kind == wire.GIVEN:
                self._take_given(*wire.given_from(record.payload))
            else:
                self._take(record.number, wire.step_from(record.payload, self._sites.known))
            self._position = record.end
            self.ring.judged = max(self.ring.judged, record.number + 1)
            if self._store.size >= PART_BYTES or self._position - self.ring.tail > self.ring.capacity // 3:
                self.commit()
        return came

    def _take(self, number: int, frame: StepFrame) -> None:
        """A step that an earlier writer had taken, but not committed, is not told once more."""
        if self._since is None:
            self._since = time.monotonic()
        found = [replace(each, rank=self._rank, attempt=self.number) for each in self._judged_now(frame)]
        self._last = frame.step
        if number >= self.ring.fed:
            self.ring.fed = number + 1
            found += self._feed(frame, found)
        if number >= self._judged:
            self.ring.findings = self._findings.add(found)
        self._store.add(frame)

    def _judged_now(self, frame: StepFrame) -> list[Finding]:
        """With what was given, and came without a step, since the one before."""
        own = Given(frame.earlier_scalars, frame.sample_ids)
        frame.earlier_scalars = {**self._waiting.scalars, **own.scalars}
        frame.sample_ids = {**self._waiting.sample_ids, **own.sample_ids}
        self._waiting = Given({}, {})
        try:
            return self._judge.judge(frame)
        finally:
            frame.earlier_scalars, frame.sample_ids = own

    def _take_given(self, given: Given, when: float) -> None:
        if self._since is None:
            self._since = time.monotonic()
        self._store.add_given(given, when)
        self._waiting.add(given, _MOST_WAITING)

    def _feed(self, frame: StepFrame, found: list[Finding]) -> list[Finding]:
        """Gives it to the sinks, and what was found in it."""
        failed = []
        for sink in list(self._sinks):
            try:
                sink(Snapshot(frame))
                for each in found:
                    if each.is_news:
                        sink.finding(each)
            except Exception as error:
                self._sinks.remove(sink)
                sentence = f"the sink {sink!r} failed and gets nothing more: {error!r}"
                failed.append(Finding("sink", frame.step, None, 1.0, 0.0, "warning", sentence, self._rank, self.number))
        return failed

    def commit(self) -> None:
        """From here on what was taken is the record's, and its room the ring's."""
        if self._position == self.ring.tail:
            return
        self._sites.keep()
        self._store.commit(self._position)
        self.ring.tail = self._position
        self._since = None

    def finish(self, how: str | None = None) -> None:
        """Nothing more comes: the ring is empty and is taken away."""
        self.commit()
        for sink in self._sinks:
            with suppress(Exception):
                sink.close()
        ended = how or ("closed" if self.ring.closed == CLOSED else "died")
        self._store.finish(self.number, ended, self.ring.dropped, self._told)
        if self._last is not None:
            with suppress(OSError, TypeError):  # a full disk, or what is no memory
                kept = {"step": self._last, "state": self._judge.state()}
                write_whole(self._folder / _REMEMBERED, json.dumps(kept).encode())
        self.tidy()

    def tidy(self) -> None:
        """Takes the ring away."""
        for path in (self._sites_path, self.ring_path, self._description):
            path.unlink(missing_ok=True)


class KnownSites:
    """Those that steps in the ring refer to, also where their own records have left it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[int, Sites] = {}
        self._texts: dict[int, str] = {}
        self._is_kept = True
        if path.exists():
            for text in path.read_bytes().splitlines():
                self.add(text)

    def add(self, text: bytes) -> None:
        number, self.known[number] = wire.sites_from(text)
        self._texts[number] = text.decode().strip()
        self._is_kept = False
        if len(self.known) > 2 * KNOWN_SITES:
            oldest = min(self.known)
            del self.known[oldest], self._texts[oldest]

    def keep(self) -> None:
        if not self._is_kept:
            write_whole(self.path, "".join(f"{text}\n" for text in self._texts.values()).encode())
            self._is_kept = True


class Findings:
    """A file to which what was found is appended, a line each; the same line of an attempt once."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | NO_LINK, 0o666)
        self._file = open(descriptor, "ab+")  # noqa: SIM115, for as long as this process lives
        self._file.seek(0)
        text = self._file.read()
        self._file.truncate(text.rfind(b"\n") + 1)  # a line that is torn
        self._lines = set(text.splitlines())
        self.size = self._file.seek(0, os.SEEK_END)

    def add(self, found: list[Finding]) -> int:
        """The size of the file, which is that of whole lines."""
        lines = [json.dumps(finding.to_json()).encode() for finding in found]
        new = [line for line in lines if line not in self._lines]
        if new:
            self._lines.update(new)
            self._file.write(b"".join(line + b"\n" for line in new))
            self._file.flush()
            self.size = self._file.tell()
        return self.size


@contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """One process at a time writes into a folder. TimeoutError where another one does for so long."""
    with open(os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | NO_LINK, 0o666), "w") as file:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"{folder}: expected that nobody writes there, but another process does"
                    ) from None
                time.sleep(0.05)
        yield


def _judge_after(folder: Path, rules: Sequence[Rule | Function], rank: int, attempt: int) -> Judge:
    """One that goes on where that of the attempt before ended; where this is not known, from what was recorded."""
    judge = Judge(rules, rank, attempt)
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads((folder / _REMEMBERED).read_bytes())
        if Run(folder, None, None, None).steps[-1:] == [kept["step"]] and judge.restore(kept["state"]):
            return judge
        judge = Judge(rules, rank, attempt)
    judge.rebuild(_past(folder))
    return judge


def _past(folder: Path) -> Run:
    """The first steps that were recorded, from which some rules learn what is usual, and the last."""
    steps = Run(folder, None, None, None).steps
    return Run(folder, None, steps[:_FIRST] + steps[_FIRST:][-_LAST:], None)


def drain_left(store: Store, folder: Path, before: int | None = None) -> list[int]:
    """Takes up what is left in the rings of attempts that died, of those before a number. Their numbers.

    RuntimeError where the training process of one is alive; ValueError where its ring is on another machine.
    """
    done = []
    for number, path in descriptions(folder).items():
        if before is not None and number >= before:
            break
        try:
            attempt = Attempt(store, folder, path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)  # it died before its first step
            continue
        except RunError:
            if (path.exists() and path.stat().st_size) or path.with_suffix("").exists():
                raise
            path.unlink(missing_ok=True)  # it died before it had described itself
            continue
        if attempt.is_finished:  # whoever finished it died before it was tidy
            attempt.tidy()
            continue
        if attempt.is_training():
            raise RuntimeError(f"{folder}: expected that training has ended, but process {attempt.pid} records into it")
        try:
            while attempt.read():
                pass
            attempt.finish()
        except RingError as error:  # after a power failure: what lies behind cannot be found
            print(f"{attempt.ring_path}: {error}", file=sys.stderr)
            shutil.copyfile(attempt.ring_path, folder / f"torn.{number:04d}")
            attempt.finish("torn")
        done.append(number)
    return done


def recover(path: str | os.PathLike[str]) -> dict[str, list[int]]:
    """Writes what is left of a run whose training and writer both died: what had been copied into its rings.

    To be called where the run was recorded, when training has ended. Returns, for each rank's folder, the attempts that
    something was left of. RuntimeError where training still runs, TimeoutError where another process writes.
    """
    folders = sorted(folder for folder in Path(path).glob("rank=*") if folder.is_dir())
    if not folders:
        raise ValueError(no_run(Path(path)))
    found = {}
    for folder in folders:
        with locked(folder, 2.0):
            store = Store(folder)
            found[folder.name] = drain_left(store, folder)
            store.close()
    return found


def run(folder: Path, number: int, wake: int, judges: Mapping[str, Any]) -> None:
    """Until the training process has ended, and its ring is empty."""
    path = descriptions(folder)[number]
    ring = Ring(Path(described(path).ring))
    try:
        with locked(folder, _LOCK_SECONDS):
            store = Store(folder)
            try:
                drain_left(store, folder, number)
            except ValueError as error:  # of another machine, where it can be recovered
                print(error, file=sys.stderr)
                store.close()
                store = Store(folder)
            attempt = Attempt(store, folder, path, judges)
            if attempt.is_finished:
                attempt.tidy()
            else:
                _follow(attempt, store, wake)
            while store.merge():
                pass
            store.close()
    except BaseException as error:
        ring.fail(f"{type(error).__name__}: {error}")
        raise


def _follow(attempt: Attempt, store: Store, wake: int) -> None:
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    with suppress(OSError, AttributeError):  # a kernel without it: the parent is looked at each second
        poll.register(os.pidfd_open(attempt.pid), select.POLLIN)
    while True:
        is_over = bool(attempt.ring.closed) or os.getppid() != attempt.pid  # before what it had written is read
        came = attempt.serve()
        if is_over and not came:
            return attempt.finish()
        if not store.merge(attempt.serve) and not came:
            poll.poll(1000)
            with suppress(BlockingIOError):
                os.eventfd_read(wake)


def main() -> None:
    os.nice(19)
    folder, number, wake, judges = sys.argv[1:]
    run(Path(folder), int(number), int(wake), json.loads(judges))


if __name__ == "__main__":
    main()
