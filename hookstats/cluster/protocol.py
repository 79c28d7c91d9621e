"""Who takes part in a step, settled through torch.distributed's store before any collective begins.

A collective cannot find out that a rank is missing without hanging, and one that has failed closes its group for good.
So each rank announces the step that it has in hand, and the newest one that it holds, and everybody obeys the one
verdict that is written of it: by the first rank when all have announced, or, that all are alone with it. Each rank has
one key, and overwrites it: the store does not grow with steps. The first rank of each group of the tree announces for
its group.

Ranks need not be in lockstep. Steps before the latest one in hand cannot be merged, because a rank has given them up:
those behind give them up at once, and go on to it. A rank that comes too late announces itself all the same, so that
the others hold their steps for it. Where a rank holds too many, all go on to the newest step that everybody holds.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from hookstats.cluster.gloo import Store
from hookstats.cluster.tree import Pause

Checksums: TypeAlias = list[tuple[int, int]]  # of distinct tables, each with the lowest rank that has it
Tables: TypeAlias = list[tuple[int, bytes]]  # these themselves

_POLL, _LONGEST_POLL = 1e-3, 0.05  # seconds between two looks at the store
_POLL_PER_RANK = 5e-5  # more of them for more ranks: the store sees some 20,000 looks a second at most
_FULL_PATIENCE = 0.5  # seconds that a rank with too many steps waits for the first one to decide
_KEPT = 8  # tables in the store that a rank brought last, though nobody has them now
_NAMED = 8  # late ranks that a message names


class Moment(NamedTuple):
    """A step of a training."""

    begun: float  # how often step numbers have begun anew
    number: int

    def before(self) -> Moment:
        """The latest that is earlier."""
        return self._replace(number=self.number - 1)


_NEVER = Moment(-1, 0)
_END = Moment(float("inf"), 0)  # later than any step


class Summary(NamedTuple):
    """What the ranks below and including one have announced."""

    low: Moment  # the earliest of their steps that is not settled
    low_rank: int
    high: Moment
    high_rank: int
    newest: Moment  # that all of them hold
    is_full: bool  # one of them holds too many
    epoch: int  # of the groups that can be used: one more where a rank's have failed
    tables: Checksums
    scales: list[tuple[int, float | None]]  # distinct ones, at most two
    late: list[int]

    @classmethod
    def from_json(cls, text: str) -> Summary:
        low, low_rank, high, high_rank, newest, is_full, epoch, tables, scales, late = json.loads(text)
        pairs = [(rank, each) for rank, each in tables], [(rank, each) for rank, each in scales]
        return cls(Moment(*low), low_rank, Moment(*high), high_rank, Moment(*newest), is_full, epoch, *pairs, late)


class Verdict(NamedTuple):
    """What is decided about a step and, where nothing was before, about all earlier ones."""

    at: Moment
    go: bool
    by: int  # the rank that wrote it
    epoch: int = 0
    agreement: int = 0  # the number of the list of tables
    kind: str = ""  # why not
    text: str = ""

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        at, *rest = json.loads(text)
        return cls(Moment(*at), *rest)


_NOTHING = json.dumps(Summary(_NEVER, 0, _NEVER, 0, _NEVER, False, 0, [], [], []))


class Backlog(NamedTuple):
    """What a rank holds behind the step in hand."""

    newest: Moment
    is_full: bool  # it can hardly take more


class Participant:
    """One rank's part. Any error of the store is raised."""

    def __init__(
        self, store: Store, plan: Sequence[Sequence[tuple[int, ...]]], rank: int, patience: float, pause: Pause
    ) -> None:
        """plan: of `levels`. patience: seconds to wait for others, with a step in hand."""
        self._store = store
        self._rank = rank
        self._pause = pause
        led = [group for groups in plan for group in groups if group[0] == rank]
        self._below = [each for group in led for each in group[1:]]
        self._first = plan[-1][0][0] if plan else rank
        # The first rank of a group gives up before those above it do: it knows who is missing.
        self._patience = patience * (1 + 0.1 * len(led))
        self._longest = 2 * patience
        ranks = sum(map(len, plan[0])) if plan else 1
        self._poll = max(_POLL, _POLL_PER_RANK * ranks)
        self._absent: dict[int, str] = {}  # who was given up, and what they had announced then
        self._tables: dict[int, bytes] = {}  # by checksum; of the agreement, and those that this rank brought
        self._brought: list[int] = []  # by this rank, of those in the store
        self._in_hand: Moment | None = None  # the step of which no verdict has been read
        self._number = 0  # of the present agreement, and which it is
        self._listed: Checksums = []
        store.compare_set("broken", "", "-1")
        store.compare_set("verdict", "", json.dumps(Verdict(_NEVER, False, self._first)))
        for each in self._below:
            store.compare_set(f"rank/{each}", "", _NOTHING)

    def settle(
        self, moment: Moment, table: tuple[int, bytes], scale: float | None, epoch: int, backlog: Callable[[], Backlog]
    ) -> tuple[Verdict, Tables]:
        """The verdict of a step that this rank has in hand, and where that is go, the tables of all ranks.

        table: what this rank has to merge, with its checksum before it. epoch: of groups that this rank can use.
        """
        self._in_hand = moment
        self._offer(*table)
        me, is_first = self._rank, self._rank == self._first
        begin, interval, announced = time.monotonic(), self._poll, ""
        while True:
            read, verdict, below = self._look()
            if is_first and verdict.by != me and verdict.at != _END:  # others gave this rank up: it is back
                self._write(read, verdict._replace(by=me, go=False))
                continue
            own = Summary(moment, me, moment, me, *backlog(), epoch, [(me, table[0])], [(me, scale)], [])
            if verdict.at >= moment:
                self._in_hand = None
                if verdict.at > moment and not is_first:  # for the others to wait for at their next step
                    self._store.set(f"rank/{me}", json.dumps(own))
                return self._obey(verdict, moment)
            waited = time.monotonic() - begin
            summary = self._sum(own, below, verdict.at, waited > self._patience)
            decided = self._decide(own, summary, verdict, waited)
            if decided is not None:
                self._write(read, decided)
                continue
            if not is_first and summary is not None and json.dumps(summary) != announced:
                announced, interval = json.dumps(summary), self._poll
                self._store.set(f"rank/{me}", announced)
            self._pause(interval)
            interval = min(1.5 * interval, max(_LONGEST_POLL, 8 * self._poll))

    def _decide(self, own: Summary, summary: Summary | None, verdict: Verdict, waited: float) -> Verdict | None:
        """What this rank decides of the step in hand, where that is its part; None: to wait."""
        moment, number = own.low, own.low.number
        if own.is_full and waited > _FULL_PATIENCE:
            text = f"rank {self._rank} has too many steps to merge, and waited no longer for step {number}"
            return self._alone(moment, "queue", text)
        if self._rank == self._first:
            return None if summary is None else self._decide_as_first(summary, moment, waited > self._patience)
        if verdict.by != self._first or waited > self._longest:  # it did not come last time, or does not now
            return self._alone(moment, "late", f"timed out waiting for rank {self._first} at step {number}")
        return None

    def break_up(self, epoch: int) -> None:
        """The groups of this epoch have failed here."""
        self._store.set("broken", str(epoch))

    def is_broken_up(self, epoch: int) -> bool:
        """Whether they have anywhere: a rank that has given up keeps its connections."""
        return int(self._store.get("broken")) >= epoch

    def leave(self, why: str) -> None:
        """Nothing will be merged any more: from now on everybody is alone, at once."""
        while True:
            read, verdict, _ = self._look()
            text = f"rank {self._rank} stopped merging: {why}"
            if verdict.at == _END or self._write(read, self._alone(_END, "left", text)):
                break
        if verdict.go and verdict.at == self._in_hand:  # the others have begun to merge it
            self.break_up(verdict.epoch)

    def _look(self) -> tuple[str, Verdict, dict[int, str]]:
        names = ["verdict", *(f"rank/{rank}" for rank in self._below)]
        read, *texts = (bytes(value).decode() for value in self._store.multi_get(names))
        return read, Verdict.from_json(read), dict(zip(self._below, texts, strict=True))

    def _write(self, read: str, verdict: Verdict) -> bool:
        """Unless another verdict was written since: the same one is read by everybody."""
        text = json.dumps(verdict)
        return bytes(self._store.compare_set("verdict", read, text)).decode() == text

    def _alone(self, at: Moment, kind: str, text: str) -> Verdict:
        return Verdict(at, False, self._rank, kind=kind, text=text)

    def _sum(self, own: Summary, below: dict[int, str], settled: Moment, is_over: bool) -> Summary | None:
        """What this rank and those below it have announced; None while it is not worth telling."""
        moment, parts, missing = own.low, [own], {}
        for rank, text in below.items():
            part = Summary.from_json(text)
            if part.low < moment and part.high <= moment:
                missing[rank] = text
            if part.high > settled:
                parts.append(part)
        parts.sort(key=lambda part: part.low_rank)
        unsettled = [part for part in parts if part.low > settled]
        low = min(unsettled, key=lambda part: part.low)
        high = max(parts, key=lambda part: part.high)
        late = [rank for part in parts if part.low == part.high == moment for rank in part.late]
        is_full = any(part.is_full for part in parts)
        if missing and (is_over or all(self._absent.get(rank) == text for rank, text in missing.items())):
            self._absent = missing
            late += missing
        elif missing and is_full:  # this step is given up for them, others are held
            late += missing
        is_mixed = low.low < moment or high.high > moment
        if missing and not late and not is_mixed:
            return None
        tables: dict[int, int] = {}
        scales: dict[float | None, int] = {}
        for part in unsettled:
            for rank, checksum in part.tables:
                tables[checksum] = min(rank, tables.get(checksum, rank))
            for rank, scale in part.scales:
                scales.setdefault(scale, rank)
        return Summary(
            low.low,
            low.low_rank,
            high.high,
            high.high_rank,
            min(part.newest for part in unsettled),
            is_full,
            max(part.epoch for part in parts),
            sorted((rank, checksum) for checksum, rank in tables.items()),
            [(rank, scale) for scale, rank in scales.items()][:2],
            late[:_NAMED],
        )

    def _decide_as_first(self, summary: Summary, moment: Moment, is_over: bool) -> Verdict | None:
        if summary.high > moment or summary.low < moment:
            text = (
                f"rank {summary.high_rank} is at step {summary.high.number} without step {summary.low.number}, which "
                f"rank {summary.low_rank} has measured: measured alike (every=) on all ranks, they would be merged"
            )
            return self._alone(summary.high.before(), "cadence", text)
        if summary.late and summary.is_full:
            text = (
                f"too many steps to merge were waiting when ranks {summary.late} had not come to step {moment.number}"
            )
            return self._alone(moment, "queue", text)
        if summary.late:
            text = f"timed out waiting for ranks {summary.late} at step {moment.number}"
            return self._alone(moment, "late", text)
        if summary.is_full and summary.newest > moment:
            text = (
                f"steps come faster than they are merged, all ranks go on from step {moment.number} to step "
                f"{summary.newest.number}: measure less often (every=)"
            )
            return self._alone(summary.newest.before(), "queue", text)
        if len(summary.scales) > 1:
            (one, scale), (other, another) = summary.scales
            text = f"the grad_scale of rank {one} was {scale} at step {moment.number}, that of rank {other} {another}"
            return self._alone(moment, "scale", text)
        if not self._are_stored(summary.tables):
            text = f"the list of sites of a rank did not arrive at step {moment.number}"
            return self._alone(moment, "table", text) if is_over else None
        if summary.tables != self._listed:
            self._number += 1
            self._listed = summary.tables
            self._store.set(f"agreement/{self._number}", json.dumps(summary.tables))
            self._store.delete_key(f"agreement/{self._number - 2}")
        return Verdict(moment, True, self._rank, summary.epoch, self._number)

    def _obey(self, verdict: Verdict, moment: Moment) -> tuple[Verdict, Tables]:
        if verdict.at > moment and verdict.at != _END and verdict.kind not in ("cadence", "queue"):
            text = f"other ranks went on to step {verdict.at.number} without this rank's step {moment.number}"
            return Verdict(moment, False, verdict.by, kind="late", text=text), []
        if verdict.kind == "table":  # deleted by who had brought it long ago, maybe
            self._tables.clear()
        if not verdict.go:
            return verdict, []
        try:
            self._fetch(verdict.agreement)
        except KeyError as missing:  # this rank slept, and the others went on
            self.break_up(verdict.epoch)
            return Verdict(moment, False, verdict.by, kind="late", text=str(missing)), []
        return verdict, [(rank, self._tables[checksum]) for rank, checksum in self._listed]

    def _fetch(self, number: int) -> None:
        """The tables of an agreement; KeyError where the store has lost them."""
        if number != self._number:
            self._listed = [(rank, each) for rank, each in json.loads(self._get(f"agreement/{number}"))]
            self._number = number
        self._tables = {checksum: self._table(checksum) for _, checksum in self._listed}

    def _table(self, checksum: int) -> bytes:
        known = self._tables.get(checksum)
        return zlib.decompress(self._get(f"table/{checksum}")) if known is None else known

    def _get(self, name: str) -> bytes:
        if not self._store.check([name]):
            raise KeyError(f"expected {name} in torch.distributed's store, got nothing")
        return bytes(self._store.get(name))

    def _offer(self, checksum: int, table: bytes) -> None:
        """The first rank that has a table brings it: one of thousands."""
        if checksum in self._tables:
            return
        listed = {each for _, each in self._listed}
        self._tables = {each: text for each, text in self._tables.items() if each in listed}
        self._tables[checksum] = table
        if self._store.add(f"brought/{checksum}", 1) == 1:
            self._store.set(f"table/{checksum}", zlib.compress(table))
            self._brought.append(checksum)
        for each in [each for each in self._brought[:-_KEPT] if each not in listed]:
            self._brought.remove(each)
            self._store.delete_key(f"table/{each}")
            self._store.delete_key(f"brought/{each}")

    def _are_stored(self, tables: Checksums) -> bool:
        return tables == self._listed or bool(self._store.check([f"table/{checksum}" for _, checksum in tables]))
