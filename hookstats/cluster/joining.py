"""A monitor's steps by way of the other ranks: what watch is given of this room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from hookstats._warn import WarnOnce
from hookstats.cluster.agreement import Agreement
from hookstats.cluster.flat import MERGES, Flat
from hookstats.cluster.groups import checked_placements, group_of
from hookstats.cluster.merging import Merged, Merging
from hookstats.cluster.packing import Packer
from hookstats.cluster.placements import Placements, Tell
from hookstats.cluster.table import Piece, Placing, Table, Tables
from hookstats.cluster.tree import Merge, Section
from hookstats.modules.sharding import Held
from hookstats.numbers.blocks import Drained
from hookstats.numbers.fields import Site
from hookstats.numbers.ranks import Ranks

_AGREED = 4  # lists of tables: of whole states and of totals, and what they were before something moved


class Step(NamedTuple):
    """A step of this rank; held: what it has of each site."""

    drained: Drained
    held: dict[Site, Held]


class Joined:
    """The ranks of a process group, this one among them. Its methods return at once, but `wait` and `close`."""

    def __init__(
        self,
        model: nn.Module,
        process_group: Any,
        placements: Any,
        names: Iterable[str],
        spread: bool,
        budget: int,
        warn_once: WarnOnce,
    ) -> None:
        """names: of the watched modules and parameters. spread: whether the ranks' extremes are wanted.

        budget: bytes that all ranks' sites together may take on each rank.
        TypeError, ValueError where process_group or placements are not as `hookstats.attach` has them.
        """
        group = group_of(process_group)
        wanted = checked_placements(placements, group, names)
        self._told: deque[tuple[object, str]] = deque()  # in the thread, which is not to warn
        self._warn_once = warn_once
        where = Placements(model, group, wanted, self._tell)
        self._merging = Merging(group.ranks, _Steps(where, Tables(budget, spread), self._tell))
        self._arrived: list[Merged[Step]] = []
        self.ranks = Ranks((self._merging.rank,), len(group.ranks))
        self.is_first = self._merging.rank == min(group.ranks)

    def _tell(self, what: object, text: str) -> None:
        self._told.append((what, text))

    def submit(self, drained: Drained, held: dict[Site, Held]) -> None:
        self._merging.submit(Step(drained, held), drained.step)

    def arrived(self) -> list[Drained]:
        """What all ranks have together, or this one alone, in the order of their submission; each once."""
        merged = [*self._arrived, *self._merging.arrived()]
        self._arrived = []
        while self._told:
            self._warn_once(*self._told.popleft())
        for each in merged:
            each.step.drained.ranks = Ranks(each.ranks, each.world_size)
        return [each.step.drained for each in merged]

    def wait(self, timeout: float) -> None:
        """Until all that was submitted has arrived, or so many seconds have passed."""
        self._arrived += self._merging.wait(timeout)

    def close(self) -> None:
        """What is not settled by now is this rank's own."""
        self._arrived += self._merging.close()


class _Steps:
    """What `Merging` asks of a step. In its thread alone."""

    merges: Sequence[Merge] = MERGES

    def __init__(self, where: Placements, tables: Tables, tell: Tell) -> None:
        self._where = where
        self._tables = tables
        self._tell = tell
        self._placing: tuple[Mapping[Site, Held], Placing] | None = None
        self._agreed: dict[tuple[tuple[int, bytes], ...], tuple[Packer, dict[int, Table]]] = {}

    def table(self, step: Step) -> tuple[int, bytes]:
        table, _ = self._of(step)
        return table.checksum, table.text

    def scale(self, step: Step) -> float | None:
        return step.drained.grad_scale

    def pack(self, step: Step, tables: list[tuple[int, bytes]]) -> list[Section]:
        packer, by_checksum = self._packer(tables)
        table, pieces = self._of(step)
        return packer.pack(step.drained, by_checksum[table.checksum], pieces).sections()

    def unpack(self, sections: list[Section], step: Step, tables: list[tuple[int, bytes]]) -> Step:
        packer, _ = self._packer(tables)
        return Step(packer.unpack(Flat(*sections), step.drained), step.held)

    def _of(self, step: Step) -> tuple[Table, list[Piece]]:
        if self._placing is None or self._placing[0] != step.held:
            self._placing = (step.held, self._where.placing(step.held))
        return self._tables.of(step.drained, self._placing[1])

    def _packer(self, tables: list[tuple[int, bytes]]) -> tuple[Packer, dict[int, Table]]:
        key = tuple(tables)
        if key not in self._agreed:
            read = [(rank, Table.from_text(text)) for rank, text in tables]
            agreement = Agreement(read)
            for note in agreement.notes:
                self._tell(note, f"merged over ranks: {note}")
            known = (Packer(agreement, dist.get_rank()), {table.checksum: table for _, table in read})
            self._agreed = dict([*self._agreed.items(), (key, known)][-_AGREED:])
        return self._agreed[key]
