"""What ranks tell each other: one primitive, an all-reduce, over gloo groups of hookstats' own.

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
_POLL, _LONGEST_POLL = 1e-4, 2e-2  # seconds between two looks at a collective
# By the group of all ranks: how many there are of a name over the same ranks.
_made: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_LOOK = 0.5  # seconds until the first look at the store; later ones are farther apart


def default_store() -> Store:
    """A connection of our own to the store of torch.distributed: another one's long wait would block it.

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
    gloo: Any
    place: int  # of this rank among the members, whose first one leads


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
        self._is_top = False

    def sum(self, numbers: Numbers) -> Numbers:
        """``[...]`` of float64 or int64, of the same shape on all ranks: their sum, the same bits on all."""
        return self._reduce([(numbers, c10d.ReduceOp.SUM)])[0]

    def max(self, numbers: Numbers) -> Numbers:
        """The same of the largest; also of uint8."""
        return self._reduce([(numbers, c10d.ReduceOp.MAX)])[0]

    def sum_and_max(self, summed: Numbers, largest: Numbers) -> tuple[Numbers, Numbers]:
        """Of one array the sum, of another one the largest, at once."""
        first, second = self._reduce([(summed, c10d.ReduceOp.SUM), (largest, c10d.ReduceOp.MAX)])
        return first, second

    def gather(self, mine: Numbers) -> Numbers:
        """int64 ``[...]`` of each rank, of one shape, as ``[ranks, ...]``."""
        everybodys = np.zeros((len(self.ranks), *mine.shape), np.int64)
        everybodys[self.place] = mine
        return self.sum(everybodys)

    def gather_texts(self, mine: bytes, wanted: bool = True) -> list[bytes]:
        """Of each rank. wanted: whether that of this rank is; those of others are empty then."""
        text = np.frombuffer(mine if wanted else b"", np.uint8)
        ends = np.cumsum(self.gather(np.array(len(text))))
        whole = np.zeros(ends[-1], np.uint8)
        whole[ends[self.place] - len(text) : ends[self.place]] = text
        whole = self.max(whole)
        return [whole[begin:end].tobytes() for begin, end in itertools.pairwise([0, *ends.tolist()])]

    def give_up(self) -> None:
        """Lets the others know that this rank exchanges nothing any more; those that wait raise."""
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
                self._groups.append(_Group(_lazy_group(store, place, len(members), self.timeout), place))
                self._is_top = level == len(plan) - 1
                if place:
                    break
        return self._groups

    def _reduce(self, wanted: Sequence[tuple[Numbers, Any]]) -> list[Numbers]:
        """Each by its operation."""
        wholes = [torch.from_numpy(np.array(numbers, order="C")) for numbers, _ in wanted]
        groups = self._connected()
        for group in groups:
            self._finish([self._begin(group, whole, op) for whole, (_, op) in zip(wholes, wanted, strict=True)], wholes)
        for group in reversed(groups[: -1 if self._is_top else None]):
            options = c10d.BroadcastOptions()
            options.rootRank = 0
            self._finish([group.gloo.broadcast([whole.view(-1)], options) for whole in wholes if whole.numel()], wholes)
        return [whole.numpy() for whole in wholes]

    def _begin(self, group: _Group, whole: torch.Tensor, op: Any) -> Any:
        assert self._groups is not None
        flat = whole.view(-1)
        if not flat.numel():
            return None
        if self._is_top and group is self._groups[-1]:
            options = c10d.AllreduceOptions()
            options.reduceOp = op
            return group.gloo.allreduce([flat], options)
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = op, 0
        return group.gloo.reduce([flat], options)

    def _finish(self, works: Sequence[Any], memory: Sequence[torch.Tensor]) -> None:
        """Looks at them until they are done: a thread that waited inside gloo would abort the interpreter's end."""
        begin, look, running = time.monotonic(), _LOOK, [work for work in works if work is not None]
        try:
            while not all(work.is_completed() for work in running):
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
            for work in running:
                work.wait()  # is done: raises what failed
        except BaseException:
            keep((running, memory))  # which they may still read and write
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
    """For good, beyond the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(anything))


def some(ranks: Sequence[int]) -> str:
    """The first of them, and how many more."""
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _name_of(ranks: Sequence[int]) -> str:
    """The same for the same ranks in the same order."""
    return blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()
