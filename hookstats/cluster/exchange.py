"""Process groups of hookstats' own: a mismatch or a timeout there aborts no collective of the trainer's.

They are gloo's, over a copy of the default group's store. `torch.distributed.new_group` would not do: it names groups
by a count that all ranks must share, with the user's own groups, too.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hookstats.cluster.tree import default_store

Array = npt.NDArray[Any]
_dist: Any = dist  # its stores and groups have no types


class Exchange:
    """A gloo group of these ranks, each of which calls the same methods in the same order.

    RuntimeError where a rank did not come in time, or is gone. That closes the group; `exchange_among` makes the next.
    """

    def __init__(self, name: str, ranks: Sequence[int], timeout: timedelta) -> None:
        """Waits for all of them."""
        self.ranks = list(ranks)
        self.place = self.ranks.index(dist.get_rank())
        self._of = weakref.ref(_default_group())
        self._store = default_store()
        # How many groups of this name broke, as its members have said.
        self._key = f"{name}/broken"
        self._number = self._broken()
        self._timeout = timeout
        place = _dist.PrefixStore(f"{name}/{self._number}", self._store)
        with self._all_there():
            self._group = _dist.ProcessGroupGloo(place, self.place, len(self.ranks), timeout)

    def is_over(self) -> bool:
        """Whether the group broke, or torch.distributed was initialised anew."""
        return self._of() is not _default_group() or self._broken() != self._number

    def gather(self, mine: Array) -> Array:
        """The arrays of all ranks, [ranks, ...]; they have one shape and dtype. One collective."""
        own = torch.from_numpy(np.ascontiguousarray(mine)).reshape(-1)
        everyone = [torch.empty_like(own) for _ in self.ranks]
        with self._all_there():
            self._group.allgather([everyone], [own]).wait()
        return np.stack([each.numpy() for each in everyone]).reshape(len(self.ranks), *mine.shape)

    def gather_json(self, mine: object) -> list[Any]:
        """What each of the ranks has to say, as JSON can. Two collectives."""
        text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
        sizes = self.gather(np.array([len(text)]))
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: len(text)] = text
        texts = self.gather(padded)
        return [json.loads(bytes(each[:size])) for each, size in zip(texts, sizes[:, 0], strict=True)]

    def _broken(self) -> int:
        return int(self._store.get(self._key)) if self._store.check([self._key]) else 0

    @contextmanager
    def _all_there(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            with suppress(RuntimeError):  # several may say so: they count once
                self._store.compare_set(self._key, str(self._number or ""), str(self._number + 1))
            raise RuntimeError(
                f"hookstats: expected the ranks {self.ranks} to come within {self._timeout.total_seconds():g} s, got: "
                f"{error}"
            ) from error


_exchanges: dict[str, Exchange] = {}


def exchange_among(purpose: str, ranks: Sequence[int], timeout: timedelta) -> Exchange:
    """That of one purpose among these ranks, of which this process is one; kept from call to call."""
    numbered = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    name = f"hookstats/{purpose}/{numbered}"
    if name not in _exchanges or _exchanges[name].is_over():
        _exchanges[name] = Exchange(name, ranks, timeout)
    return _exchanges[name]


def _default_group() -> Any:
    return dist.group.WORLD
