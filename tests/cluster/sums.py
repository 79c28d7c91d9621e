"""Steps that tests merge: arrays that are summed, without sites; and what happens in their collectives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from hookstats.cluster import merging as merging_room
from hookstats.cluster import protocol, tree
from hookstats.cluster.flat import Merge, Section
from hookstats.cluster.merging import Merged, Merging
from hookstats.cluster.protocol import Summary
from tests.ranks import until


def summed(parts: Sequence[Section]) -> Section:
    result = parts[0].copy()
    for part in parts[1:]:
        result = result + part
    return result


class Step(NamedTuple):
    """Arrays that follow from the rank, the number and the tables of all ranks."""

    number: int
    rank: int
    table: str = "one"
    scale: float | None = None


class Sums:
    """One section of floats, one of ints, with `elements` for each letter of all tables."""

    merges: Sequence[Merge] = (summed, summed)

    def __init__(self, elements: int = 3) -> None:
        self.notes: deque[str] = deque()
        self.elements = elements

    def table(self, step: Step) -> tuple[int, bytes]:
        text = step.table.encode()
        return int.from_bytes(text, "big"), text

    def nbytes(self, step: Step) -> int:
        return 1 << 10

    def scale(self, step: Step) -> float | None:
        return step.scale

    def pack(self, step: Step, tables: list[tuple[int, bytes]]) -> list[Section]:
        letters = sorted({letter for _, table in tables for letter in table.decode()})
        has = np.repeat([letter in step.table for letter in letters], self.elements)
        random = np.random.default_rng([step.number, step.rank])
        return [random.standard_normal((2, len(has))) * has, random.integers(0, 1000, (1, len(has))) * has]

    def unpack(self, sections: list[Section], step: Step, tables: list[tuple[int, bytes]]) -> Any:
        return sections


class Disturbed(Sums):
    """A step in the middle of whose collectives this rank does something else first; None: like any other."""

    def __init__(self, number: int, disturb: Callable[[], object] | None) -> None:
        super().__init__()
        self.number = number
        self.disturb = disturb
        self.merges = (self._disturbed, summed)

    def pack(self, step: Step, tables: list[tuple[int, bytes]]) -> list[Section]:
        self.in_hand = step.number
        return super().pack(step, tables)

    def _disturbed(self, parts: Sequence[Section]) -> Section:
        if self.disturb is not None and self.in_hand == self.number:
            self.disturb()
        return summed(parts)


def counted_collectives() -> list[str]:
    """The collectives that groups of gloo begin from now on."""
    called: list[str] = []
    of_gloo = dist.ProcessGroupGloo

    class Counting(of_gloo):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if name in ("alltoall_base", "_allgather_base", "gather", "broadcast"):
                called.append(name)
            return super().__getattribute__(name)

    dist.ProcessGroupGloo = Counting
    return called


def wanted(number: int, ranks: Sequence[int], table: str = "one", elements: int = 3) -> list[Section]:
    """What a flat merge in the order of the ranks gives, where all have the same table."""
    packing = Sums(elements)
    parts = [packing.pack(Step(number, rank, table), [(0, table.encode())]) for rank in ranks]
    return [summed(each) for each in zip(*parts, strict=True)]


def submit(merging: Merging[Any], numbers: Iterable[int], **fields: Any) -> list[Merged[Any]]:
    """A training that measures these steps, and waits for none."""
    for number in numbers:
        merging.submit(Step(number, merging.rank, **fields), number)
    return merging.arrived()


def train(merging: Merging[Any], numbers: Iterable[int], **fields: Any) -> list[Merged[Any]]:
    """A training that measures these steps, and in the end waits for all of them."""
    return submit(merging, numbers, **fields) + merging.wait(60)


class Clock:
    """That of merging in this process. It also goes forward when a test says so."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self.looks = 0  # at it, by the thread that waits for others
        protocol.time = tree.time = self  # type: ignore[assignment]

    def monotonic(self) -> float:
        self.looks += 1
        return time.monotonic() + self._ahead

    def run_out(self, merging: Merging[Any]) -> list[Merged[Any]]:
        """Ends whatever the steps that were submitted wait for."""

        def is_settled() -> bool:
            self._ahead += 3 * merging_room._PATIENCE
            return not merging._unsettled()

        until(is_settled)
        return merging.arrived()


def announced(merging: Merging[Any], rank: int) -> int:
    """The number of the step with which another rank waits in the store."""
    return Summary.from_json(bytes(merging._store.get(f"rank/{rank}")).decode()).low.number
