"""Arrays of all ranks merged into one, over groups of our own: everybody gets the same bits.

gloo connects all members of a group with each other, which fails or crawls beyond some 60 nodes (Megatron-LM 877, gloo
327): so small groups meet, their first members meet, and so on. Nothing here asks whether the others are there: that is
settled before, see protocol.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from hookstats.cluster import gloo
from hookstats.cluster.flat import Merge, Section

Pause: TypeAlias = Callable[[float], None]  # sleeps for the given seconds; raises where the thread is to end

FAN = 64
_POLL, _LONGEST_POLL = 1e-4, 5e-3  # seconds between two looks at a collective


def levels(ranks: Sequence[int], fan: int = FAN, local: int = 1) -> list[list[tuple[int, ...]]]:
    """The groups of each level, of at most `fan` ranks: the first rank of each goes on to the next level.

    local: the number of ranks on a node, which meet first; 1: unknown. No level for one rank alone.
    """
    if fan < 2:
        raise ValueError(f"levels: expected groups of 2 ranks or more, got fan={fan}")
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(rank // local, []).append(rank)
    groups = [part for node in nodes.values() for part in _cut(node, fan)]
    if len(groups) == len(ranks):  # one of each node
        groups = _cut(sorted(ranks), fan)
    found = []
    while len(groups) > 1 or len(groups[0]) > 1:
        found.append(groups)
        if len(groups) == 1:
            break
        groups = _cut([group[0] for group in groups], fan)
    return found


def _cut(ranks: list[int], fan: int) -> list[tuple[int, ...]]:
    """Cuts ranks into as few groups as possible, of about the same size."""
    count = -(-len(ranks) // fan)
    ends = [len(ranks) * i // count for i in range(count + 1)]
    return [tuple(ranks[begin:end]) for begin, end in itertools.pairwise(ends)]


class _Group(NamedTuple):
    gloo: gloo.Group
    place: int  # of this rank among the members, whose first one leads
    size: int


class Tree:
    """This rank's groups, from below; of the last one it is not the first member, or that is the topmost."""

    def __init__(
        self, plan: Sequence[Sequence[tuple[int, ...]]], rank: int, store: gloo.Store, timeout: float, pause: Pause
    ) -> None:
        """plan: of `levels`. store: with a prefix that no other groups have. timeout: of a collective, in seconds.

        Connects with nobody yet: the first collective does.
        """
        self._timeout = timeout
        self._pause = pause
        self._groups: list[_Group] = []
        self._is_top = False
        for level, groups in enumerate(plan):
            number, members = next((i, group) for i, group in enumerate(groups) if rank in group)
            place = members.index(rank)
            prefixed = gloo.c10d.PrefixStore(f"{level}/{number}", store)
            group = gloo.lazy_group(prefixed, place, len(members), timeout)
            self._groups.append(_Group(group, place, len(members)))
            self._is_top = level == len(plan) - 1
            if place:
                break

    def merge(self, sections: Sequence[Section], merges: Sequence[Merge]) -> list[Section]:
        """Merges the sections of all ranks, which have the same shapes on all of them.

        On each level below the topmost three collectives, there two, however large the sections are: each member gets
        one slice of all members' elements and merges these in the order of the ranks, the first one gathers what they
        merged, and in the end sends down what came out at the top (where all gather). So a member holds no more than
        three times what it brought. RuntimeError or TimeoutError where a collective fails.
        """
        whole = torch.empty(sum(section.size for section in sections), dtype=torch.int64)
        result = _views(whole, sections)
        for into, section in zip(result, sections, strict=True):
            into[...] = section
        for group in self._groups:
            self._climb(group, result, merges, self._is_top and group is self._groups[-1])
        for group in reversed(self._groups[: -1 if self._is_top else None]):
            self._finish(group.gloo.broadcast(whole, 0), whole)
        return result

    def _climb(self, group: _Group, sections: list[Section], merges: Sequence[Merge], is_top: bool) -> None:
        cuts = _cuts(sections, group.size)
        slices = torch.zeros(group.size, sum(rows * width for rows, width in cuts), dtype=torch.int64)
        received = torch.empty_like(slices)
        for section, parts in zip(sections, _sliced(slices, cuts, sections), strict=True):
            width = parts.shape[2]
            full = section.shape[1] // width if width else 0
            parts[:full] = section[:, : full * width].reshape(len(section), full, width).transpose(1, 0, 2)
            if full < group.size:
                parts[full, :, : section.shape[1] - full * width] = section[:, full * width :]
        self._finish(group.gloo.alltoall_base(received, slices, [], []), received, slices)
        merged = torch.empty_like(received[0])
        own = _sliced(merged[None], cuts, sections)
        for into, parts, merge in zip(own, _sliced(received, cuts, sections), merges, strict=True):
            into[0] = merge(list(parts))
        if is_top:
            self._finish(group.gloo._allgather_base(slices.view(-1), merged), slices, merged)
        else:
            gathered = [] if group.place else list(slices.unbind())
            self._finish(group.gloo.gather(gathered, merged, 0), slices, merged)
            if group.place:
                return
        for section, parts in zip(sections, _sliced(slices, cuts, sections), strict=True):
            side_by_side = parts.transpose(1, 0, 2).reshape(len(section), -1)
            section[...] = side_by_side[:, : section.shape[1]]

    def _finish(self, work: Any, *memory: torch.Tensor) -> None:
        """Looks at it until it is done: a thread that waited inside gloo would abort the interpreter's end."""
        end = time.monotonic() + self._timeout
        interval = _POLL
        try:
            while not work.is_completed():
                if time.monotonic() > end:
                    raise TimeoutError(f"expected a collective to end within {self._timeout} s")
                self._pause(interval)
                interval = min(1.5 * interval, _LONGEST_POLL)
        except BaseException:
            gloo.keep((work, *memory))  # which it may still read and write
            raise
        work.wait()  # is done: raises what failed


def _views(whole: torch.Tensor, like: Sequence[Section]) -> list[Section]:
    """One behind the other."""
    memory, ends = whole.numpy(), np.cumsum([section.size for section in like]).tolist()
    return [
        memory[end - section.size : end].view(section.dtype).reshape(section.shape)
        for section, end in zip(like, ends, strict=True)
    ]


def _cuts(sections: Sequence[Section], size: int) -> list[tuple[int, int]]:
    """The shape of a slice of each section. The last slices may hold fewer elements, and zeros."""
    return [(len(section), -(-section.shape[1] // size)) for section in sections]


def _sliced(slices: torch.Tensor, cuts: Sequence[tuple[int, int]], like: Sequence[Section]) -> Iterator[Section]:
    """The part of each section in memory of slices: ``[slices, rows, elements]``."""
    memory, begin = slices.numpy(), 0
    for (rows, width), section in zip(cuts, like, strict=True):
        part = memory[:, begin : begin + rows * width].view(section.dtype)
        yield part.reshape(len(memory), rows, width)
        begin += rows * width
