"""Communication of ranks: one primitive, an all-reduce, over gloo groups of hookstats' own.

A mismatch or a timeout here aborts no collective of the trainer's. The store is a copy of the default group's;
`torch.distributed.new_group` would not do: it names groups by a count that all ranks must share, with the user's own
groups, too. gloo connects all members of a group with each other, which fails or crawls beyond some 60 nodes
(Megatron-LM 877, gloo 327): so a few ranks, most often those of a node, reduce, then their first members do, and so on.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from hookstats.cluster.union import compute_checksum, some

c10d: Any = torch.distributed  # its stores and groups have no types
Store: TypeAlias = Any
Numbers: TypeAlias = NDArray[Any]
Fold: TypeAlias = Callable[[Numbers], Numbers]  # of [members, ...] makes [...]

FAN = 8  # members of a group
_AT_ONCE = 8 << 20  # bytes of a group's members that may be at its first member at once
_POLL, _LONGEST_POLL = 1e-4, 2e-2  # seconds between two looks at a collective
# By the group of all ranks: how many there are of a name over the same ranks.
_made: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_LOOK = 0.5  # seconds until the first look at the store; later ones are farther apart


def find_default_store() -> Store:
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


total: Fold = partial(np.sum, axis=0)
largest: Fold = partial(np.max, axis=0)


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

    def __init__(self, name: str, ranks: Sequence[int], timeout: float) -> None:
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
        digest = blake2b(repr(self.ranks).encode(), digest_size=8).hexdigest()
        name, made = f"{name}/{digest}", _made.setdefault(c10d.group.WORLD, Counter())
        self._store = c10d.PrefixStore(f"hookstats/{name}/{made[name]}", find_default_store())
        made[name] += 1
        self._groups: list[_Group] | None = None

    def max(self, numbers: Numbers) -> Numbers:
        """Return the largest of each element of arrays of one shape."""
        return self.reduce([numbers], [largest])[0]

    def gather(self, mine: Numbers) -> Numbers:
        """Return the int64 arrays of all ranks, of one shape, as ``[ranks, ...]``."""
        everybodys = np.zeros((len(self.ranks), *mine.shape), np.int64)
        everybodys[self.place] = mine
        return self.reduce([everybodys], [total])[0]

    def gather_texts(self, mine: bytes) -> list[bytes]:
        """Return the text of each rank. Of equal ones one crosses the network; none, where all are equal."""
        checksums, sizes = self.gather(np.array([compute_checksum(mine), len(mine)])).T.tolist()
        distinct = list(dict.fromkeys(checksums))
        if len(distinct) == 1:
            return [mine] * len(checksums)
        shown, own = np.zeros((len(distinct), max(sizes)), np.uint8), checksums[self.place]
        if checksums.index(own) == self.place:
            shown[distinct.index(own), : len(mine)] = np.frombuffer(mine, np.uint8)
        rows = zip(distinct, self.max(shown), strict=True)
        texts = {each: row[: sizes[checksums.index(each)]].tobytes() for each, row in rows}
        return [texts[each] for each in checksums]

    def give_up(self) -> None:
        """Let the others know that this rank exchanges nothing any more; those that wait raise."""
        with suppress(Exception):  # the store may have gone with the rank that kept it
            self._store.set("over", "")

    def _connect(self) -> list[_Group]:
        """Return this rank's groups: FAN ranks, the first ones of FAN such groups, and so on."""
        if self._groups is None:
            self._groups, left = [], self.ranks
            while len(left) > 1 and self.rank in left:
                number, place = divmod(left.index(self.rank), FAN)
                size = len(left[FAN * number :][:FAN])
                if size > 1:
                    store = c10d.PrefixStore(f"{len(left)}/{number}", self._store)
                    self._groups.append(_Group(_lazy_group(store, place, size, self.timeout), place, size))
                left = left[::FAN]
        return self._groups

    def reduce(self, arrays: Sequence[Numbers], folds: Sequence[Fold]) -> list[Numbers]:
        """Fold arrays of all ranks, which have the same shapes on all; all get the same bits.

        A fold makes of ``[members, ..., n]`` ``[..., n]``, each of the n by itself: of so many at a time as the first
        member of a group can hold of all.
        """
        wholes = [np.empty_like(each) for each in arrays]
        pieces = max(1, -(-FAN * sum(each.nbytes for each in arrays) // _AT_ONCE))
        for i in range(pieces):
            ends = [(each.shape[-1] * i // pieces, each.shape[-1] * (i + 1) // pieces) for each in arrays]
            parts = [each[..., begin:end] for each, (begin, end) in zip(arrays, ends, strict=True)]
            found = self._reduce_at_once(parts, folds)
            for whole, part, (begin, end) in zip(wholes, found, ends, strict=True):
                whole[..., begin:end] = part
        return wholes

    def _reduce_at_once(self, arrays: Sequence[Numbers], folds: Sequence[Fold]) -> list[Numbers]:
        memory = np.concatenate([np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in arrays])
        ends = np.cumsum([each.nbytes for each in arrays]).tolist()
        places = [slice(end - each.nbytes, end) for each, end in zip(arrays, ends, strict=True)]
        groups = self._connect() if memory.size else []
        for group in groups:
            everybodys = np.empty((group.size if group.place == 0 else 0, memory.size), np.uint8)
            options = c10d.GatherOptions()
            options.rootRank = 0
            into = [list(torch.from_numpy(everybodys).unbind())] if group.place == 0 else []
            self._finish(group.gloo.gather(into, [torch.from_numpy(memory)], options), (everybodys, memory))
            if group.place == 0:
                for each, fold, here in zip(arrays, folds, places, strict=True):
                    whole = fold(everybodys[:, here].view(each.dtype).reshape(group.size, *each.shape))
                    memory[here] = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
        for group in reversed(groups):
            options = c10d.BroadcastOptions()
            options.rootRank = 0
            self._finish(group.gloo.broadcast([torch.from_numpy(memory)], options), memory)
        return [memory[here].view(each.dtype).reshape(each.shape) for each, here in zip(arrays, places, strict=True)]

    def _finish(self, work: Any, memory: Any) -> None:
        """Poll until it is done: a thread that waits inside gloo aborts the process when the interpreter ends."""
        begin, look = time.monotonic(), _LOOK
        try:
            while not work.is_completed():
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
            work.wait()  # is done: raises what failed
        except BaseException:
            keep((work, memory))  # which they may still read and write
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
