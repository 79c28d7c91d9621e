"""The process that writes: from the ring to Parquet, findings and file sinks. It imports no torch.

It is started by the training process, which it outlives until the ring is empty. Whatever ends it, the next one goes
on: a step counts, and its room in the ring is free, from the moment the file with its row of `steps` has its name.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hookstats._locks import Lock
from hookstats._warn import warn
from hookstats.numbers.frame import Sites, StepFrame
from hookstats.numbers.given import Given
from hookstats.numbers.snapshot import Snapshot
from hookstats.records import wire
from hookstats.records.attempts import Attempt, is_training, open_attempts, path_of, read_attempt
from hookstats.records.endings import describe_death
from hookstats.records.errors import Damaged
from hookstats.records.files import DAMAGED, NO_LINK, read_json, write_json, write_whole
from hookstats.records.findings import Findings
from hookstats.records.places import RING, explain_missing_run, ring_of
from hookstats.records.ring import Ring, RingError
from hookstats.records.store import Store
from hookstats.rules import Finding, Function, Judge, Rule, is_ours, rule_from_json
from hookstats.sinks import from_spec

PART_BYTES = 64 << 20
PART_SECONDS = 10.0
_LOCK_SECONDS = 120.0
KNOWN_SITES = 16  # twice as many as a recording refers to
_MOST_WAITING = 10_000  # steps, what was given with which waits for a measured one, with which the rules see them
_REMEMBERED = "rules.json"  # what the rules remember


class Intake:
    """A training process's ring, and where what is in it goes."""

    def __init__(self, store: Store, folder: Path, attempt: Attempt, judges: Mapping[str, Any] | None = None) -> None:
        """judges: ``rules`` and ``sinks`` as the training process said; None: it is dead, and what stands in a file is
        not trusted to name code that is run, or other files that are written: only our own rules judge.

        ValueError, OSError where there is nothing to do.
        """
        if judges is None:
            judges = {"rules": [rule for rule in attempt.rules if is_ours(rule)], "sinks": []}
        if attempt.host and not attempt.is_of_this_machine:
            path = path_of(folder, attempt.attempt)
            raise ValueError(f"{path}: expected a ring of this machine, got one of {attempt.host}: recover it there")
        self._folder = folder
        self.attempt = attempt
        self.ring_path = ring_of(folder, attempt.attempt, attempt.ring)
        if not self.ring_path.exists() and self.is_training():
            raise RuntimeError(
                f"{folder}: expected that training has ended, but process {attempt.pid} will record into it"
            )
        self.ring = Ring(self.ring_path)
        self._store = store
        store.begin(attempt.attempt, attempt.settings)
        self._sites = KnownSites(_sites_path(self.ring_path))
        progress = store.read_progress(attempt.attempt)
        self._done = self.ring.committed = max(self.ring.committed, progress.consumed)  # but for what is early
        self._position = self.ring.tail = max(self.ring.tail, progress.held)
        self._early: dict[int, tuple[int, float, dict[str, float]]] = {}  # by step: where in the ring, when, scalars
        self._sinks = [from_spec(spec) for spec in judges["sinks"]]
        self._rank = int(attempt.settings.get("rank", 0))
        self._judge = _resume_judge(
            folder, [rule_from_json(rule) for rule in judges["rules"]], self._rank, attempt.attempt
        )
        self._findings = Findings(folder)
        self._judged = self.ring.judged  # what was found in these is told already
        self.ring.findings = self._findings.size
        self._waiting = Given({}, {})  # what the rules have not seen
        self._told: dict[str, Any] = {}  # at the end, for the settings
        self._since: float | None = None  # when the first step came that is not committed

    def is_training(self) -> bool:
        """Tell whether the process that fills the ring is alive."""
        return is_training(self._folder, self.attempt.attempt, self.attempt)

    def serve(self) -> bool:
        """Do what cannot wait. False: there was nothing to read."""
        came = self.read()
        is_wanted = self.ring.committed < min(self.ring.wanted, self._position)
        if is_wanted or (self._since is not None and time.monotonic() - self._since > PART_SECONDS):
            self.commit()
        return came

    def read(self) -> bool:
        """Takes what there is. False: there was nothing."""
        came = False
        for record in self.ring.read(self._position):
            came = True
            if record.kind == wire.EARLY:
                given, when = wire.decode_given(record.payload)
                self._early |= {step: (self._position, when, named) for step, named in given.scalars.items()}
            elif record.end <= self._done:
                pass  # it lay behind something early that is still waited for
            elif record.kind == wire.OVERHEAD:
                self._told["overhead"] = wire.decode_overhead(record.payload.tobytes())
            elif record.kind == wire.GIVEN:
                self._take_given(*wire.decode_given(record.payload))
            else:
                self._take(record.number, wire.decode_step(record.payload, self._sites))
            self._position = record.end
            self.ring.judged = max(self.ring.judged, record.number + 1)
            if self._store.size >= PART_BYTES or self._position - self.ring.committed > self.ring.capacity // 3:
                self.commit()
        return came

    def _take(self, number: int, frame: StepFrame) -> None:
        """A step that an earlier writer had taken, but not committed, is not told once more."""
        self._take_early(frame.step, {*frame.earlier_scalars, frame.step})
        if self._since is None:
            self._since = time.monotonic()
        found = [replace(each, rank=self._rank, attempt=self.attempt.attempt) for each in self._judge_step(frame)]
        if number >= self.ring.fed:
            self.ring.fed = number + 1
            found += self._feed(frame, found)
        if number >= self._judged:
            self.ring.findings = self._findings.add(found)
        self._store.add(frame)

    def _judge_step(self, frame: StepFrame) -> list[Finding]:
        """Judge a step, with what came without a step since the one before."""
        own = Given(frame.earlier_scalars, frame.sample_ids)
        frame.earlier_scalars = {**self._waiting.scalars, **own.scalars}
        frame.sample_ids = {**self._waiting.sample_ids, **own.sample_ids}
        self._waiting = Given({}, {})
        try:
            return self._judge.judge(frame)
        finally:
            frame.earlier_scalars, frame.sample_ids = own

    def _take_early(self, step: int | None, brought: Collection[int]) -> None:
        """Take what was early: of steps that are brought now nothing, of others before `step` all. None: of all."""
        for each, (_, when, named) in list(self._early.items()):
            if each in brought or step is None or each < step:
                del self._early[each]
                if each not in brought:
                    self._take_given(Given({each: named}, {}), when)

    def _take_given(self, given: Given, when: float) -> None:
        """Take what was given with steps that are not measured, or not recorded."""
        for step in given.scalars:
            self._early.pop(step, None)
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
                finding = Finding("sink", frame.step, None, 1.0, 0.0, "warning", sentence, self._rank)
                failed.append(replace(finding, attempt=self.attempt.attempt))
        return failed

    def commit(self) -> None:
        """Bring what was taken to the disk, and free its room in the ring."""
        if self._position > self.ring.committed or self._since is not None:
            held = min((begin for begin, *_ in self._early.values()), default=self._position)
            self._sites.keep()
            self._store.commit(self._position, held)
            self.ring.committed = self._position
            self.ring.tail = held
            self._remember()
        self._since = None

    def _remember(self) -> None:
        """Keep what the rules remember: whoever goes on begins with it."""
        with suppress(OSError, TypeError):  # a full disk, or what is no memory
            write_whole(self._folder / _REMEMBERED, json.dumps(self._judge.state()).encode())

    def finish(self, is_torn: bool = False) -> None:
        """Finish: nothing more comes, and the empty ring is taken away."""
        self._take_early(None, ())
        self.commit()
        for sink in self._sinks:
            with suppress(Exception):
                sink.close()
        ended = self.ring.ending if self.ring.closed else describe_death(self.attempt.noted)
        torn = "; the end of its ring was torn, and is lost" if is_torn else ""
        self._store.finish(self.attempt.attempt, ended + torn, self.ring.dropped, self._told)
        tidy(self.ring_path)


class KnownSites(dict[int, Sites]):
    """The sites that steps in the ring refer to, also after the step that brought them has left it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with suppress(FileNotFoundError, Damaged):
            self.update((int(number), Sites.from_json(told)) for number, told in read_json(path)["sites"])
        self._kept = list(self)

    def keep(self) -> None:
        """Write them to disk, if there are others than before."""
        for oldest in sorted(self)[:-KNOWN_SITES]:
            del self[oldest]
        if list(self) != self._kept:
            write_json(self._path, {"sites": [(number, sites.to_json()) for number, sites in self.items()]})
            self._kept = list(self)


@contextmanager
def hold_lock(folder: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of a folder, into which one process writes. TimeoutError if another one holds it for so long."""
    end = time.monotonic() + seconds
    while True:
        descriptor = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | NO_LINK, 0o666)
        try:
            lock = Lock(descriptor)
            break
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() > end:
                raise TimeoutError(f"{folder}: expected that nobody writes there, but another process does") from None
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.close()


def _resume_judge(folder: Path, rules: Sequence[Rule | Function], rank: int, attempt: int) -> Judge:
    """Make a judge that goes on with what the rules remembered at the last commit, if that can be read."""
    judge = Judge(rules, rank, attempt)
    try:
        judge.restore(json.loads((folder / _REMEMBERED).read_bytes()))
        return judge
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Judge(rules, rank, attempt)


def drain_left(store: Store, folder: Path, before: int | None = None) -> list[int]:
    """Takes up what is left in the rings of attempts that died, of those before a number. Their numbers.

    RuntimeError where the training process of one is alive; ValueError where its ring is on another machine.
    """
    for path in folder.glob(f"{RING}*"):
        number = int(path.name.removeprefix(RING)) if path.name.removeprefix(RING).isdigit() else -1
        if number < 0 or (before is not None and number >= before):
            continue
        try:
            attempt = read_attempt(folder, number)
        except (FileNotFoundError, Damaged):  # its file was set aside: no other one says of the ring
            rank = folder.name.partition("=")[2]
            Attempt(number, {"rank": int(rank) if rank.isdigit() else 0}).write(folder)
        else:
            if attempt.ended is not None:  # whoever ended it died before it was tidy
                tidy(path)
    done = []
    for number in open_attempts(folder):
        if before is None or number < before:
            done += [number] if _drain_left(store, folder, number) else []
    return done


def tidy(ring: Path) -> None:
    """Takes a ring away."""
    for path in (_sites_path(ring), ring):
        path.unlink(missing_ok=True)


def _sites_path(ring: Path) -> Path:
    return ring.with_name(ring.name + ".sites")


def _drain_left(store: Store, folder: Path, number: int) -> bool:
    try:
        attempt = read_attempt(folder, number)
    except Damaged as error:  # an empty file: it died before it had described itself
        error.path.unlink(missing_ok=True)
        return False
    try:
        intake = Intake(store, folder, attempt)
    except FileNotFoundError:
        if store.read_progress(number).consumed:  # it died when its ring was written, and taken away
            store.begin(number, {})
            store.finish(number, describe_death(attempt.noted))
        else:  # before its first step
            path_of(folder, number).unlink(missing_ok=True)
            describe_death(attempt.noted)
        return False
    except RingError as error:
        _keep_ring(folder, ring_of(folder, number, attempt.ring), error)
        store.begin(number, {})
        store.finish(number, f"{describe_death(attempt.noted)}; its ring cannot be read")
        return True
    if intake.is_training():
        raise RuntimeError(f"{folder}: expected that training has ended, but process {attempt.pid} records into it")
    try:
        while intake.read():
            pass
        intake.finish()
    except RingError as error:  # after a power failure: what lies after it cannot be found
        _keep_ring(folder, intake.ring_path, error)
        intake.finish(is_torn=True)
    return True


def _keep_ring(folder: Path, path: Path, error: RingError) -> None:
    print(f"{path}: {error}", file=sys.stderr)
    shutil.copyfile(path, folder / f"{path.name}{DAMAGED}")
    path.unlink()


def recover(path: str | os.PathLike[str]) -> dict[str, list[int]]:
    """Writes what is left of a run whose training and writer both died: what had been copied into its rings.

    To be called where the run was recorded, when training has ended. Files that cannot be read are set aside under the
    name ``*.damaged``, and a warning says so. Returns, for each rank's folder, the attempts that something was left of.
    RuntimeError where training still runs, TimeoutError where another process writes.
    """
    folders = sorted(folder for folder in Path(path).glob("rank=*") if folder.is_dir())
    if not folders:
        raise ValueError(explain_missing_run(Path(path)))
    found = {}
    for folder in folders:
        with hold_lock(folder, 2.0), closing(Store(folder)) as store:
            store.check_rows()
            found[folder.name] = drain_left(store, folder)
            for error in store.set_aside:
                warn(f"{error}; it is set aside as {error.path.name}{DAMAGED}")
    return found


def run(folder: Path, number: int, wake: int, judges: Mapping[str, Any]) -> None:
    """Write until the training process has ended, and its ring is empty."""
    ring = Ring(Path(read_attempt(folder, number).ring))
    try:
        with hold_lock(folder, _LOCK_SECONDS):
            attempt = read_attempt(folder, number)
            _drain_others(folder, number)
            with closing(Store(folder)) as store:
                if attempt.ended is None:
                    _follow(Intake(store, folder, attempt, judges), store, wake)
                else:
                    tidy(ring.path)
                while store.merge():
                    pass
    except BaseException as error:
        ring.fail(f"{type(error).__name__}: {error}")
        raise


def _drain_others(folder: Path, number: int) -> None:
    """Take up what earlier attempts left. Whatever is wrong with it stops nothing that is new."""
    with closing(Store(folder)) as store:
        try:
            drain_left(store, folder, number)
        except (
            ValueError,
            RuntimeError,
            KeyError,
            TypeError,
        ) as error:  # of another machine, where it can be recovered
            print(error, file=sys.stderr)
        for damaged in store.set_aside:
            print(f"{damaged}; it is set aside", file=sys.stderr)


def _follow(intake: Intake, store: Store, wake: int) -> None:
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    with suppress(OSError, AttributeError):  # a kernel without it: the parent is looked at each second
        poll.register(os.pidfd_open(intake.attempt.pid), select.POLLIN)
    while True:
        is_over = bool(intake.ring.closed) or os.getppid() != intake.attempt.pid  # before what it had written is read
        came = intake.serve()
        if is_over and not came:
            return intake.finish()
        if not store.merge(intake.serve) and not came:
            poll.poll(1000)
            with suppress(BlockingIOError):
                os.eventfd_read(wake)


def main(folder: str, number: str, wake: str, judges: str) -> None:
    os.nice(19)
    run(Path(folder), int(number), int(wake), json.loads(judges))
