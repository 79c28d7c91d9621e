"""Steps of ranks as `Merging` takes them: whose tables it exchanges, and whose arrays it merges. Pure numpy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hookstats.cluster.agreement import Agreement, some
from hookstats.cluster.flat import MERGES, Flat, Merge, Section
from hookstats.cluster.packing import Packer
from hookstats.cluster.table import Placing, Table, Tables, whole
from hookstats.numbers.blocks import Drained
from hookstats.numbers.fields import Site

_KEPT = 4  # agreements: of whole states, and of totals, each before and after a change


class Step(NamedTuple):
    """A step of this rank."""

    drained: Drained
    placing: Placing = whole  # as `Tables.of` has it


class Steps:
    """The steps of a rank, one after another; one thread alone uses it.

    ``notes``: what the user is to be told of how ranks differ, and what was left out for it; to be taken from the left.
    """

    merges: Sequence[Merge] = MERGES

    def __init__(self, rank: int, tables: Tables) -> None:
        self.notes: deque[str] = deque()
        self._rank = rank
        self._tables = tables
        self._apart: dict[Site, None] = {}  # of which ranks have held other values, since this rank attached
        self._packers: dict[tuple[tuple[int, bytes], ...], Packer] = {}

    def table(self, step: Step) -> tuple[int, bytes]:
        """What this rank has, and its checksum before it."""
        table, _ = self._tables.of(*step)
        return table.checksum, table.text

    def nbytes(self, step: Step) -> int:
        """Of the state that it holds."""
        return sum(block.nbytes for block in step.drained.blocks)

    def scale(self, step: Step) -> float | None:
        """The grad_scale."""
        return step.drained.grad_scale

    def pack(self, step: Step, tables: Sequence[tuple[int, bytes]]) -> list[Section]:
        """tables: each with the lowest rank that has it, in the order of these. ValueError where one is none."""
        return list(self._packer(tables).pack(step.drained, *self._tables.of(*step)))

    def unpack(self, sections: Sequence[Section], step: Step, tables: Sequence[tuple[int, bytes]]) -> Step:
        """A step made of what came of all ranks' sections; step: this rank's own."""
        packer, before = self._packer(tables), len(self._apart)
        drained = packer.unpack(Flat(*sections), step.drained)
        self._tell_of(list(self._apart)[before:], packer.agreement, drained.step)
        return step._replace(drained=drained)

    def _tell_of(self, sites: Sequence[Site], agreement: Agreement, number: int) -> None:
        """Of what is kept apart from now on."""
        if not sites:
            return
        rows = agreement.alternatives[sites[0]]
        names = " and ".join(str(agreement.rows[i].site) for i in rows[:2])
        self.notes.append(
            f"the ranks hold different values of {some(sites)} at step {number}, and how these plain tensors lie is "
            f"not known. They are kept apart from this step on: {sites[0]} as {names}. Say how they are placed: "
            "placements={glob: Shard(-1)} for a part of the channels, Shard(0) or Shard(-2) for a part of the rows, "
            "one for each dimension of a DeviceMesh that is process_group="
        )

    def _packer(self, tables: Sequence[tuple[int, bytes]]) -> Packer:
        key = tuple(tables)
        if key not in self._packers:
            agreement = Agreement([(rank, Table.from_text(text)) for rank, text in tables])
            self.notes.extend(agreement.notes)
            for old in list(self._packers)[: 1 - _KEPT]:
                del self._packers[old]
            self._packers[key] = Packer(agreement, self._rank, self._apart)
        return self._packers[key]
