"""A store and groups of hookstats' own: a mismatch or a timeout there aborts no collective of the trainer's.

They are gloo's, over a copy of the default group's store. `torch.distributed.new_group` would not do: it names groups
by a count that all ranks must share, with the user's own groups, too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeAlias

import torch
import torch.distributed

c10d: Any = torch.distributed  # its stores and groups have no types
Store: TypeAlias = Any
Group: TypeAlias = Any


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


def name_of(ranks: Sequence[int]) -> str:
    """A name for the store's keys, the same for the same ranks in the same order."""
    return blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()


def lazy_group(store: Store, place: int, size: int, timeout: float) -> Group:
    """A group in which this rank is the member `place`. It connects with nobody before its first collective.

    It is never destroyed: where a member has failed that may hang, with the GIL held (seen in torch 2.13). Its two
    threads sleep.
    """
    options = c10d.ProcessGroupGloo._Options()
    options._devices = _devices()
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    group = c10d.ProcessGroupGloo(store, place, size, options)
    keep(group)
    return group


def _devices() -> list[Any]:
    """Those that torch.distributed chooses, but connecting when they are used: connecting at once blocks a thread."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if names:
        return [c10d.ProcessGroupGloo.create_device(interface=name, lazy_init=True) for name in names]
    return [c10d.ProcessGroupGloo.create_default_device(lazy_init=True)]


def keep(anything: Any) -> None:
    """For good, beyond the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(anything))
