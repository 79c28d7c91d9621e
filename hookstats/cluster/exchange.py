"""Communication of ranks: one primitive, an all-reduce, over gloo groups of hookstats' own.

A mismatch or a timeout here aborts no collective of the trainer's. The store is a copy of the default group's;
`torch.distributed.new_group` would not do: it names groups by a count that all ranks must share, with the user's own
groups, too. gloo connects all members of a group with each other, which fails or crawls beyond some 60 nodes
(Megatron-LM 877, gloo 327): so the ranks of a node reduce, then their first members do, and so on.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

c10d: Any = torch.distributed  # its stores and groups have no types
Store: TypeAlias = Any
Numbers: TypeAlias = NDArray[Any]

FAN = 64
_GATHERED = 8 << 20  # bytes of a group's members that may be at its first member at once
_AS_REDUCE_OP: dict[np.ufunc, Any] = {np.add: c10d.ReduceOp.SUM, np.maximum: c10d.ReduceOp.MAX}
_POLL, _LONGEST_POLL = 1e-4, 2e-2  # seconds between two looks at a collective
# By the group of all ranks: how many there are of a name over the same ranks.
_made: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_LOOK = 0.5  # seconds until the first look at the store; later ones are farther apart


def default_store() -> Store:
    """Connect anew to the store of torch.distributed: the connection of others may be blocked by a long wait.

    RuntimeError where this torch has none to give.
    """
    find = getattr(c10d.distributed_c10d, "_get_default_store", None)
    if find is None:
        raise RuntimeError(
            "process_group: expected torch.distributed.distributed_c10d._get_default_store, as torch 2.11 to 2.15 have "
            f"it, got torch {torch.__version__} without it"
        )
    store = find()
    if store is None:
        raise RuntimeError(
            "process_group: expected a store of torch.distributed, got none, as its backend mpi has none"
        )
    return store.clone()


def levels(ranks: Sequence[int], fan: int = FAN, local: int = 1) -> list[list[tuple[int, ...]]]:
    """Return the groups of each level, of at most `fan` ranks: the first rank of each goes on to the next level.

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
    """Cut ranks into as few groups as possible, of about the same size."""
    count = -(-len(ranks) // fan)
    ends = [len(ranks) * i // count for i in range(count + 1)]
    return [tuple(ranks[begin:end]) for begin, end in itertools.pairwise(ends)]


class _Group(NamedTuple):
    gloo: Any
    place: int  # of this rank among the members, whose first one leads
    size: int


class Exchange:
    """The groups of this rank, of which each member calls the same methods in the same order.

    RuntimeError or TimeoutError where a rank is gone, or did not come in time: then the groups are closed for good.
    They are never destroyed: where a member has failed that may hang, with the GIL held (seen in torch 2.13). Their
    threads sleep.
    """

    def __init__(self, name: str, ranks: Sequence[int], timeout: float, fan: int = FAN) -> None:
        """name: what it is for. timeout: of an all-reduce, in seconds.

        All ranks make those of one name in the same order. Connects with nobody yet: the first all-reduce does.
        ValueError where this rank is not one of them.
        """
        self.rank: int = c10d.get_rank()
        self.ranks = tuple(sorted(ranks))
        if self.rank not in self.ranks:
            raise ValueError(f"process_group: expected ranks with this one, {self.rank}, got {self.ranks}")
        self.place = self.ranks.index(self.rank)
        self.timeout = timeout
        self.is_ending = False  # set by another thread: what waits is to raise
        name, made = f"{name}/{_name_of(self.ranks)}", _made.setdefault(c10d.group.WORLD, Counter())
        self._store = c10d.PrefixStore(f"hookstats/{name}/{made[name]}", default_store())
        made[name] += 1
        self._fan = fan
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._local = local if local > 0 and c10d.get_world_size() % local == 0 else 1
        self._groups: list[_Group] | None = None

    def sum(self, numbers: Numbers) -> Numbers:
        """Return the sum of arrays of float64 or int64, of one shape on all ranks: the same bits on all."""
        return self.reduce([(numbers, np.add)])[0]

    def max(self, numbers: Numbers) -> Numbers:
        """Return the largest of each element; also of uint8."""
        return self.reduce([(numbers, np.maximum)])[0]

    def gather(self, mine: Numbers) -> Numbers:
        """Return the int64 arrays of all ranks, of one shape, as ``[ranks, ...]``."""
        everybodys = np.zeros((len(self.ranks), *mine.shape), np.int64)
        everybodys[self.place] = mine
        return self.sum(everybodys)

    def gather_texts(self, mine: bytes, wanted: bool = True) -> list[bytes]:
        """Return the text of each rank. wanted: whether this rank's is to be sent; else it is empty."""
        text = np.frombuffer(mine if wanted else b"", np.uint8)
        ends = np.cumsum(self.gather(np.array(len(text))))
        whole = np.zeros(ends[-1], np.uint8)
        whole[ends[self.place] - len(text) : ends[self.place]] = text
        whole = self.max(whole)
        return [whole[begin:end].tobytes() for begin, end in itertools.pairwise([0, *ends.tolist()])]

    def give_up(self) -> None:
        """Let the others know that this rank exchanges nothing any more; those that wait raise."""
        with suppress(Exception):  # the store may have gone with the rank that kept it
            self._store.set("over", "")

    def _connected(self) -> list[_Group]:
        if self._groups is None:
            # Nodes of unlike size say unlike numbers, and there is one plan: that of the rank which came first.
            plan = levels(self.ranks, self._fan, int(self._store.compare_set("local", "", str(self._local))))
            self._groups = []
            for level, groups in enumerate(plan):
                number, members = next((i, group) for i, group in enumerate(groups) if self.rank in group)
                store = c10d.PrefixStore(f"{level}/{number}", self._store)
                place = members.index(self.rank)
                gloo = _lazy_group(store, place, len(members), self.timeout)
                self._groups.append(_Group(gloo, place, len(members)))
                if place:
                    break
        return self._groups

    def reduce(self, wanted: Sequence[tuple[Numbers, np.ufunc]]) -> list[Numbers]:
        """Return the sum (np.add) or the largest (np.maximum) of several arrays at once."""
        sizes = [numbers.nbytes for numbers, _ in wanted]
        memory, ends = np.empty(sum(sizes), np.uint8), np.cumsum(sizes).tolist()
        wholes = []
        for (numbers, _), end in zip(wanted, ends, strict=True):
            wholes.append(memory[end - numbers.nbytes : end].view(numbers.dtype).reshape(numbers.shape))
            wholes[-1][...] = numbers
        groups = self._connected() if memory.size else []
        for group in groups:
            if group.size * memory.nbytes > _GATHERED:
                self._reduce_along(group, wholes, [how for _, how in wanted])
                continue
            for (numbers, how), whole, each in zip(
                wanted, wholes, self._gather_along(group, memory, ends), strict=True
            ):
                if group.place == 0:
                    with np.errstate(over="ignore", invalid="ignore"):
                        how.reduce(each.view(numbers.dtype).reshape(group.size, *numbers.shape), axis=0, out=whole)
        for group in reversed(groups):
            options = c10d.BroadcastOptions()
            options.rootRank = 0
            self._finish([group.gloo.broadcast([torch.from_numpy(memory)], options)], memory)
        return wholes

    def _gather_along(self, group: _Group, memory: Numbers, ends: Sequence[int]) -> list[Numbers]:
        """Return each section as ``[members, bytes]``, on the first member.

        These are the fewest messages: for a few kB it is they that take the time.
        """
        everybodys = np.empty((group.size if group.place == 0 else 0, memory.size), np.uint8)
        options = c10d.GatherOptions()
        options.rootRank = 0
        into = [list(torch.from_numpy(everybodys).unbind())] if group.place == 0 else []
        self._finish([group.gloo.gather(into, [torch.from_numpy(memory)], options)], (everybodys, memory))
        return [everybodys[:, begin:end] for begin, end in itertools.pairwise([0, *ends])]

    def _reduce_along(self, group: _Group, wholes: Sequence[Numbers], by: Sequence[np.ufunc]) -> None:
        """Reduce what is too large to be at one member all at once."""
        works = []
        for whole, how in zip(wholes, by, strict=True):
            if whole.size:
                options = c10d.ReduceOptions()
                options.reduceOp, options.rootRank = _AS_REDUCE_OP[how], 0
                works.append(group.gloo.reduce([torch.from_numpy(whole.reshape(-1))], options))
        self._finish(works, wholes)

    def _finish(self, works: Sequence[Any], memory: Any) -> None:
        """Poll until all are done: a thread that waits inside gloo aborts the process when the interpreter ends."""
        begin, look = time.monotonic(), _LOOK
        try:
            while not all(work.is_completed() for work in works):
                waited = time.monotonic() - begin
                if waited > self.timeout:
                    raise TimeoutError(f"expected the ranks {some(self.ranks)} to come within {self.timeout:g} s")
                if self.is_ending:
                    raise RuntimeError("the process ends")
                if waited > look:  # who is gone is seen by its neighbours alone
                    look += max(_LOOK, waited / 8)
                    if self._store.check(["over"]):
                        raise RuntimeError("another rank has given up")
                time.sleep(min(max(_POLL, waited / 8), _LONGEST_POLL))
            for work in works:
                work.wait()  # is done: raises what failed
        except BaseException:
            keep((works, memory))  # which they may still read and write
            self.give_up()
            raise


def _lazy_group(store: Store, place: int, size: int, timeout: float) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    # Those that torch.distributed chooses, but connecting when they are used: connecting at once blocks a thread.
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = c10d.ProcessGroupGloo
    options._devices = [make.create_device(interface=name, lazy_init=True) for name in names] or [
        make.create_default_device(lazy_init=True)
    ]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    group = c10d.ProcessGroupGloo(store, place, size, options)
    keep(group)
    return group


def keep(anything: Any) -> None:
    """Keep an object alive for good, beyond the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(anything))


def some(ranks: Sequence[int]) -> str:
    """Return the first of them, and how many more there are."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _name_of(ranks: Sequence[int]) -> str:
    """Return a name, the same for the same ranks in the same order."""
    return blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()
